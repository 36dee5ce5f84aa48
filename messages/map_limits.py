"""What a msgpack map may hold, counted before any value of it is made.

One byte on the wire can be a value of 72 bytes in memory (an empty map in a list), and a few bytes can announce a list of millions for
which the decoder takes room at once; compressed, a kilobyte is enough to fill the memory. `check_map` walks the bytes of a map and makes
nothing: at most `MAX_VALUES` values, no list or map that is longer than the bytes behind it, at most `MAX_DEPTH` levels. Maps up to
`WALK_ABOVE` bytes are within bounds by their size and need no walk.
"""

from __future__ import annotations

from typing import Final

from driftline.messages.errors import MalformedMessage

__all__ = ["ARRAY_WEIGHT", "MAX_DEPTH", "MAX_VALUES", "WALK_ABOVE", "check_map"]

MAX_VALUES: Final = 1 << 21
"""Keys, values, lists and maps together: 150 MB in memory at worst, and the manifest of 180,000 tensors."""

ARRAY_WEIGHT: Final = 8
"""An array descriptor of 19 bytes makes a numpy array and its view: some 500 bytes."""

MAX_DEPTH: Final = 28
"""Of lists and maps, the envelope included. The codec's own limit on a body is the lower one."""

WALK_ABOVE: Final = 4096

# How a value begins: (bytes of the length that follows, bytes behind that, kind). Lists and maps hold values, the rest is skipped.
_PLAIN, _LIST, _MAP, _EXT = range(4)


def _starts() -> tuple[tuple[int, int, int] | None, ...]:
    table: list[tuple[int, int, int] | None] = [(0, 0, _PLAIN)] * 256  # small integers, nil, booleans
    table[0xC1] = None
    for k, width in enumerate((1, 2, 4)):
        table[0xC4 + k] = (width, 0, _PLAIN)  # bytes
        table[0xC7 + k] = (width, 1, _EXT)
        table[0xD9 + k] = (width, 0, _PLAIN)  # text
    for first, size in ((0xCA, 4), (0xCB, 8), *((base + k, 1 << k) for base in (0xCC, 0xD0) for k in range(4))):
        table[first] = (0, size, _PLAIN)  # floats and integers
    for k in range(5):
        table[0xD4 + k] = (0, 1 + (1 << k), _EXT)
    for k, width in enumerate((2, 4)):
        table[0xDC + k] = (width, 0, _LIST)
        table[0xDE + k] = (width, 0, _MAP)
    for first in range(0xA0, 0xC0):
        table[first] = (0, first & 0x1F, _PLAIN)
    for first in range(0x90, 0xA0):
        table[first] = (0, first & 0x0F, _LIST)
    for first in range(0x80, 0x90):
        table[first] = (0, first & 0x0F, _MAP)
    return tuple(table)


_STARTS: Final = _starts()


def check_map(data: bytes | memoryview, *, max_values: int = MAX_VALUES) -> None:
    """Raise MalformedMessage unless `data` is exactly one msgpack value within the limits."""
    at, end, values = 0, len(data), 0
    open_levels = [1]  # values still to come, per level
    while open_levels:
        if open_levels[-1] == 0:
            open_levels.pop()
            continue
        open_levels[-1] -= 1
        values += 1
        if values > max_values:
            raise MalformedMessage("too many values", field="map", value=values, remedy=f"at most {max_values}")
        if at >= end:
            raise MalformedMessage("ends inside a value", field="map", value=at)
        start = _STARTS[data[at]]
        if start is None:
            raise MalformedMessage("not msgpack", field="map", value=data[at])
        width, size, kind = start
        at += 1
        if width:
            size += int.from_bytes(data[at : at + width], "big")
            at += width
        if kind == _PLAIN:
            at += size
            continue
        if kind == _EXT:
            at += size
            values += ARRAY_WEIGHT - 1
            continue
        count = size if kind == _LIST else 2 * size
        if count > end - at:
            raise MalformedMessage(f"{end - at} bytes are left", field="map: values announced", value=count)
        if len(open_levels) > MAX_DEPTH:
            raise MalformedMessage("nested too deeply", field="depth", value=len(open_levels), remedy=f"at most {MAX_DEPTH}")
        open_levels.append(count)
    if at != end:
        raise MalformedMessage("bytes behind the value, or missing", field="map", value=at - end)
