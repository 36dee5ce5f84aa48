"""Feed-forward halves of a K3 layer: a dense SiTU-GLU in the first layers, LatentMoE after them."""

from __future__ import annotations

import torch
from torch import nn

from driftline.kernels.moe import expert_mlp
from driftline.kernels.mxfp4.weights import GROUP, Mxfp4Weight
from driftline.kernels.situ_glu import situ_glu
from driftline.messages.errors import ConfigError
from driftline.models.attention import RMSNorm
from driftline.models.config import K3Config
from driftline.models.linear import Linear
from driftline.models.routes import RouteShape, routed

__all__ = ["DenseMlp", "Experts", "LatentMoe", "PackedExperts", "route_shape"]


class DenseMlp(nn.Module):
    def __init__(self, hidden: int, intermediate: int, config: K3Config) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate)
        self.up_proj = Linear(hidden, intermediate)
        self.down_proj = Linear(intermediate, hidden)
        self.betas = (config.activation_situ_beta, config.activation_situ_linear_beta)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(situ_glu(self.gate_proj(x), self.up_proj(x), *self.betas))
        return out


class Gate(nn.Module):
    """Router weight [E, D] and the selection bias [E]; the bias is frozen in RL, so that replayed routes keep their meaning."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts), requires_grad=False)


class Experts(nn.Module):
    """Routed experts, stacked: w1 (gate), w3 (up) [E, I, Z], w2 (down) [E, Z, I]. Called with rows z [N, Z], ids and gates [N, k], they give [N, Z]."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        experts, inner, latent = config.num_experts, config.moe_intermediate_size, config.routed_expert_hidden_size
        self.w1 = nn.Parameter(torch.empty(experts, inner, latent))
        self.w3 = nn.Parameter(torch.empty(experts, inner, latent))
        self.w2 = nn.Parameter(torch.empty(experts, latent, inner))

    def forward(self, z: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
        return expert_mlp(z, ids, gates, self.w1, self.w3, self.w2, beta, linear_beta)


class PackedExperts(nn.Module):
    """`Experts` in MXFP4, as released: w1, w3 [E, I, Z] and w2 [E, Z, I] are Mxfp4Weight. Frozen buffers, which no optimizer sees and no cast changes.

    Uninitialised, for a checkpoint to fill. Raises ConfigError where a row is no whole number of groups.
    """

    def __init__(self, config: K3Config, device: torch.device | str | None = None) -> None:
        super().__init__()
        experts, inner, latent = config.num_experts, config.moe_intermediate_size, config.routed_expert_hidden_size
        for field, size in (("moe_intermediate_size", inner), ("routed_expert_hidden_size", latent)):
            if size % GROUP:
                raise ConfigError(f"routed experts in MXFP4 share a scale over {GROUP} columns, which must divide this size", field=field, value=size,
                                  remedy="keep the experts unpacked, or choose a multiple")
        for which, out, size_in in (("w1", inner, latent), ("w3", inner, latent), ("w2", latent, inner)):
            self.register_buffer(f"{which}_packed", torch.empty(experts, out, size_in // 2, dtype=torch.uint8, device=device))
            self.register_buffer(f"{which}_scale", torch.empty(experts, out, size_in // GROUP, dtype=torch.uint8, device=device))

    def forward(self, z: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
        return expert_mlp(z, ids, gates, self.w1, self.w3, self.w2, beta, linear_beta)

    @property
    def w1(self) -> Mxfp4Weight:
        return self._weight("w1")

    @property
    def w3(self) -> Mxfp4Weight:
        return self._weight("w3")

    @property
    def w2(self) -> Mxfp4Weight:
        return self._weight("w2")

    def _weight(self, which: str) -> Mxfp4Weight:
        return Mxfp4Weight(self.get_buffer(f"{which}_packed"), self.get_buffer(f"{which}_scale"))


class LatentMoe(nn.Module):
    """Route on the full row, run the experts in the latent space, normalise their sum, project back, add the shared experts."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.top_k, self.scaling = config.num_experts_per_token, config.routed_scaling_factor
        self.betas = (config.activation_situ_beta, config.activation_situ_linear_beta)
        self.gate = Gate(config)
        self.experts: nn.Module = Experts(config)
        self.routed_expert_down_proj = Linear(hidden, latent)
        self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps) if config.latent_moe_use_norm else nn.Identity()
        self.routed_expert_up_proj = Linear(latent, hidden)
        shared = config.num_shared_experts * config.moe_intermediate_size
        self.shared_experts = DenseMlp(hidden, shared, config) if shared else None

    def forward(self, x: torch.Tensor, replay: torch.Tensor | None = None, complete: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x [..., D]; replay [..., k] recorded ids (int16 or int64; a row with -1 has none and chooses for itself) or None; complete: as `routed` takes it. Returns
        [..., D] and the ids used [..., k] int64. The selection bias chooses and never weighs, so a replayed row does not read it."""
        flat = x.reshape(-1, x.shape[-1])
        wanted = None if replay is None else replay.reshape(-1, replay.shape[-1])
        ids, gates = routed(flat, self.gate.weight, self.gate.e_score_correction_bias, self.top_k, self.scaling, wanted, complete)
        mixed = self.experts(self.routed_expert_down_proj(flat), ids, gates, *self.betas)
        out = self.routed_expert_up_proj(self.routed_expert_norm(mixed))
        if self.shared_experts is not None:
            out = out + self.shared_experts(flat)
        return out.view_as(x), ids.view(*x.shape[:-1], self.top_k)


def route_shape(model: nn.Module) -> RouteShape | None:
    """What routes of this model look like; None when it has no MoE layer, and nothing is recorded or replayed."""
    layers = [module for module in model.modules() if isinstance(module, LatentMoe)]
    if not layers:
        return None
    return RouteShape(len(layers), layers[0].top_k, layers[0].gate.weight.shape[0])
