"""Routed experts with low-rank updates beside their matrices, held unpacked or as MXFP4: the base's product and the update's are added before the activation sees them.

    out = sum over slots of gate * (W2 + U2) h,   h = SiTU-GLU((W1 + U1) z, (W3 + U3) z),   U = scale B A of the slot's expert

The base is never unpacked as a stack nor written merged, so a small update is not rounded away. Each of the products is one of rows with their own expert's
matrix (`kernels.grouped_linear`), and slots are summed in their order: a token's bits are those of that token alone wherever the products' are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from driftline.kernels.grouped_linear import grouped_linear, groups_of
from driftline.kernels.mode import deterministic
from driftline.kernels.moe.plan import Plan
from driftline.kernels.moe.reference import products
from driftline.kernels.mxfp4.reference import dequantised, pack
from driftline.kernels.mxfp4.weights import GROUP, ExpertWeight, Mxfp4Weight
from driftline.kernels.situ_glu import situ_glu
from driftline.models.lora.adapter import Scaling, Update
from driftline.models.lora.linear import added, drawn
from driftline.models.mlp import Experts, PackedExperts
from driftline.models.packed import moved

__all__ = ["MATRICES", "LoraExpert", "LoraExperts", "combined", "merged_experts", "pairs_of", "repacked"]

MATRICES = ("w1", "w3", "w2")
_AT_ONCE = 8192
"""Tokens whose rows are held at a time, k of them a token."""


class LoraExpert(nn.Module):
    """The updates of one stacked matrix [E, out, in]: lora_A [E, r, in], lora_B [E, out, r]."""

    def __init__(self, shape: tuple[int, int, int], rank: int, alpha: float, scaling: Scaling, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        experts, size_out, size_in = shape
        self.alpha, self.scaling = alpha, scaling
        self.scale = scaling.factor(alpha, rank)
        self.lora_A = nn.Parameter(drawn((experts, rank, size_in), dtype, device))
        self.lora_B = nn.Parameter(torch.zeros(experts, size_out, rank, dtype=dtype, device=device))

    def forward(self, x: torch.Tensor, rows: Plan) -> torch.Tensor:
        """x [P, in] in the plan's order: [P, out]."""
        return grouped_linear(grouped_linear(x, rows, self.lora_A), rows, self.lora_B) * self.scale

    def every(self, x: torch.Tensor) -> torch.Tensor:
        """x [E, T, in], each expert's rows: [E, T, out]."""
        return x @ self.lora_A.mT @ self.lora_B.mT * self.scale

    @property
    def update(self) -> Update:
        """Its own, detached: the same memory."""
        return Update(self.lora_A.detach(), self.lora_B.detach(), self.alpha, self.scaling)


