"""The memory of an engine's rows: pages of what attention layers keep of each position, slots of recurrent states. Tensors only; who owns what is known elsewhere.

Its tensors stay where they are as long as it lives, so a CUDA graph may hold their addresses. Page 0 belongs to nobody, and one behind the last is never written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from driftline.kernels.kda_decode import LONGEST_WINDOW, Window
from driftline.messages.errors import ConfigError
from driftline.models.attention import KdaAttention, MlaAttention
from driftline.models.causal_lm import CausalLM
from driftline.models.dense.attention import Attention
from driftline.models.dense.decoder import DenseForCausalLM
from driftline.models.held import Held
from driftline.models.model import K3ForCausalLM
from driftline.models.paged.places import PAGE, Places
from driftline.models.paged.states import (
    KdaStates,
    KeyValuePages,
    LatentPages,
    PagedKda,
    PagedKeyValues,
    PagedLatents,
)

__all__ = ["Pool", "Sizes"]

Layer = KdaStates | LatentPages | KeyValuePages


class Sizes(NamedTuple):
    """Bytes of a page over all layers, and of a slot: its states, and the window to be folded into them. 0 for a model without states, which needs no slots."""

    page_bytes: int
    state_bytes: int


class Pool:
    """`make` gives one. pages: how many, with page 0, which is nobody's; slots; window: the most tokens of a row that a step scores."""

    page = PAGE

    def __init__(self, layers: Sequence[Layer], attentions: Sequence[KdaAttention | MlaAttention | Attention], *, pages: int, slots: int, window: int,
                 most: int | None = None) -> None:
        self.layers, self.pages, self.slots, self.window = tuple(layers), pages, slots, window
        self._attentions = tuple(attentions)
        self.page_bytes, self.state_bytes = _sizes(layers)
        self.device: torch.device = layers[0].tensors()[0].device
        self.positions = pages * PAGE if most is None else min(pages * PAGE, most)
        """No sequence has more tokens: neither the pool has room for them nor, of a model with rotations, the model."""

    @classmethod
    def make(cls, model: CausalLM, *, pages: int, slots: int, window: int = 1) -> Pool:
        """Memory on the model's device, in its dtype, zeroed. slots: of states that rows may have; a dense model needs none.

        Raises ConfigError for a model that is not made of K3's or a dense decoder's layers, and for sizes that hold nothing.
        """
        for field, value, most in (("pages", pages, None), ("window", window, LONGEST_WINDOW)):
            least = 2 if field == "pages" else 1
            if value < least or (most is not None and value > most):
                raise ConfigError("out of range", field=field, value=value, remedy=f"give at least {least}" + ("" if most is None else f" and at most {most}"))
        attentions = _attentions(model)
        if slots < 1 and any(isinstance(attention, KdaAttention) for attention in attentions):
            raise ConfigError("a model with recurrent states keeps each row's in a slot", field="slots", value=slots, remedy="give at least one")
        # Ordinary tensors, whatever mode the caller is in: a tensor of inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            layers = _layers(model, attentions, pages, slots, window)
        if not isinstance(model, DenseForCausalLM):
            return cls(layers, attentions, pages=pages, slots=slots, window=window)
        pool = cls(layers, attentions, pages=pages, slots=slots, window=window, most=model.config.max_position_embeddings + window)
        model.reserve(pool.positions)
        return pool

    @staticmethod
    def sizes(model: CausalLM, window: int = 1) -> Sizes:
        """Of a pool of this model, without making one. Raises as `make`."""
        with torch.inference_mode(False), torch.no_grad():
            return Sizes(*_sizes(_layers(model, _attentions(model), 1, 0, window, device="meta")))

    def held(self, places: Places) -> list[Held]:
        """Every layer's state as the model's layers take it, of one step's tokens."""
        found: list[Held] = []
        for layer in self.layers:
            if isinstance(layer, KdaStates):
                found.append(PagedKda(layer, places))
            elif isinstance(layer, LatentPages):
                found.append(PagedLatents(layer, places))
            else:
                found.append(PagedKeyValues(layer, places))
        return found

    @torch.no_grad()
    def fold(self, slots: torch.Tensor, accepted: torch.Tensor) -> None:
        """Bring the states of slots int32 [B] up to date: accepted int32 [B] tokens of their last windows are folded. The next `decode` has accepted 0 for them."""
        for layer, attention in zip(self.layers, self._attentions, strict=True):
            if isinstance(layer, KdaStates) and isinstance(attention, KdaAttention):
                layer.fold(slots, accepted, attention.decay)

    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Of all layers, page src[i] to page dst[i]."""
        self._copy(self._paged(), src, dst)

    def copy_states(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Of all layers, the folded state of slot src[i] to slot dst[i]."""
        self._copy(self._recurrent(), src, dst)

    def clear_states(self, slots: Sequence[int]) -> None:
        """Make the slots those of sequences that have seen nothing."""
        at = self._index(slots)
        with torch.no_grad():
            for tensor in self._recurrent():
                tensor.index_fill_(0, at, 0)

    @torch.no_grad()
    def clear(self) -> None:
        """Zero everything, where it is: after a step that failed no row is to be trusted."""
        for layer in self.layers:
            for tensor in layer.everything() if isinstance(layer, KdaStates) else layer.tensors():
                tensor.zero_()

    def export_pages(self, pages: Sequence[int]) -> list[torch.Tensor]:
        """Copies on the device, [n, PAGE, ...] each: a layer's rows, or its keys and then its values, layer after layer."""
        return self._taken(self._paged(), pages)

    def import_pages(self, pages: Sequence[int], tensors: Sequence[torch.Tensor], non_blocking: bool = False) -> None:
        """Write what `export_pages` gave, from any device. Raises ValueError for tensors of another number, shape or dtype."""
        self._put(self._paged(), pages, tensors, non_blocking)

    def export_states(self, slots: Sequence[int]) -> list[torch.Tensor]:
        """Copies on the device of folded slots: of each layer its states [n, H, K, K] and the convolution's last inputs [n, W - 1, 3 H K]."""
        return self._taken(self._recurrent(), slots)

    def import_states(self, slots: Sequence[int], tensors: Sequence[torch.Tensor], non_blocking: bool = False) -> None:
        """Write what `export_states` gave, from any device. Raises ValueError as `import_pages`."""
        self._put(self._recurrent(), slots, tensors, non_blocking)

    def _paged(self) -> list[torch.Tensor]:
        return [tensor for layer in self.layers if not isinstance(layer, KdaStates) for tensor in layer.tensors()]

    def _recurrent(self) -> list[torch.Tensor]:
        return [tensor for layer in self.layers if isinstance(layer, KdaStates) for tensor in layer.tensors()]

    def _index(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64).to(self.device, non_blocking=True)

    @torch.no_grad()
    def _copy(self, tensors: Sequence[torch.Tensor], src: Sequence[int], dst: Sequence[int]) -> None:
        if len(src) != len(dst):
            raise ValueError(f"src names {len(src)} and dst {len(dst)}; give one place for each")
        if not src:
            return
        source, target = self._index(src), self._index(dst)
        for tensor in tensors:
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    @torch.no_grad()
    def _taken(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> list[torch.Tensor]:
        at = self._index(numbers)
        return [tensor.index_select(0, at) for tensor in tensors]

    @torch.no_grad()
    def _put(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int], given: Sequence[torch.Tensor], non_blocking: bool) -> None:
        wanted = [(len(numbers), *tensor.shape[1:]) for tensor in tensors]
        found = [tuple(tensor.shape) for tensor in given]
        if found != wanted or any(a.dtype != b.dtype for a, b in zip(given, tensors, strict=True)):
            raise ValueError(f"tensors are {[(*shape, x.dtype) for shape, x in zip(found, given, strict=True)][:2]}...; give {len(wanted)} of "
                             f"{[(*shape, x.dtype) for shape, x in zip(wanted, tensors, strict=True)][:2]}...: another model or another pool exported them")
        at = self._index(numbers)
        for tensor, new in zip(tensors, given, strict=True):
            tensor.index_copy_(0, at, new.to(self.device, non_blocking=non_blocking))


