"""Programs judged by tests: source = "python:examples/code_task.py". See docs/tasks.md.

The model's program runs in a sandbox and never in this process. It only prints: the expected results stay here, so a program
that does not compute them cannot claim to have.
"""

import json
import re

from driftline.environments.code_tool import run_python

TASKS = {
    "the sum of a list of numbers": "def solve(numbers):\n    return sum(numbers)",
    "the largest number of a list": "def solve(numbers):\n    return max(numbers)",
    "the numbers of a list in reverse order": "def solve(numbers):\n    return numbers[::-1]",
    "the numbers of a list without repetitions, sorted": "def solve(numbers):\n    return sorted(set(numbers))",
    "how many numbers of a list are even": "def solve(numbers):\n    return sum(n % 2 == 0 for n in numbers)",
}
INPUTS = ([1, 2, 3], [5], [4, 4, -2, 9, 0], [7, 7, 7, 8])
BLOCK = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)
# Reads all inputs, prints one line of JSON for each: one start of Python for all the tests.
DRIVER = "\n\nimport json, sys\nfor line in sys.stdin:\n    print(json.dumps(solve(json.loads(line))), flush=True)\n"


def tasks(index, rng):
    what, solution = rng.choice(list(TASKS.items()))
    number = rng.randrange(10**6)
    return f"Task {number}. Write a Python function solve(numbers) that returns {what}. Answer with one ```python block.", solution


def reward(prompt, answer, completion):
    """The fraction of the tests that pass, after the first block of code in the completion."""
    block = BLOCK.search(completion)
    if block is None:
        return 0.0
    asked = "".join(json.dumps(numbers) + "\n" for numbers in INPUTS)
    wanted = _expected(answer)
    printed = run_python(block[1] + DRIVER, stdin=asked, deadline_s=2.0, memory_mb=256).stdout.splitlines()
    return sum(got == want for got, want in zip(printed, wanted, strict=False)) / len(wanted)


def _expected(solution):
    """By our own solution: it is not the model's, so it may run here."""
    space = {}
    exec(solution, space)
    return [json.dumps(space["solve"](list(numbers))) for numbers in INPUTS]
