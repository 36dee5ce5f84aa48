"""The modules of a model that has a bank: a base's product plus, for every token, the low-rank term of that token's own adapter.

Two ways to the same sums. In deterministic mode, and wherever the grouped kernels do not run, each adapter that the batch has is applied to its own tokens at its own
rank, by the operators that a model with that adapter alone calls: equal bits. Otherwise one grouped product over the stacks, ranks padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.grouped_linear import grouped_linear, groups_of
from driftline.kernels.linear import linear
from driftline.kernels.mode import deterministic
from driftline.kernels.situ_glu import situ_glu
from driftline.models.linear import Linear
from driftline.models.lora.adapter import Scaling, Update
from driftline.models.lora.chosen import Chosen, Tokens
from driftline.models.lora.experts import combined, pairs_of
from driftline.models.lora.latent import LatentUpdate
from driftline.models.mlp import Experts, PackedExperts
from driftline.models.packed import moved

__all__ = ["BankExperts", "BankLinear", "Choice", "Stack"]

Choice = Callable[[], Chosen]
"""The rows of the forward that is going on. Raises ValueError outside of one."""


class Stack(nn.Module):
    """n updates of one weight, padded to rank R: A [n, R, in] and B [n, out, R], of experts [n, E, R, in] and [n, E, out, R]. Buffers that no state has."""

    def __init__(self, shape: tuple[int, ...], slots: int, rank: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        *stacked, size_out, size_in = shape
        self.register_buffer("A", torch.zeros(slots, *stacked, rank, size_in, dtype=dtype, device=device), persistent=False)
        self.register_buffer("B", torch.zeros(slots, *stacked, size_out, rank, dtype=dtype, device=device), persistent=False)
        self._held: list[tuple[int, float, Scaling] | None] = [None] * slots
        self._factors: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def put(self, slot: int, update: Update | None) -> None:
        """Replace what the slot holds; None: nothing. What the update's tensors hold later does not reach the stack."""
        a, b = self.get_buffer("A"), self.get_buffer("B")
        a[slot].zero_()
        b[slot].zero_()
        self._held[slot] = None
        if update is not None:
            a[slot, ..., : update.rank, :].copy_(update.a)
            b[slot, ..., : update.rank].copy_(update.b)
            self._held[slot] = update.rank, update.alpha, update.scaling
        self._factors.clear()

    def holds(self, slot: int) -> bool:
        return self._held[slot] is not None

    def update(self, slot: int) -> Update | None:
        """What the slot holds, at its own rank and in memory of its own order."""
        held = self._held[slot]
        if held is None:
            return None
        rank, alpha, scaling = held
        return Update(self.get_buffer("A")[slot, ..., :rank, :].contiguous(), self.get_buffer("B")[slot, ..., :rank].contiguous(), alpha, scaling)

    def factors(self, device: torch.device) -> torch.Tensor:
        """fp32 [n]: what each B A is multiplied by; 0 of an empty slot."""
        if device not in self._factors:
            scales = [0.0 if held is None else held[2].factor(held[1], held[0]) for held in self._held]
            self._factors[device] = torch.tensor(scales, dtype=torch.float32, device=device)
        return self._factors[device]

    def grouped(self, x: torch.Tensor) -> bool:
        """Whether the kernels take all adapters at once."""
        return not deterministic() and x.dtype is torch.bfloat16 and runs_triton(x)

    def term(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """x [N, in]: scale B A x of each token's adapter, [N, out]; zeros where it has none."""
        rows = tokens.rows
        order, back = rows.pairs.long(), rows.rows.long()
        by_adapter = moved(x, order, back)
        if self.grouped(x):
            wide = grouped_linear(grouped_linear(by_adapter, rows, self.get_buffer("A")), rows, self.get_buffer("B")).float()
            slots = tokens.index[order].clamp(min=0)
            return moved((wide * self.factors(x.device)[slots, None]).to(x.dtype), back, order)
        parts = []
        for slot, first, last in tokens.spans:
            update = self.update(slot)
            some = by_adapter[first:last]
            parts.append(some.new_zeros(last - first, self.get_buffer("B").shape[-2]) if update is None else _alone(some, update))
        parts.append(x.new_zeros(x.shape[0] - (tokens.spans[-1][2] if tokens.spans else 0), self.get_buffer("B").shape[-2]))
        return moved(torch.cat(parts), back, order)


def _alone(x: torch.Tensor, update: Update) -> torch.Tensor:
    """As `LoraLinear` adds it."""
    return linear(linear(x, update.a), update.b) * update.scale


class BankLinear(Linear):
    """A linear whose rows have adapters of their own; its parameters are the base's."""

    def __init__(self, base: Linear, stack: Stack, choice: Choice) -> None:
        nn.Module.__init__(self)
        self.base = (base,)  # in a tuple, so that its parameters are not named twice
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight = base.weight
        self.register_parameter("bias", base.bias)
        self.stack, self.choice = stack, choice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, chosen = super().forward(x), self.choice()
        flat = x.reshape(-1, x.shape[-1])
        if not chosen.present or not flat.shape[0]:
            return out
        return out + self.stack.term(flat, chosen.tokens(flat.shape[0], flat.device)).view_as(out)

    def effective_weight(self) -> torch.Tensor:
        """There is none: rows differ. Its presence says that the weight alone is not what the layer applies."""
        raise ValueError("a layer with a bank of adapters has no one weight; call it")

    def latent_update(self, heads: int, nope: int) -> BankLatent | None:
        chosen = self.choice()
        return BankLatent(self.stack, chosen, heads, nope) if chosen.present else None


@dataclass(frozen=True)
class BankLatent:
    """`LatentTerm` of tokens with adapters of their own. Not uniform, unless all rows have one adapter: the layer's rows must be the forward's tokens."""

    stack: Stack
    chosen: Chosen
    heads: int
    nope: int

    @property
    def uniform(self) -> bool:
        return len(set(self.chosen.index)) == 1 and self.chosen.lengths is None

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        return self._each(q, lambda update, some: update.queries(some), self.stack.get_buffer("A").shape[-1])

    def values(self, o: torch.Tensor) -> torch.Tensor:
        return self._each(o, lambda update, some: update.values(some), self.stack.get_buffer("B").shape[-2] // self.heads - self.nope)

    def _each(self, x: torch.Tensor, product: Callable[[LatentUpdate, torch.Tensor], torch.Tensor], width: int) -> torch.Tensor:
        """x [.., H, K] to [.., H, width], adapter by adapter."""
        flat = x.reshape(-1, *x.shape[-2:])
        tokens = self.chosen.tokens(flat.shape[0], flat.device)
        order, back = tokens.rows.pairs.long(), tokens.rows.rows.long()
        by_adapter = moved(flat, order, back)
        out = []
        for slot, first, last in tokens.spans:
            update, some = self.stack.update(slot), by_adapter[first:last]
            out.append(some.new_zeros(last - first, self.heads, width) if update is None else product(LatentUpdate.of(update, self.heads, self.nope), some))
        out.append(flat.new_zeros(flat.shape[0] - (tokens.spans[-1][2] if tokens.spans else 0), self.heads, width))
        return moved(torch.cat(out), back, order).view(*x.shape[:-1], width)


class BankExperts(nn.Module):
    """Routed experts whose tokens have adapters of their own: the base's products by expert, the updates' by adapter and expert."""

    def __init__(self, base: Experts | PackedExperts, stacks: Mapping[str, Stack], choice: Choice) -> None:
        super().__init__()
        self.base = base
        self.stacks = nn.ModuleDict(stacks)
        self.choice = choice

    def forward(self, z: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
        """z [N, Z], ids and gates [N, k]: [N, Z]. A token whose adapter has no update here goes through the base's own operator, as it would alone."""
        chosen = self.choice()
        having = frozenset(slot for slot in chosen.present if any(isinstance(stack, Stack) and stack.holds(slot) for stack in self.stacks.values()))
        if not having or not z.shape[0]:
            return self._plain(z, ids, gates, beta, linear_beta)
        tokens = chosen.tokens(z.shape[0], z.device)
        some, others = tokens.parted(having)
        adapted = self._adapted(z[some], ids[some], gates[some], beta, linear_beta, tokens.index[some, None], chosen.slots)
        if not others.shape[0]:
            return adapted
        plain = self._plain(z[others], ids[others], gates[others], beta, linear_beta)
        return torch.cat([adapted, plain])[torch.cat([some, others]).argsort()]

    def _plain(self, z: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
        out: torch.Tensor = self.base(z, ids, gates, beta, linear_beta)
        return out

    def _adapted(self, z: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, beta: float, linear_beta: float, index: torch.Tensor, slots: int) -> torch.Tensor:
        """index [N, 1]: each token's adapter."""
        experts = self.base.w1.shape[0]
        rows = groups_of(ids, experts)
        both = torch.where((ids >= 0) & (ids < experts), index * experts + ids, -1)
        pairs = _Pairs(both, slots, experts, rows.pairs.long(), rows.rows.long())
        x = pairs_of(z, rows)
        gate, up = ((grouped_linear(x, rows, getattr(self.base, which)) + self._term(which, x, pairs)) for which in ("w1", "w3"))
        h = situ_glu(gate, up, beta, linear_beta)
        return combined(grouped_linear(h, rows, self.base.w2) + self._term("w2", h, pairs), rows, gates)

    def _term(self, which: str, x: torch.Tensor, pairs: _Pairs) -> torch.Tensor:
        """x [P, in] sorted by expert: the updates' products [P, out] in the same order."""
        stack = self.stacks[which]
        assert isinstance(stack, Stack)
        a, b = (stack.get_buffer(half).flatten(0, 1) for half in ("A", "B"))
        plan = pairs.plan
        there, back = pairs.there, pairs.back
        by_both = moved(x, there, back)
        if stack.grouped(x):
            wide = grouped_linear(grouped_linear(by_both, plan, a), plan, b).float()
            return moved((wide * stack.factors(x.device)[pairs.slots, None]).to(x.dtype), back, there)
        return moved(self._by_rank(stack, by_both, pairs), back, there)

    def _by_rank(self, stack: Stack, x: torch.Tensor, pairs: _Pairs) -> torch.Tensor:
        """Adapter by adapter at its own rank, as `LoraExpert` adds it."""
        starts = pairs.plan.starts[:: pairs.experts].tolist()
        out = [x.new_zeros(0, stack.get_buffer("B").shape[-2])]
        for slot, (first, last) in enumerate(pairwise(starts)):
            update, some = stack.update(slot) if first != last else None, x[first:last]
            if update is None:
                out.append(some.new_zeros(last - first, out[0].shape[1]))
                continue
            rows = groups_of(pairs.sorted_groups[first:last, None] % pairs.experts, pairs.experts)
            out.append(grouped_linear(grouped_linear(some, rows, update.a), rows, update.b) * update.scale)
        out.append(x.new_zeros(x.shape[0] - starts[-1], out[0].shape[1]))
        return torch.cat(out)


class _Pairs:
    """Pairs sorted by adapter and expert beside the same sorted by expert."""

    def __init__(self, both: torch.Tensor, slots: int, experts: int, of_expert: torch.Tensor, rank_by_expert: torch.Tensor) -> None:
        """both [N, k]: adapter * E + expert, -1 for neither; of_expert, rank_by_expert: the pairs in the order by expert, and its inverse."""
        self.plan, self.experts = groups_of(both, slots * experts), experts
        self.there = rank_by_expert[self.plan.pairs.long()]
        self.back = self.plan.rows.long()[of_expert]
        self.sorted_groups = both.reshape(-1)[self.plan.pairs.long()]
        self.slots = self.sorted_groups.clamp(min=0) // experts


