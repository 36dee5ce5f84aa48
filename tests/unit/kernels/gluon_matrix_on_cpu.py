# mypy: disable-error-code="no-untyped-call,var-annotated"
"""Run a Gluon kernel of Hopper's matrix unit and copy engine, its own Python source, on CPU tensors, program after program.

Layouts do not matter here (compiling checks that every conversion that must be free is). What is checked on top of values: every address lies in its
tensor; a copy into shared memory destroys its target at once and is there only after the wait on its barrier, which expects just the bytes that were asked
for; a product reads shared memory as late as its wait allows, so that a copy that came too early is seen.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon import language as real
from triton.runtime.jit import JITFunction

__all__ = ["Descriptor", "launcher"]


class Tile(torch.Tensor):
    """A tensor with the few methods that Gluon spells otherwise."""

    def to(self, dtype: Any, bitcast: bool = False) -> Any:  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype)


def tile(x: Any) -> Any:
    return torch.as_tensor(x).as_subclass(Tile)


class Pointer:
    def __init__(self, tensor: torch.Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor, torch.as_tensor(offset).to(torch.int64)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + other)

    def cells(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = self.tensor.view(-1)
        at, live = torch.broadcast_tensors(self.offset.as_subclass(torch.Tensor), torch.as_tensor(True if mask is None else mask).as_subclass(torch.Tensor))
        assert bool((((at >= 0) & (at < flat.numel())) | ~live).all()), "an address outside its tensor"
        return flat, at, live


class Descriptor:
    """A matrix of which the copy engine takes boxes."""

    def __init__(self, tensor: torch.Tensor, block_shape: list[int]) -> None:
        self.tensor, self.block_shape, self.layout, self.dtype = tensor, block_shape, None, tensor.dtype

    def box(self, coordinates: list[Any]) -> torch.Tensor:
        row, col = map(int, coordinates)
        assert col * self.tensor.element_size() % 16 == 0, "the copy engine stops at a column that is no multiple of 16 bytes"
        height, width = self.block_shape
        out = torch.zeros(height, width, dtype=self.tensor.dtype)
        some = self.tensor[max(row, 0) : max(row + height, 0), max(col, 0) : max(col + width, 0)]
        out[: some.shape[0], : some.shape[1]] = some
        return out


class Shared:
    def __init__(self, cells: torch.Tensor) -> None:
        self.cells = cells

    def index(self, i: Any) -> Shared:
        return Shared(self.cells[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.cells.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.cells.permute(order))

    def load(self, layout: object) -> Any:
        return tile(self.cells.clone())

    def store(self, value: torch.Tensor) -> None:
        assert value.shape == self.cells.shape
        self.cells.copy_(value)


class Barrier:
    def __init__(self, count: int) -> None:
        self.cells = [Phase() for _ in range(count)]

    def index(self, i: Any) -> Phase:
        return self.cells[int(i)]


class Phase:
    def __init__(self) -> None:
        self.phase, self.expected, self.asked = 0, 0, []

    def complete(self) -> None:
        assert self.expected == sum(target.cells.numel() * target.cells.element_size() for target, _ in self.asked), "other bytes than were expected"
        assert self.expected, "a wait for what was not asked for"
        for target, box in self.asked:
            target.cells.copy_(box)
        self.phase, self.expected, self.asked = self.phase + 1, 0, []


def poison(cells: torch.Tensor) -> None:
    cells.fill_(torch.nan if cells.dtype.is_floating_point else 0x5A)


class Machine:
    """The part of `triton.experimental.gluon.language` that our kernels use, and the namespaces beside it."""

    bfloat16, float32, int16, int32, int64, uint8 = torch.bfloat16, torch.float32, torch.int16, torch.int32, torch.int64, torch.uint8
    constexpr = staticmethod(lambda x: x)
    static_range = staticmethod(range)
    reshape, permute = staticmethod(torch.reshape), staticmethod(torch.permute)

    def __init__(self, assembly: dict[str, Callable[..., Any]]) -> None:
        self.program, self.assembly, self.pending = 0, assembly, []
        for name in ("SliceLayout", "BlockedLayout", "DistributedLinearLayout", "NVMMADistributedLayout", "DotOperandLayout"):
            setattr(self, name, lambda *args: None)

    def program_id(self, axis: int) -> torch.Tensor:
        return torch.tensor(self.program, dtype=torch.int32).as_subclass(Tile)

    def arange(self, start: int, stop: int, layout: object) -> Any:
        return tile(torch.arange(start, stop, dtype=torch.int32))

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, layout: object) -> Any:
        return tile(torch.zeros(shape, dtype=dtype))

    def load(self, at: Pointer, mask: Any = None, other: float = 0) -> Any:
        flat, offsets, live = at.cells(mask)
        return tile(torch.where(live, flat[torch.where(live, offsets, 0)], torch.tensor(other, dtype=flat.dtype)))

    def store(self, at: Pointer, value: torch.Tensor, mask: Any = None) -> None:
        flat, offsets, live = at.cells(mask)
        assert value.dtype == flat.dtype, "a store that converts"
        value, offsets, live = torch.broadcast_tensors(value.as_subclass(torch.Tensor), offsets, live)
        flat[offsets[live]] = value[live]

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: object) -> Any:
        if dtype is torch.int64:
            return Barrier(shape[0])
        cells = torch.empty(shape, dtype=dtype)
        poison(cells)
        return Shared(cells)

    def minimum(self, a: Any, b: Any) -> Any:
        return tile(torch.minimum(torch.as_tensor(a), torch.as_tensor(b)))

    def maximum(self, a: Any, b: Any) -> Any:
        return tile(torch.maximum(torch.as_tensor(a), torch.as_tensor(b)))

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        a = torch.as_tensor(a)
        return tile(torch.where(torch.as_tensor(condition), a, torch.as_tensor(b, dtype=a.dtype)))

    def sum(self, x: torch.Tensor, axis: int) -> Any:
        return x.sum(axis)

    def assume(self, condition: Any) -> None:
        assert condition

    def convert_layout(self, x: Any, layout: object, assert_trivial: bool = False) -> Any:
        return x

    def expand_dims(self, x: torch.Tensor, axis: int) -> Any:
        return x.unsqueeze(axis)

    def join(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        return torch.stack((a, b), -1)

    def split(self, x: torch.Tensor) -> Any:
        return x[..., 0], x[..., 1]

    def inline_asm_elementwise(self, text: str, constraints: str, args: list[Any], **options: Any) -> Any:
        return self.assembly[text](*args)

    def barrier(self) -> None: ...

    # the matrix unit
    def warpgroup_mma(self, a: Any, b: Any, total: Any, *, is_async: bool) -> Any:
        total = total.clone()
        self.pending.append((a, b, total))
        return total

    def warpgroup_mma_wait(self, outstanding: int, deps: list[Any]) -> Any:
        while len(self.pending) > outstanding:
            a, b, total = self.pending.pop(0)
            left = (a.cells if isinstance(a, Shared) else a).double()
            # a product's result is what later products of the same sum begin from
            total += (left @ b.cells.double()).float()
            for _, _, later in self.pending:
                if later.shape == total.shape:
                    later.copy_(total)
                    break
        return deps[0] if len(deps) == 1 else tuple(deps)

    # the copy engine and its barriers
    def init(self, bar: Phase, count: int) -> None: ...

    def invalidate(self, bar: Phase) -> None:
        assert not bar.asked, "a copy that nobody waited for"

    def expect(self, bar: Phase, size: int, pred: Any = True) -> None:
        if pred:
            assert not bar.expected, "a second expectation in one phase"
            bar.expected = size

    def wait(self, bar: Phase, phase: Any) -> None:
        if bar.phase % 2 == int(phase):
            bar.complete()

    def fetch(self, descriptor: Descriptor, coordinates: list[Any], bar: Phase, target: Shared, pred: Any = True) -> None:
        if pred:
            assert list(target.cells.shape) == descriptor.block_shape
            poison(target.cells)
            bar.asked.append((target, descriptor.box(coordinates)))


def launcher(kernel: JITFunction[Any], modules: list[types.ModuleType], assembly: dict[str, Callable[..., Any]], names: dict[str, Any]) -> Any:
    """What stands in for a kernel: `launcher(...)[grid](*args, **options)`. modules: whose functions it calls; assembly: what a text does; names: what of the
    modules stands for what."""
    machine = Machine(assembly)
    space: dict[str, Any] = {}
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, JITFunction):
                space[name] = types.FunctionType(value.fn.__code__, space, name, value.fn.__defaults__)
            else:
                space[name] = value.value if isinstance(value, real.constexpr) else value
    space["mbarrier"] = types.SimpleNamespace(init=machine.init, invalidate=machine.invalidate, expect=machine.expect, wait=machine.wait, MBarrierLayout=lambda: None)
    space.update(gl=machine, warpgroup_mma=machine.warpgroup_mma, warpgroup_mma_wait=machine.warpgroup_mma_wait, fence_async_shared=lambda: None,
                 wait_for_all=machine.barrier, fetch=machine.fetch, reinterpret=lambda shared, dtype, shape, layout: shared)
    space["range"] = lambda *bounds: (tile(torch.tensor(i, dtype=torch.int32)) for i in range(*map(int, bounds)))
    space.update(names)
    function = space[kernel.fn.__name__]

    class Launcher:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def run(*args: Any, **options: Any) -> None:
                given = [Descriptor(a.base, list(a.block_shape)) if hasattr(a, "block_shape") else Pointer(a) if isinstance(a, torch.Tensor) else a for a in args]
                left = {name: value for name, value in options.items() if name not in ("num_warps", "enable_fp_fusion")}
                for x in range(grid[0]):
                    machine.program, machine.pending = x, []
                    function(*given, **left)

            return run

    return Launcher()
