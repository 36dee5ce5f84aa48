"""Between a module and the named tensors the rest of the system exchanges: K3's public names, one tensor per expert matrix.

The policy's dtype is part of the numerics: weights are rounded to it once, after the optimizer step, and learner and rollout both compute with the
rounded values. What the release keeps in fp32 (gate and convolution parameters, biases of the router) stays fp32. Routed experts that a model holds packed are
part of its policy under their public names, uint8 and frozen: a version names them, its delta finds them unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from driftline.messages.errors import IntegrityError

__all__ = ["export_state", "exported", "load_state", "policy_dtype", "policy_tensors", "public_tensors", "round_to_policy_"]

_FP32 = re.compile(r"(A_log|dt_bias|conv1d\.weight|e_score_correction_bias)$")
_RESIDUAL = re.compile(r"(self_attention_res|mlp_res|output_attn_res)\.(proj|norm)\.")
_STACKED = re.compile(r"^(?P<head>.*\.experts)\.(base\.)?(?P<which>w[123])(?P<part>_packed|_scale)?$")
_PACKED = re.compile(r"(\.weight|\.experts\.(base\.)?w[123])_(packed|scale)$")


def policy_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The stored dtype of a parameter when the policy's is `dtype`."""
    if _PACKED.search(name):
        return torch.uint8
    return torch.float32 if _FP32.search(name) else dtype


def policy_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(module name, tensor) of all a policy is made of: the parameters, tied ones once, then the routed experts that are held packed."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if _PACKED.search(name):
            yield name, buffer


def public_tensors(name: str, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(public name, view) of one of `policy_tensors`: stacked experts are one tensor each."""
    tensor = parameter.detach()
    stacked = _STACKED.match(name)
    if stacked:
        for i in range(tensor.shape[0]):
            yield f"{stacked['head']}.{i}.{stacked['which']}.weight{stacked['part'] or ''}", tensor[i]
    else:
        yield _RESIDUAL.sub(r"\1_\2.", name), tensor


def _named(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(module name, public name, tensor), stacked experts split into views of the same storage; tied tensors once."""
    for name, held in policy_tensors(model):
        for public, tensor in public_tensors(name, held):
            yield name, public, tensor


def exported(public: str, tensor: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A CPU copy in the policy's dtype: later steps do not change it."""
    return tensor.to("cpu", policy_dtype(public, dtype), copy=True).contiguous()


def export_state(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Named CPU tensors in policy dtypes, sorted by name, each a copy."""
    return dict(sorted((public, exported(public, tensor, dtype)) for _, public, tensor in _named(model)))


def load_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Copy every tensor into the module in place. Raises IntegrityError on a missing, extra or misshapen tensor, before any is copied."""
    wanted = {public: tensor for _, public, tensor in _named(model)}
    missing, extra = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
    if missing or extra:
        raise IntegrityError(
            f"{len(missing)} tensors missing, {len(extra)} not in this model", field="state", value=(missing[:3], extra[:3]),
            remedy="the checkpoint and the model's config.json must belong together",
        )
    values = {}
    for name, tensor in wanted.items():
        value = state[name]
        if name.endswith("A_log") and value.dim() == 1 and value.numel() > tensor.numel():
            value = value[: tensor.numel()]  # the release pads A_log to 128 heads
        if value.shape != tensor.shape:
            raise IntegrityError("shape differs from the model's", field=name, value=tuple(value.shape),
                                 remedy=f"expected {tuple(tensor.shape)}")
        if value.is_floating_point() != tensor.is_floating_point():  # a cast would make numbers of codes, or codes of numbers
            raise IntegrityError("packed experts are loaded as uint8, everything else as floating", field=name, value=value.dtype,
                                 remedy=f"expected {tensor.dtype}: the policy and the model must hold their experts in one form")
        values[name] = value
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(values[name])


def round_to_policy_(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
    """Round the module's parameters in place to what `export_state` would store."""
    with torch.no_grad():
        for _, public, tensor in _named(model):
            tensor.copy_(tensor.to(policy_dtype(public, dtype)))