def _known(model: CausalLM) -> K3ForCausalLM | DenseForCausalLM:
    if not isinstance(model, (K3ForCausalLM, DenseForCausalLM)):
        raise ConfigError("a pool is made for K3's layers or a dense decoder's", field="model", value=type(model).__name__, remedy="open the model with open_model")
    return model


def _attentions(model: CausalLM) -> list[KdaAttention | MlaAttention | Attention]:
    return [layer.self_attn for layer in _known(model).decoder_layers()]


def _layers(
    model: CausalLM, attentions: Sequence[KdaAttention | MlaAttention | Attention], pages: int, slots: int, window: int, *, device: str | None = None
) -> list[Layer]:
    weight = _known(model).model.embed_tokens.weight
    dtype, where = weight.dtype, weight.device if device is None else torch.device(device)

    def zeros(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=of, device=where)

    made: list[Layer] = []
    for attention in attentions:
        if isinstance(attention, KdaAttention):
            heads, dim, carried = attention.heads, attention.dim, attention.width - 1
            state = zeros(slots + 1, heads, dim, dim, of=torch.promote_types(dtype, torch.float32))
            held = None if window == 1 else Window.empty(slots + 1, window, heads, dim, dtype=dtype, device=where)
            made.append(KdaStates(state, zeros(slots + 1, carried + (0 if held is None else window), 3 * heads * dim), held, carried))
        elif isinstance(attention, MlaAttention):
            made.append(LatentPages(zeros(pages + 1, PAGE, attention.rank + attention.rope)))
        else:
            made.append(KeyValuePages(*(zeros(pages + 1, PAGE, attention.groups, attention.dim) for _ in range(2))))
    return made


def _sizes(layers: Sequence[Layer]) -> tuple[int, int]:
    paged = sum(tensor[0].nbytes for layer in layers if not isinstance(layer, KdaStates) for tensor in layer.tensors())
    return paged, sum(layer.nbytes for layer in layers if isinstance(layer, KdaStates))
