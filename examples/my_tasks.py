"""Your own tasks and reward: source = "python:examples/my_tasks.py"."""


def tasks(index, rng):
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    return f"{a}+{b}=", str(a + b)


def reward(prompt, answer, completion):
    return float(completion.strip() == answer)
