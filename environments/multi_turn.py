"""Episodes: the model and an environment take turns at one text.

Guarantees: an episode is deterministic in the task and the model's segments; it ends after a bounded number of turns; what a
model writes is never evaluated as code, only as bounded integer and decimal arithmetic. A single-turn task is an episode that
ends after one segment, so a rollout engine knows only episodes.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from typing import Protocol

from driftline.messages.errors import ConfigError
from driftline.messages.types import Task

__all__ = [
    "CalculatorEpisode",
    "Done",
    "DoneReason",
    "Episode",
    "Observation",
    "SingleTurn",
    "calculate",
    "open_episode",
    "stop_strings",
]

CALL_OPEN, CALL_CLOSE = "<calc>", "</calc>"


class DoneReason(StrEnum):
    ANSWERED = "answered"
    TURN_LIMIT = "turn_limit"


@dataclass(frozen=True)
class Observation:
    """The environment's segment: appended after the model's, masked from the loss, and the model goes on from it."""

    text: str


@dataclass(frozen=True)
class Done:
    reason: DoneReason


class Episode(Protocol):
    """One conversation. `start` once, then `step` with each model segment until it answers Done."""

    def start(self) -> str:
        """The prompt."""
        ...

    def step(self, text: str) -> Observation | Done: ...


def open_episode(task: Task) -> Episode:
    """The episode a task asks for by `metadata["tool"]`; without one, a single turn."""
    match task.metadata.get("tool"):
        case None:
            return SingleTurn(task.prompt)
        case "calculator":
            return CalculatorEpisode(task.prompt)
        case tool:
            raise ConfigError("no such tool", field="task.metadata.tool", value=tool, remedy='use "calculator"')


def stop_strings(task: Task) -> tuple[str, ...]:
    """Where the sampler must hand a segment over before the model ends its turn."""
    return (CALL_CLOSE,) if task.metadata.get("tool") == "calculator" else ()


@dataclass
class SingleTurn:
    prompt: str

    def start(self) -> str:
        return self.prompt

    def step(self, text: str) -> Observation | Done:
        return Done(DoneReason.ANSWERED)


@dataclass
class CalculatorEpisode:
    """`<calc>12 * 7</calc>` at the end of a segment is answered `<result>84</result>`; a segment without a call is the answer."""

    prompt: str
    max_calls: int = 4
    calls: int = field(default=0, init=False)

    def start(self) -> str:
        return self.prompt

    def step(self, text: str) -> Observation | Done:
        body = _last_call(text)
        if body is None:
            return Done(DoneReason.ANSWERED)
        if self.calls >= self.max_calls:
            return Done(DoneReason.TURN_LIMIT)
        self.calls += 1
        return Observation(f"<result>{calculate(body)}</result>")


def _last_call(text: str) -> str | None:
    """The expression of a call that ends the segment."""
    text = text.rstrip()
    if not text.endswith(CALL_CLOSE):
        return None
    _, opened, body = text.removesuffix(CALL_CLOSE).rpartition(CALL_OPEN)
    return body if opened else None


# 256 characters and 4,096 bits bound the work: the largest power is refused before it is computed.
_LONGEST = 256
_MOST_BITS = 4096
_ARITHMETIC = re.compile(r"[0-9+\-*/%().\s]*")


def calculate(expression: str) -> str:
    """The value of an arithmetic expression as text, or `error: ...`, which is an observation like any other."""
    if len(expression) > _LONGEST:
        return "error: too long"
    if not _ARITHMETIC.fullmatch(expression):
        return "error: not arithmetic"
    try:
        return _text(_value(ast.parse(expression.strip(), mode="eval").body))
    except ZeroDivisionError:
        return "error: division by zero"
    except OverflowError:
        return "error: too large"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error: not arithmetic"


def _text(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            return _bounded(Fraction(str(number)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return _bounded(_apply(op, _value(left), _value(right)))
    raise ValueError(ast.dump(node))


def _apply(op: ast.operator, a: Fraction, b: Fraction) -> Fraction:
    match op:
        case ast.Add():
            return a + b
        case ast.Sub():
            return a - b
        case ast.Mult():
            return a * b
        case ast.Div():
            return a / b
        case ast.FloorDiv():
            return Fraction(a // b)
        case ast.Mod():
            return a % b
        case ast.Pow():
            return _power(a, b)
    raise ValueError(type(op).__name__)


def _power(a: Fraction, b: Fraction) -> Fraction:
    if b.denominator != 1:
        raise ValueError("a root")
    if abs(b) * max(a.numerator.bit_length(), a.denominator.bit_length()) > _MOST_BITS:
        raise OverflowError
    return Fraction(a ** b.numerator)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
        raise OverflowError
    return value