class LoraExperts(nn.Module):
    """`base` frozen beside `delta`, an update for each of its matrices or for some."""

    def __init__(self, base: Experts | PackedExperts, delta: Mapping[str, LoraExpert]) -> None:
        super().__init__()
        self.base = base
        self.delta = nn.ModuleDict(delta)

    @classmethod
    def drawn(cls, base: Experts | PackedExperts, rank: int, alpha: float, scaling: Scaling, dtype: torch.dtype) -> LoraExperts:
        """Updates for all three matrices, their B zero."""
        made = {}
        for which in MATRICES:
            weight: ExpertWeight = getattr(base, which)
            made[which] = LoraExpert(_shape(weight), rank, alpha, scaling, dtype=dtype, device=weight.device)
        return cls(base, made)

    @property
    def updates(self) -> dict[str, Update]:
        return {which: expert.update for which, expert in self.delta.items() if isinstance(expert, LoraExpert)}

    def forward(self, z: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
        """z [N, Z], ids and gates [N, k]: [N, Z]. An id outside 0..E-1 adds nothing."""
        few = ids.shape[0] <= 8 * self.base.w1.shape[0]
        if few and z.device.type == "cpu" and not deterministic():
            return self._every(z, ids, gates, beta, linear_beta)
        parts = [self._grouped(z[at : at + _AT_ONCE], ids[at : at + _AT_ONCE], gates[at : at + _AT_ONCE], beta, linear_beta)
                 for at in range(0, max(ids.shape[0], 1), _AT_ONCE)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _grouped(self, z: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
        rows = groups_of(ids, self.base.w1.shape[0])
        x = pairs_of(z, rows)
        gate, up = self._product("w1", x, rows), self._product("w3", x, rows)
        return combined(self._product("w2", situ_glu(gate, up, beta, linear_beta), rows), rows, gates)

    def _product(self, which: str, x: torch.Tensor, rows: Plan) -> torch.Tensor:
        out = grouped_linear(x, rows, getattr(self.base, which))
        return out + self.delta[which](x, rows) if which in self.delta else out

    def _every(self, z: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
        """All experts on all tokens, as the operator without updates does for few tokens on a CPU: updates of zero then change no bit."""
        experts = self.base.w1.shape[0]
        exists = (ids >= 0) & (ids < experts)
        ids = torch.where(exists, ids, 0)
        used = sorted(set(ids.flatten().tolist())) if isinstance(self.base, PackedExperts) else None

        def product(which: str, x: torch.Tensor) -> torch.Tensor:
            out, delta = products(x, getattr(self.base, which), used), dict(self.delta).get(which)
            return out + delta.every(x) if isinstance(delta, LoraExpert) else out

        rows = z.expand(experts, -1, -1)
        outs = product("w2", situ_glu(product("w1", rows), product("w3", rows), beta, linear_beta)).transpose(0, 1)
        picked = outs.gather(1, ids[..., None].expand(-1, -1, z.shape[1]))
        return _summed(picked, torch.where(exists, gates, 0))


def pairs_of(z: torch.Tensor, rows: Plan) -> torch.Tensor:
    """z [N, Z]: the token of each pair, [N k, Z], in the plan's order."""
    each = z[:, None].expand(-1, rows.pairs.shape[0] // max(z.shape[0], 1), -1).reshape(rows.pairs.shape[0], z.shape[1])
    return moved(each, rows.pairs.long(), rows.rows.long())


def combined(y: torch.Tensor, rows: Plan, gates: torch.Tensor) -> torch.Tensor:
    """y [N k, Z] in the plan's order, zero where a pair has no expert; gates [N, k]: [N, Z], the gated sum over slots in their order, in at least fp32."""
    back = moved(y, rows.rows.long(), rows.pairs.long())
    return _summed(back.view(*gates.shape, -1), gates)


def _summed(picked: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """picked [N, k, Z], gates [N, k]: [N, Z]."""
    out: torch.Tensor = _Summed.apply(picked, gates)  # type: ignore[no-untyped-call]
    return out


class _Summed(torch.autograd.Function):
    """Keeps the rows as they are, where a sum of wide products would keep each of them widened."""

    @staticmethod
    def forward(ctx: Any, picked: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(picked, gates)
        wide = torch.promote_types(picked.dtype, torch.float32)
        total = torch.zeros_like(picked[:, 0], dtype=wide)
        for slot in range(gates.shape[1]):
            total = total + picked[:, slot].to(wide) * gates[:, slot, None].to(wide)
        return total.to(picked.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        picked, gates = ctx.saved_tensors
        wide = torch.promote_types(picked.dtype, torch.float32)
        dy = dy.to(wide)
        to_rows, to_gates = (torch.empty_like(given) if wanted else None for given, wanted in zip((picked, gates), ctx.needs_input_grad, strict=True))
        for slot in range(gates.shape[1]):
            if to_rows is not None:
                to_rows[:, slot] = dy * gates[:, slot, None].to(wide)
            if to_gates is not None:
                to_gates[:, slot] = (dy * picked[:, slot].to(wide)).sum(-1)
        return to_rows, to_gates


@torch.no_grad()
def merged_experts(held: LoraExperts) -> Experts | PackedExperts:
    """The base with its updates in its matrices, new memory, in the base's form: MXFP4 is unpacked, added to and packed again an expert at a time, by the rule of
    the released checkpoints, so groups in which nothing changed keep their bits."""
    base = held.base
    out = type(base).__new__(type(base))
    nn.Module.__init__(out)
    for which in MATRICES:
        weight: ExpertWeight = getattr(base, which)
        update = held.updates.get(which)
        if isinstance(weight, torch.Tensor):
            setattr(out, which, nn.Parameter(weight.detach().clone() if update is None else added(weight.detach(), update)))
            continue
        assert isinstance(weight, Mxfp4Weight)  # a model holds packed experts in no other form
        packed, scale = weight.packed.clone(), weight.scale.clone()
        for expert in range(packed.shape[0] if update is not None else 0):
            assert update is not None
            packed[expert], scale[expert] = repacked(packed[expert], scale[expert], update.of_expert(expert))
        out.register_buffer(f"{which}_packed", packed)
        out.register_buffer(f"{which}_scale", scale)
    return out


def repacked(packed: torch.Tensor, scale: torch.Tensor, update: Update) -> tuple[torch.Tensor, torch.Tensor]:
    """One matrix, packed [out, in / 2] and scale [out, in / 32], with its update: summed in fp32 and packed. A group that the sum leaves as it was keeps its codes,
    for one value may have several."""
    before = dequantised(Mxfp4Weight(packed[None], scale[None]), torch.float32)[0]
    after = added(before, update)
    codes, scales = pack(after)
    same = (after == before).view(after.shape[0], -1, GROUP).all(-1)
    return torch.where(same.repeat_interleave(GROUP // 2, -1), packed, codes), torch.where(same, scale, scales)


def _shape(weight: ExpertWeight) -> tuple[int, int, int]:
    experts, size_out, size_in = weight.shape
    return experts, size_out, size_in
