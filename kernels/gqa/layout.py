"""Which keys every query sees: the same of all layers of one forward, so made once of them, and on the device, without a length coming to the host.

A sequence's keys are counted as if those that are skipped were not there: a query's number of keys, and the place of each among them, do not depend on padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

__all__ = ["Layout", "Sizes", "checked", "tiles_of"]


@dataclass(frozen=True)
class Sizes:
    """Of one call: rows of q and of keys over all sequences, heads of both, widths of a key and of a value."""

    queries: int
    keys: int
    heads: int
    key_heads: int
    width: int
    value: int

    @property
    def group(self) -> int:
        """Heads of q that share one of the keys."""
        return self.heads // self.key_heads


@dataclass(frozen=True)
class Layout:
    """starts_q int32 [S + 1]: where each sequence's rows of q begin, of q's first two axes flattened. starts_k int32 [S + 1] or [S]: where each sequence's keys
    begin, in `rows`, or in the keys' first two axes flattened where that is None. rows int32 [keys] or None: which row each of a sequence's keys is.
    counts int32 [S]: a sequence's keys. seen int32 [queries]: how many of them, from the first, a query sees; it never falls within a sequence.
    longest_q, longest_k: bounds of one sequence's queries and keys. valid bool [B, N]: a padded batch's columns; None of packed sequences."""

    starts_q: torch.Tensor
    starts_k: torch.Tensor
    rows: torch.Tensor | None
    counts: torch.Tensor
    seen: torch.Tensor
    longest_q: int
    longest_k: int
    valid: torch.Tensor | None = None
    _tiles: dict[tuple[bool, int, int], torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Kernels read them by address: a view of every other element would be read as other numbers.
        for name in ("starts_q", "starts_k", "rows", "counts", "seen"):
            given: torch.Tensor | None = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, given.to(torch.int32).contiguous())

    @property
    def sequences(self) -> int:
        return self.counts.shape[0]

    @property
    def even(self) -> bool:
        """Whether every query sees one key more than the one before it: no column is skipped."""
        return self.valid is None or self.rows is None

    @cached_property
    def mask(self) -> torch.Tensor | None:
        """bool [B, T, N] of a padded batch: which columns each query sees."""
        if self.valid is None:
            return None
        columns = torch.arange(self.longest_k, device=self.valid.device)
        return (columns <= columns[self.longest_k - self.longest_q :, None]) & self.valid[:, None]

    @staticmethod
    def padded(batch: int, steps: int, columns: int, *, valid: torch.Tensor | None = None, device: torch.device | str = "cpu") -> Layout:
        """Of q [batch, steps, ...] whose tokens are the last columns of keys [batch, columns, ...]; `valid` bool [batch, columns] as in `attention`."""
        device = torch.device(device) if valid is None else valid.device
        each = torch.arange(batch + 1, dtype=torch.int32, device=device)
        ahead = columns - steps
        if valid is None:
            seen = torch.arange(ahead + 1, columns + 1, dtype=torch.int32, device=device).repeat(batch)
            every = torch.ones((), dtype=torch.bool, device=device).expand(batch, columns)
            return Layout(each * steps, each * columns, None, each.new_full((batch,), columns), seen, steps, columns, every)
        counted = valid.cumsum(1, dtype=torch.int32)
        own = torch.arange(batch * columns, dtype=torch.int32, device=device).view(batch, columns)
        # A key's place among its row's is the number of valid columns before it; the skipped are gathered behind them all and never read.
        behind = counted[:, -1:] + (own - own[:, :1]) - counted if columns else own
        place = torch.where(valid, counted - 1, behind)
        rows = torch.empty_like(own).scatter_(1, place.long(), own)
        counts = counted[:, -1].contiguous() if columns else each.new_zeros(batch)
        return Layout(each * steps, each * columns, rows.view(-1), counts, counted[:, ahead:].reshape(-1), steps, columns, valid)

    @staticmethod
    def packed(starts_q: torch.Tensor, starts_k: torch.Tensor, queries: int, keys: int, *, longest_q: int | None = None, longest_k: int | None = None,
               rows: torch.Tensor | None = None) -> Layout:
        """Of sequences behind one another: their bounds int32 [S + 1] among `queries` rows of q and `keys` keys, the queries being the newest of the keys.
        rows int32 [keys]: which row of the keys each is, where they do not lie in that order (a cache and new keys behind it). longest_q, longest_k: where
        known, else all of them."""
        starts_q, starts_k = starts_q.to(torch.int32), starts_k.to(torch.int32)
        lengths, counts = starts_q.diff(), starts_k.diff()
        at = torch.arange(queries, dtype=torch.int32, device=starts_q.device)
        owner = torch.searchsorted(starts_q[1:].contiguous(), at, right=True).clamp_(max=max(lengths.shape[0] - 1, 0))
        seen = (at - starts_q[owner] + 1 + (counts - lengths)[owner]).clamp_(min=0)
        return Layout(starts_q, starts_k, rows, counts, seen, queries if longest_q is None else longest_q, keys if longest_k is None else longest_k)

    def query_tiles(self, group: int, size: int) -> torch.Tensor:
        """`tiles_of` the rows (query, head of the group), `size` to a tile."""
        key = (True, group, size)
        if key not in self._tiles:
            self._tiles[key] = tiles_of(self.starts_q.diff() * group, self.seen.shape[0] * group, size)
        return self._tiles[key]

    def key_tiles(self, keys: int, size: int) -> torch.Tensor:
        """`tiles_of` the keys, `size` to a tile."""
        key = (False, keys, size)
        if key not in self._tiles:
            self._tiles[key] = tiles_of(self.counts, keys, size)
        return self._tiles[key]


def tiles_of(lengths: torch.Tensor, rows: int, tile: int) -> torch.Tensor:
    """int32 [rows // tile + sequences, 2] on the device of `lengths` [S], whose sum is at most `rows`: (sequence, its first row) of every tile, -1 past the
    last. No length comes to the host: no tile but a sequence's last is short, so the rows alone bound their number."""
    each = (lengths + (tile - 1)) // tile
    ends = each.cumsum(0)
    number = torch.arange(rows // tile + lengths.shape[0], device=lengths.device)
    sequence = torch.searchsorted(ends, number, right=True)
    held = sequence.clamp(max=max(lengths.shape[0] - 1, 0))
    first = (number - (ends - each)[held]) * tile
    return torch.stack([torch.where(sequence < lengths.shape[0], sequence, -1), first], 1).to(torch.int32).contiguous()


def checked(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, valid: torch.Tensor | None, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None,
    layout: Layout | None,
) -> Sizes:
    """The sizes of one call. Raises ValueError naming the argument, what it is and what it must be."""
    if q.dim() != 4:
        raise ValueError(f"q is {list(q.shape)}; it must be [B, T, H, D], packed sequences with B = 1")
    batch, steps, heads, width = q.shape
    if keys.dim() != 4 or (keys.shape[0] != batch and layout is None) or keys.shape[3] != width:
        raise ValueError(f"keys is {list(keys.shape)}; it must be [{batch}, N, heads of keys, {width}]")
    if keys.shape[2] == 0 or heads % keys.shape[2]:
        raise ValueError(f"keys has {keys.shape[2]} heads for {heads} of q; the heads of q must be a multiple of them")
    if values.dim() != 4 or values.shape[:3] != keys.shape[:3]:
        raise ValueError(f"values is {list(values.shape)}; it must be [{keys.shape[0]}, {keys.shape[1]}, {keys.shape[2]}, Dv], one of every key")
    if not q.dtype == keys.dtype == values.dtype or not q.dtype.is_floating_point:
        raise ValueError(f"q, keys and values are {q.dtype}, {keys.dtype} and {values.dtype}; they must be of one floating-point dtype")
    given = [t for t in (keys, values, valid, cu_seqlens_q, cu_seqlens_k, layout.seen if layout else None) if t is not None]
    if any(t.device != q.device for t in given):
        raise ValueError(f"keys, values, valid, cu_seqlens_q, cu_seqlens_k and layout must be on the device of q, {q.device}")
    sizes = Sizes(batch * steps, keys.shape[0] * keys.shape[1], heads, keys.shape[2], width, values.shape[3])
    if layout is not None:
        if valid is not None or cu_seqlens_q is not None or cu_seqlens_k is not None:
            raise ValueError("layout says what valid, cu_seqlens_q and cu_seqlens_k say; give it alone or leave it out")
        if layout.seen.shape[0] != sizes.queries:
            raise ValueError(f"layout is of {layout.seen.shape[0]} queries and q has {sizes.queries}; make it of this batch")
        return sizes
    if cu_seqlens_q is None and cu_seqlens_k is None:
        if keys.shape[1] < steps:
            raise ValueError(f"keys has {keys.shape[1]} columns for {steps} of q; the last of them are the new tokens' own")
        if valid is not None and (valid.shape != (batch, keys.shape[1]) or valid.dtype != torch.bool):
            raise ValueError(f"valid is {valid.dtype} {list(valid.shape)}; it must be bool [{batch}, {keys.shape[1]}]")
        return sizes
    if batch != 1 or valid is not None:
        given_too = "given" if valid is not None else "not given"
        raise ValueError(f"cu_seqlens_q goes with one row of packed sequences and without valid; q has {batch} rows, valid is {given_too}")
    for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if ends is None and name == "cu_seqlens_k":
            continue
        if ends is None or ends.dim() != 1 or ends.numel() < 1 or ends.dtype not in (torch.int32, torch.int64):
            found = "not given" if ends is None else f"{ends.dtype} {list(ends.shape)}"
            raise ValueError(f"{name} is {found}; it must be int32 or int64 [sequences + 1], from 0 to the rows packed")
    if cu_seqlens_k is None and keys.shape[1] != steps:
        raise ValueError(f"keys has {keys.shape[1]} rows for {steps} of q: give cu_seqlens_k, which says whose they are")
    if cu_seqlens_k is not None and cu_seqlens_q is not None and cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(f"cu_seqlens_k is {list(cu_seqlens_k.shape)} and cu_seqlens_q {list(cu_seqlens_q.shape)}; they must be of the same sequences")
    return sizes


def layout_of(q: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor | None, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None) -> Layout:
    """Of a call that was not given one, and is `checked`."""
    if cu_seqlens_q is None:
        return Layout.padded(q.shape[0], q.shape[1], keys.shape[1], valid=valid, device=q.device)
    return Layout.packed(cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, q.shape[1], keys.shape[1])
