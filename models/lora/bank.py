"""Many adapters over one base: every row of a batch computes with the adapter it names, as if it were alone with it, and all rows share the base's products.

    bank = AdapterBank(model, slots=16, rank=64, targets="all-linear")
    bank.put(3, adapter)
    with bank.rows([3, 3, -1, 7]):              # one adapter a row, -1 for the base alone
        out = model(tokens, cache=cache)

A forward outside of `rows` is refused: it would be the base's, silently. So is changing a slot that a forward is using. A cache holds what an adapter computed, so
whoever keeps one keeps it under the slot's `key`, which changes with what the slot holds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.linear import Linear
from driftline.models.lora.adapter import Adapter, Update
from driftline.models.lora.adapting import Target, dtype_of, targeted
from driftline.models.lora.bank_layers import BankExperts, BankLinear, Stack
from driftline.models.lora.chosen import Chosen
from driftline.models.lora.config import TARGETS, LoraConfig
from driftline.models.lora.experts import MATRICES
from driftline.models.packed import Packed

__all__ = ["AdapterBank"]


class AdapterBank:
    """Takes a model, whose parameters stay where they are, and replaces every target's module; `close` puts them back.

    slots: how many adapters; rank: the largest that fits. The stacks take slots times the memory of an adapter of that rank over all targets, in the weights' dtype.
    Raises ConfigError for settings that hold nothing.
    """

    def __init__(self, model: nn.Module, *, slots: int, rank: int, targets: str | tuple[str, ...] = TARGETS) -> None:
        if slots < 1:
            raise ConfigError("a bank holds at least one adapter", field="slots", value=slots, remedy="give the most that a batch may have")
        matches = LoraConfig(rank, targets=targets).matcher()
        wanted = [target for target in targeted(model) if matches(target.name)]
        if not wanted:
            raise ConfigError("matches no linear or expert module", field="targets", value=targets, remedy='name some, or "all-linear"')
        self.slots, self.rank = slots, rank
        self._stacks: dict[str, Stack] = {}
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []
        self._chosen: ContextVar[Chosen | None] = ContextVar("driftline_adapters", default=None)
        self._lock = threading.Lock()
        self._uses = [0] * slots
        self._keys: list[tuple[int, int] | None] = [None] * slots
        self._versions = 0
        for target in wanted:
            self._replaced.append((target.parent, target.child, target.module))
            setattr(target.parent, target.child, self._layer(target, dtype_of(target)))

    def _layer(self, target: Target, dtype: torch.dtype) -> nn.Module:
        name, module = target.name, target.module
        if isinstance(module, Linear):
            self._stacks[name] = Stack(tuple(module.weight.shape), self.slots, self.rank, dtype=dtype, device=module.weight.device)
            return BankLinear(module, self._stacks[name], self._now)
        stacks = {which: Stack(tuple(getattr(module, which).shape), self.slots, self.rank, dtype=dtype, device=getattr(module, which).device) for which in MATRICES}
        self._stacks |= {f"{name}.{which}": stack for which, stack in stacks.items()}
        return BankExperts(module, stacks, self._now)

    @property
    def nbytes(self) -> int:
        """Bytes of the stacks."""
        return sum(buffer.nbytes for stack in self._stacks.values() for buffer in stack.buffers())

    def key(self, slot: int) -> tuple[int, int]:
        """Of what the slot holds: another adapter, or the same put again, has another. Raises ValueError for an empty slot."""
        key = self._keys[slot] if 0 <= slot < self.slots else None
        if key is None:
            raise ValueError(f"slot {slot} of {self.slots} holds no adapter: put one there first")
        return key

    def put(self, slot: int, adapter: Adapter) -> tuple[int, int]:
        """Copy an adapter into a slot, in place of what it held; returns its key. Modules that it does not name are the base's alone.

        Raises, before anything has changed: ValueError for a slot that is not there or that a forward is using, IntegrityError for an update that is of no target,
        of another shape, or of a rank above the bank's.
        """
        updates = {name: self._fitting(name, update) for name, update in adapter.updates.items()}
        with self._changing(slot):
            for name, stack in self._stacks.items():
                stack.put(slot, updates.get(name))
            self._versions += 1
            self._keys[slot] = (slot, self._versions)
        return self.key(slot)

    def clear(self, slot: int) -> None:
        """Empty a slot. Raises ValueError for one that is not there or that a forward is using."""
        with self._changing(slot):
            for stack in self._stacks.values():
                stack.put(slot, None)
            self._keys[slot] = None

    @contextmanager
    def rows(self, index: Sequence[int], packed: Packed | None = None) -> Iterator[None]:
        """The adapters of the rows of the forwards within, of this thread or task: index[i] is row i's slot, -1 for none; `packed`: the forward's, index its sequences'.

        A row's logits, too, are made within: of all its positions or of one a row, in the rows' order. A ragged choice of positions does not say whose they are, and
        where their number is a multiple of the rows it cannot be refused: an adapted head must not be given one. Raises ValueError for an empty batch, a slot that holds nothing, or another number of sequences than `packed` has.
        """
        index = tuple(index)
        if not index or (packed is not None and packed.count != len(index)):
            raise ValueError(f"index names {len(index)} rows; give one adapter for each {'row' if packed is None else f'of {packed.count} sequences'}")
        chosen = Chosen(index, None if packed is None else packed.lengths, self.slots)
        with self._lock:
            for slot in sorted(set(index) - {-1}):
                self.key(slot)
            for slot in chosen.present:
                self._uses[slot] += 1
        token = self._chosen.set(chosen)
        try:
            yield
        finally:
            self._chosen.reset(token)
            with self._lock:
                for slot in chosen.present:
                    self._uses[slot] -= 1

    def close(self) -> None:
        """Put the model's own modules back."""
        for parent, child, module in self._replaced:
            setattr(parent, child, module)

    def _now(self) -> Chosen:
        chosen = self._chosen.get()
        if chosen is None:
            raise ValueError("this model has a bank of adapters and no rows were chosen: `with bank.rows([...])`, -1 for the base alone")
        return chosen

    @contextmanager
    def _changing(self, slot: int) -> Iterator[None]:
        with self._lock:
            if not 0 <= slot < self.slots:
                raise ValueError(f"slot {slot}: the bank has 0..{self.slots - 1}")
            if self._uses[slot]:
                raise ValueError(f"slot {slot} is used by a forward: put the adapter into another, or wait until its rows are done")
            yield

    def _fitting(self, name: str, update: Update) -> Update:
        """The update, with zeros for the experts that it does not reach."""
        stack = self._stacks.get(name)
        if stack is None:
            raise IntegrityError("no target of this bank", field=name, value=update.shape, remedy="the adapter is of another base, or the bank's targets are too few")
        a, b = stack.get_buffer("A"), stack.get_buffer("B")
        wanted = (*a.shape[1:-2], b.shape[-2], a.shape[-1])
        whole = update.of_experts(wanted[0])
        if whole.shape != wanted:
            raise IntegrityError("B A has another shape than the weight", field=name, value=update.shape, remedy=f"expected {tuple(wanted)}: the adapter is of another base")
        if update.rank > self.rank:
            raise IntegrityError("its rank is above the bank's", field=name, value=update.rank, remedy=f"make the bank with rank={update.rank} or more (now {self.rank})")
        return whole
