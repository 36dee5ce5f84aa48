"""Where reasoning-gym is not fit to run in a service as it is: what is replaced, and why.

Guarantees, once `patch_library` has run: no scorer calls `eval` on a model's text; no scorer hands sympy a text that is more
than arithmetic and known functions (sympy's parser evaluates Python); no generator depends on the order of a set of strings,
which changes with the interpreter's hash seed.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from typing import Any

__all__ = ["make_iteration_ordered", "patch_library", "refuses"]

# Their scorers fall back to eval(answer) for answers written as Python lists.
_EVALUATES = (
    "reasoning_gym.algorithmic.binary_matrix",
    "reasoning_gym.algorithmic.number_sorting",
    "reasoning_gym.algorithmic.spiral_matrix",
    "reasoning_gym.algorithmic.string_insertion",
    "reasoning_gym.games.n_queens",
)

# Their scorers call sympy.parse_expr(answer).
_PARSES = frozenset({"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"})

# fmt: off
_FUNCTIONS = frozenset((
    "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh",
    "exp", "log", "ln", "sqrt", "pi", "Abs", "abs", "erf", "Si", "Ci", "li", "Ei", "Integral",
))
# fmt: on
_MATHS = re.compile(r"[0-9A-Za-z_+\-*/^().,\s]*")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ATTRIBUTE = re.compile(r"\.\s*[A-Za-z_]|\)\s*\.|__")
_LONGEST_EXPRESSION = 4096


def patch_library() -> None:
    """Idempotent."""
    for name in _EVALUATES:
        vars(importlib.import_module(name))["eval"] = ast.literal_eval
    polynomials: Any = importlib.import_module("reasoning_gym.algebra.polynomial_multiplication")
    if not isinstance(polynomials.itermonomials, _OrderedMonomials):
        polynomials.itermonomials = _OrderedMonomials(polynomials.itermonomials)
    # Its search walks sets of squares, so which of the shortest solutions is the oracle would depend on the hash seed.
    vars(importlib.import_module("reasoning_gym.games.knight_swap"))["frozenset"] = _Ordered


def refuses(family: str, text: str) -> bool:
    """Whether this text must not reach the family's scorer, because it would be evaluated."""
    if family not in _PARSES:
        return False
    if len(text) > _LONGEST_EXPRESSION or not _MATHS.fullmatch(text) or _ATTRIBUTE.search(text):
        return True
    return any(len(name) > 2 and name not in _FUNCTIONS for name in _NAME.findall(text))


def make_iteration_ordered(family: str, dataset: Any) -> Any:
    match family:
        case "isomorphic_strings" | "ransom_note":
            dataset.letters = _Ordered(dataset.letters)
        case "word_ladder":
            dataset.word_graphs = {
                length: {word: _Ordered(near) for word, near in graph.items()} for length, graph in dataset.word_graphs.items()
            }
    return dataset


class _Ordered(frozenset[str]):
    """A set of strings that iterates in sorted order, as do its differences."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))

    def __sub__(self, other: Any) -> _Ordered:
        return _Ordered(super().__sub__(other))


class _OrderedMonomials:
    """sympy's itermonomials yields from a set; sorted by text it is the same in every process."""

    def __init__(self, monomials: Any) -> None:
        self._monomials = monomials

    def __call__(self, *args: Any) -> list[Any]:
        return sorted(self._monomials(*args), key=str)
