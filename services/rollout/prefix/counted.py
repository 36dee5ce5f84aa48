"""Pages and slots, counted: given out once, shared by reference, free again when the last reference is given back."""

from __future__ import annotations

__all__ = ["Counted"]


class Counted:
    """The numbers `first` to `first + count - 1`."""

    def __init__(self, first: int, count: int) -> None:
        self._first = first
        self._references = [0] * (first + max(count, 0))
        self._free = list(range(first + count - 1, first - 1, -1))

    @property
    def total(self) -> int:
        return len(self._references) - self._first

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """One that nobody has. IndexError when there is none: the caller looked before."""
        number = self._free.pop()
        self._references[number] = 1
        return number

    def share(self, number: int) -> int:
        if not self._references[number]:
            raise ValueError(f"{number} is free: what nobody holds cannot be shared")
        self._references[number] += 1
        return number

    def give(self, number: int) -> None:
        if not self._references[number]:
            raise ValueError(f"{number} is free: it was given back before")
        self._references[number] -= 1
        if not self._references[number]:
            self._free.append(number)

    def references(self, number: int) -> int:
        return self._references[number]
