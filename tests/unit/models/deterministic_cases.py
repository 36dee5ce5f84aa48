"""Ways through a model that must give a token the same bits, for K3 and a dense decoder, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from driftline.kernels.mode import Numerics, numerics, set_numerics
from driftline.models.cache import Cache
from driftline.models.causal_lm import CausalLM
from driftline.models.packed import Packed

Rows = list[torch.Tensor]


@contextmanager
def process_in(mode: Numerics) -> Iterator[None]:
    """The whole process, autograd's threads too."""
    before = numerics()
    set_numerics(mode)
    try:
        yield
    finally:
        set_numerics(before)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit: zeros have signs and NaN equals itself."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def all_same(a: Rows, b: Rows) -> bool:
    assert len(a) == len(b) > 0
    return all(same(x, y) for x, y in zip(a, b, strict=True))


def sequences(model: CausalLM, *, seed: int = 0, lengths: tuple[int, ...] = (37, 5, 21, 37, 1, 64)) -> Rows:
    """Token ids int64, each [its length], on the model's device. The fourth begins as the first does."""
    rng = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    rows = [torch.randint(0, model.config.vocab_size, (n,), generator=rng) for n in lengths]
    rows[3][:20] = rows[0][:20]
    return [row.to(device) for row in rows]


def padded(rows: Rows, width: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [B, width], lengths [B]); what is padded is a token like any other."""
    longest = max(len(r) for r in rows) if width is None else width
    assert longest >= max(len(r) for r in rows)
    lengths = torch.tensor([len(r) for r in rows], device=rows[0].device)
    return torch.stack([torch.nn.functional.pad(r, (0, longest - len(r)), value=7) for r in rows]), lengths


def alone(model: CausalLM, rows: Rows) -> Rows:
    """Hidden states of each row in a forward of its own: what every other way is compared with."""
    return [model(row[None]).hidden[0] for row in rows]


def _cut(hidden: torch.Tensor, rows: Rows) -> Rows:
    return [hidden[i, : len(row)] for i, row in enumerate(rows)]


def in_a_batch(model: CausalLM, rows: Rows) -> Rows:
    tokens, lengths = padded(rows)
    return _cut(model(tokens, lengths=lengths).hidden, rows)


def with_more_padding(model: CausalLM, rows: Rows) -> Rows:
    tokens, lengths = padded(rows, max(len(r) for r in rows) + 32)
    return _cut(model(tokens, lengths=lengths).hidden, rows)


def in_another_order(model: CausalLM, rows: Rows) -> Rows:
    order = [4, 2, 5, 0, 3, 1]
    found = in_a_batch(model, [rows[i] for i in order])
    return [found[order.index(i)] for i in range(len(rows))]


def beside_others(model: CausalLM, rows: Rows) -> Rows:
    """Among forty rows with other contents."""
    return in_a_batch(model, [*rows, *sequences(model, seed=1) * 6])[: len(rows)]


def packed(model: CausalLM, rows: Rows) -> Rows:
    bounds = Packed.of([len(r) for r in rows], rows[0].device)
    return list(model(torch.cat(rows)[None], packed=bounds).hidden[0].split([len(r) for r in rows]))


def packed_with_others(model: CausalLM, rows: Rows) -> Rows:
    return packed(model, [*sequences(model, seed=2), *rows])[-len(rows) :]


def _continued(model: CausalLM, rows: Rows, cuts: list[int], *, pack: bool = False) -> Rows:
    """Every row in pieces that end at `cuts`, all rows together; a row that is over has pieces without tokens, so its columns have gaps."""
    cache: Cache | None = None
    outs: list[Rows] = [[] for _ in rows]
    start = 0
    for stop in [*cuts, max(len(r) for r in rows)]:
        pieces = [row[start:stop] for row in rows]
        if pack:
            bounds = Packed.of([len(p) for p in pieces], rows[0].device)
            out = model(torch.cat(pieces)[None], cache=cache, packed=bounds)
            found = list(out.hidden[0].split([len(p) for p in pieces]))
        else:
            tokens, lengths = padded(pieces, stop - start)
            out = model(tokens, lengths=lengths, cache=cache)
            found = _cut(out.hidden, pieces)
        cache, start = out.cache, stop
        for kept, piece in zip(outs, found, strict=True):
            kept.append(piece)
    return [torch.cat(kept) for kept in outs]


def in_pieces(model: CausalLM, rows: Rows) -> Rows:
    return _continued(model, rows, [3, 4, 20, 33])


def in_packed_pieces(model: CausalLM, rows: Rows) -> Rows:
    return _continued(model, rows, [16, 17, 30], pack=True)


def token_by_token(model: CausalLM, rows: Rows) -> Rows:
    return _continued(model, rows, list(range(1, max(len(r) for r in rows))))


def from_a_fork(model: CausalLM, rows: Rows) -> Rows:
    """The first twenty tokens of the first row once, in a batch; then both rows that begin with them from forks of its cache, the other rows whole."""
    tokens, lengths = padded([rows[2], rows[0][:20]])
    prefix = model(tokens, lengths=lengths)
    fork = prefix.cache.take(torch.tensor([1, 1], device=tokens.device)).compact()
    branches = [rows[0][20:], rows[3][20:]]
    tokens, lengths = padded(branches)
    rest = _cut(model(tokens, lengths=lengths, cache=fork).hidden, branches)
    found = alone(model, rows)
    head = prefix.hidden[1, :20]
    return [torch.cat([head, rest[0]]), found[1], found[2], torch.cat([head, rest[1]]), found[4], found[5]]


WAYS: dict[str, Callable[[CausalLM, Rows], Rows]] = {
    way.__name__: way
    for way in (in_a_batch, with_more_padding, in_another_order, beside_others, packed, packed_with_others, in_pieces, in_packed_pieces, token_by_token,
                from_a_fork)
}


def flip_a_bit(weight: torch.Tensor) -> None:
    """The last bit of one element, in place."""
    with torch.no_grad():
        flat = weight.detach().view(-1)
        bits = flat[:1].view(torch.int32 if weight.element_size() == 4 else torch.int16)
        bits ^= 1
