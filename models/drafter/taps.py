"""Taps: hidden states of some layers of a target, read while it runs, whatever runs it.

What is read is what a layer's norm reads: of a dense decoder the residual stream, of K3 the mixture of the bank and the prefix (not the prefix), in both before the
norm. Each is scaled to a root mean square of one: streams grow by orders of magnitude from layer to layer. Hooks, so that a layer costs what it did where no tap
is, and their work is captured with the forward's in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from driftline.kernels.attention_residual import aggregate
from driftline.models.causal_lm import CausalLM
from driftline.models.dense.decoder import DenseForCausalLM
from driftline.models.model import K3ForCausalLM, Residual

__all__ = ["Taps"]


class Taps:
    """Of `model`, before layers `layers` (ascending; its number of layers: behind the last). A forward fills them, `take` empties them. ValueError for a model of
    neither family. `close` takes the hooks off again; a context manager does so by itself."""

    def __init__(self, model: CausalLM, layers: Sequence[int]) -> None:
        self._read: dict[int, torch.Tensor] = {}
        self._layers = tuple(layers)
        self._hooks: list[RemovableHandle] = [_norm_before(model, layer).register_forward_pre_hook(partial(self._keep, layer)) for layer in layers]

    def take(self) -> torch.Tensor:
        """Of the last forward: [..., taps * D] in its rows' shape and dtype. RuntimeError when there was none since."""
        read, self._read = self._read, {}
        if len(read) != len(self._layers):
            raise RuntimeError(f"{len(read)} layers were read where {len(self._layers)} are tapped: take once after each forward")
        return torch.cat([read[layer] for layer in self._layers], dim=-1)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._read = [], {}

    def __enter__(self) -> Taps:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep(self, layer: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, Residual):
            bank, prefix, delta = args[:3]
            rows = aggregate(bank, prefix, module.proj.weight[0], module.norm.weight, module.norm.eps, delta=delta).mixed
        else:
            rows = args[0]
        wide = rows.detach().float()
        self._read[layer] = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(rows.dtype)


def _norm_before(model: CausalLM, layer: int) -> nn.Module:
    """What normalises a layer's input (the number of layers: the last one's output) and sees it first."""
    if isinstance(model, K3ForCausalLM):
        inner = model.model
        found = inner.output_attn_res if layer == len(inner.layers) else inner.layers[layer].self_attention_res
    elif isinstance(model, DenseForCausalLM):
        decoder = model.model
        found = decoder.norm if layer == len(decoder.layers) else decoder.layers[layer].input_layernorm
    else:
        raise ValueError(f"{type(model).__name__} has no layers that are known here: give a K3ForCausalLM or a DenseForCausalLM")
    assert isinstance(found, nn.Module)
    return found
