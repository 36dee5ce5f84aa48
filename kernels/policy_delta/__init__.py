"""What a step changed of a policy, found, rounded and written on the device the weights are on. See docs/kernels/policy_delta.md.

The same functions on any device: by the kernels where the spans are on a CUDA device and Triton is there, else by the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from driftline.kernels.policy_delta import reference
from driftline.kernels.policy_delta.spans import LONGEST_SPAN, Rounding, SpanChanges, checked, checked_block

__all__ = ["LONGEST_SPAN", "Comparison", "Put", "Rounding", "SpanChanges", "Xor", "apply_xor", "diff", "fingerprint", "has_kernels", "round_and_diff",
           "xor_blocks"]


def has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None


class Comparison:
    """Pairs of spans that are compared again and again, as after every step of an optimizer. The spans must stay where they are."""

    def __init__(self, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor], rounding: Rounding = Rounding.NONE, *, dense_share: float = 1.0) -> None:
        """At least one pair, of as many elements, contiguous, on one device; the dtypes are those that `rounding` names, any of 1, 2 or 4 bytes
        where it is NONE. Of a span of which more than `dense_share` changed, no changes are listed. Raises ValueError."""
        self._old, self._new, self._rounding, self._dense_share = tuple(old), tuple(new), rounding, dense_share
        self._kernel = None
        if old and has_kernels(old[0].device):
            from driftline.kernels.policy_delta import triton

            self._kernel = triton.Comparison(old, new, rounding, dense_share=dense_share)

    def run(self, *, write: bool = False, wait: bool = True) -> SpanChanges:
        """What differs now. `write`: the old spans then hold the new values, rounded. `wait=False`: the device is not waited for, and the result is
        longer than what it lists (see SpanChanges)."""
        if self._kernel is not None:
            return self._kernel.run(write=write, wait=wait)
        return reference.compare(self._old, self._new, self._rounding, write=write, dense_share=self._dense_share)


class Put:
    """Values to set, where they are already on the device of the spans: `values[j]` at position `at[j]` of span i, for j in
    `starts[i]:starts[i + 1]`. Setting what is set changes nothing."""

    def __init__(
        self, spans: Sequence[torch.Tensor], at: torch.Tensor, values: torch.Tensor, starts: torch.Tensor, *, addresses: torch.Tensor | None = None
    ) -> None:
        """`at` int32 [n], `values` [n] of the spans' width, `starts` int64 [spans + 1]. `addresses` int64 [spans]: the spans', on their device."""
        self._spans, self._at, self._values, self._starts = tuple(spans), at, values, starts
        self._addresses = addresses

    def run(self) -> None:
        """One launch for all spans, on the current stream."""
        if self._spans and has_kernels(self._spans[0].device):
            from driftline.kernels.policy_delta import triton

            triton.put(triton.Table(self._spans, self._addresses), self._at, self._values, self._starts)
        else:
            reference.put(self._spans, self._at, self._values, self._starts)


def diff(base: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(at int32 [n] ascending, xor int8, int16 or int32 [n]): where two tensors of one dtype differ bit for bit, and old XOR new there."""
    changes = Comparison([base.view(-1)], [new.view(-1)]).run()
    return changes.at, changes.xor


def round_and_diff(master: torch.Tensor, param: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round an fp32 master into its bfloat16 parameter, in place, and say what that changed: as `diff` of the parameter before and after.

    What is published of a step is thus found while the step is written; no copy of the older version is kept for it. The parameter then equals
    `master.to(torch.bfloat16)` on that device, bit for bit.
    """
    changes = Comparison([param.view(-1)], [master.view(-1)], Rounding.BFLOAT16).run(write=True)
    return changes.at, changes.xor


def apply_xor(param: torch.Tensor, at: torch.Tensor, xor: torch.Tensor) -> None:
    """XOR `xor` into the elements `at` of a tensor, in place; `at` int32 [n], each position once. Twice is never."""
    starts = torch.tensor([0, at.numel()], dtype=torch.int64, device=at.device)
    changes = SpanChanges(at, xor, starts, starts[1:])
    if has_kernels(param.device):
        from driftline.kernels.policy_delta import triton

        triton.apply_xor(triton.Table([param]), changes)
    else:
        reference.apply_xor([param], changes)


def fingerprint(spans: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 [spans]: a sum over each span's bytes that is the same on every device (see `reference.fingerprint`), to compare copies with."""
    if spans and has_kernels(spans[0].device):
        from driftline.kernels.policy_delta import triton

        return triton.fingerprint(spans)
    return reference.fingerprint(spans)


class Xor:
    """Pairs of spans that are combined again and again, as a policy's tensors with the version before them. The spans must stay where they are."""

    def __init__(self, base: Sequence[torch.Tensor], new: Sequence[torch.Tensor], *, block: int = 4096) -> None:
        """Pairs of spans as `Comparison` takes them, of any one dtype of 1, 2 or 4 bytes and of any length. `block`: elements, a power of two from 256 to 65,536.
        Raises ValueError."""
        checked(base, new, Rounding.NONE, longest=None)
        checked_block(block)
        self._base, self._new, self._block = tuple(base), tuple(new), block
        self._kernel = None
        if base and has_kernels(base[0].device):
            from driftline.kernels.policy_delta import triton_xor

            self._kernel = triton_xor.Xor(base, new, block=block)

    def run(self) -> torch.Tensor:
        """Each new span becomes base XOR new, in place; run again, it becomes new again. Returns int32 [blocks of all spans], end to end: how many
        elements of each block differed. One launch; nothing is waited for."""
        return reference.xor_blocks(self._base, self._new, block=self._block) if self._kernel is None else self._kernel.run()


def xor_blocks(base: torch.Tensor, new: torch.Tensor, *, block: int = 4096) -> torch.Tensor:
    """`new` becomes base XOR new, in place. Both contiguous, of one dtype of 1, 2 or 4 bytes an element and as many elements, of any number, on one
    device; `block` a power of two from 256 to 65,536. Returns int32 [ceil(elements / block)]: how many elements of each block differed, bit for
    bit. The base and the result give `new` back by the same call. Raises ValueError."""
    if has_kernels(base.device):
        from driftline.kernels.policy_delta import triton_xor

        return triton_xor.xor(base.detach(), new.detach(), block=block)
    return reference.xor_blocks([base], [new], block=block)
