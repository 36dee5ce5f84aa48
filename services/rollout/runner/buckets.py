"""Sizes that graphs are made for: few enough to be captured all, near enough that little is computed for nothing."""

from __future__ import annotations

__all__ = ["FEWEST_PAGES", "page_bucket", "row_bucket", "row_buckets"]

FEWEST_PAGES = 16
"""Of the narrowest tables, 1,024 tokens: attention's launches end early where a row has fewer, so narrower ones save nothing."""

_SMALL = (1, 2, 4, 8, 16, 24, 32)


def row_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8 and then steps of a half or a third, so that at most a third of the rows is padding beyond 8; `most` is the last. Raises ValueError below 1."""
    if most < 1:
        raise ValueError(f"max_batch is {most}; a step has at least one row")
    sizes, size = list(_SMALL), 32
    while size < most:
        sizes += [size + size // 2, 2 * size]
        size *= 2
    return (*(s for s in sizes if s < most), most)


def row_bucket(rows: int, most: int) -> int:
    """The smallest bucket that holds so many rows. Raises ValueError for more than `most`."""
    if not 1 <= rows <= most:
        raise ValueError(f"a step of {rows} rows; the runner was made for 1 to max_batch = {most}")
    return next(size for size in row_buckets(most) if size >= rows)


def page_bucket(pages: int) -> int:
    """Pages of a row's table: the next power of two."""
    return max(FEWEST_PAGES, 1 << max(pages - 1, 0).bit_length())
