# mypy: disable-error-code="no-untyped-call,var-annotated"
"""Run a Gluon kernel's own Python source on CPU tensors, program after program: Triton's interpreter knows no Gluon.

What the layouts are does not matter here (compiling checks them). What is checked on top of values: every address lies in its tensor, shared memory is
read only after a barrier that follows its writing (unwritten shared memory is NaN), an asynchronous copy destroys its target at once and is there only
after it was waited for, and it begins only when a barrier has followed the last reading of its target. An asynchronous product reads its operands when it
is waited for; until then nobody may write them, and before it begins a fence and a barrier must have followed their writing.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon import language as real
from triton.runtime.jit import JITFunction

__all__ = ["launcher"]


class Pointer:
    """A place, or a tensor of places, in the storage of a tensor."""

    def __init__(self, tensor: torch.Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor, torch.as_tensor(offset, dtype=torch.int64)
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + other)

    def cells(self, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The storage flat, the offsets and the mask broadcast; every live offset lies inside."""
        flat = torch.empty(0, dtype=self.tensor.dtype).set_(self.tensor.untyped_storage())
        at = self.offset + self.tensor.storage_offset()
        at, live = torch.broadcast_tensors(at, torch.ones((), dtype=torch.bool) if mask is None else mask)
        inside = (at >= 0) & (at < flat.numel())
        assert bool((inside | ~live).all()), "an address outside its tensor"
        return flat, at, live


class State:
    """What is known of a buffer of shared memory since the last barrier."""

    def __init__(self) -> None:
        self.settled = self.read = self.fenced = self.visible = False
        self.products = 0

    def written(self) -> None:
        assert not self.read, "shared memory is written with no barrier after it was read"
        assert not self.products, "shared memory is written while a product reads it"
        self.settled = self.fenced = self.visible = False


class Shared:
    def __init__(self, cells: torch.Tensor, states: list[State]) -> None:
        """Three axes are buffers of two, each with a state of its own."""
        self.cells, self.states = cells, states

    @property
    def state(self) -> State:
        (state,) = self.states
        return state

    def store(self, value: torch.Tensor) -> None:
        assert value.shape == self.cells.shape
        self.state.written()
        self.cells.copy_(value)

    def load(self, layout: object) -> torch.Tensor:
        assert self.state.settled, "shared memory is read with no barrier after it was written"
        self.state.read = True
        return self.cells.clone()

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.cells.narrow(dim, start, length), self.states)

    def index(self, i: int) -> Shared:
        return Shared(self.cells[i], [self.states[int(i)]] if self.cells.dim() == 3 else self.states)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.cells.permute(order), self.states)


class Product:
    """An asynchronous product, taken when it is waited for: as late as it could be."""

    def __init__(self, left: Shared | torch.Tensor, right: Shared, base: torch.Tensor | Product, adds: bool) -> None:
        self.left, self.right, self.base, self.adds = left, right, base, adds
        self.value: torch.Tensor | None = None
        for operand in self.operands():
            assert operand.state.visible, "a product reads shared memory with no fence and barrier after it was written"
            operand.state.products += 1

    def operands(self) -> list[Shared]:
        return [x for x in (self.left, self.right) if isinstance(x, Shared)]

    def take(self) -> None:
        left = self.left.cells if isinstance(self.left, Shared) else self.left
        base = self.base.value if isinstance(self.base, Product) else self.base
        assert base is not None, "a product adds to one that was not taken"
        self.value = left.float() @ self.right.cells.float() + (base if self.adds else 0.0)
        for operand in self.operands():
            operand.state.products -= 1
            operand.state.read = True


class Products:
    def __init__(self) -> None:
        self.begun: list[Product] = []

    def multiply(self, left: Shared | torch.Tensor, right: Shared, base: torch.Tensor | Product, *, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async
        self.begun.append(Product(left, right, base, use_acc))
        return self.begun[-1]

    def wait(self, outstanding: int, products: list[Product]) -> torch.Tensor:
        while len(self.begun) > outstanding:
            self.begun.pop(0).take()
        (product,) = products
        assert product.value is not None, "a product is used before it was waited for"
        return product.value


class Copies:
    """Asynchronous copies into shared memory, as slow and as early as they could be."""

    def __init__(self) -> None:
        self.open: list[tuple[Shared, Pointer, torch.Tensor | None]] = []
        self.groups: list[list[tuple[Shared, Pointer, torch.Tensor | None]]] = []

    def copy(self, target: Shared, at: Pointer, mask: torch.Tensor | None = None) -> None:
        target.state.written()
        target.cells.fill_(torch.nan)
        self.open.append((target, at, mask))

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, outstanding: int) -> None:
        while len(self.groups) > outstanding:
            for target, at, mask in self.groups.pop(0):
                flat, offsets, live = at.cells(mask)
                target.cells.copy_(torch.where(live, flat[torch.where(live, offsets, 0)], 0.0))
                target.state.fenced = False


class Language:
    """The part of `triton.experimental.gluon.language` that our kernels use."""

    float32, bfloat16, int64, int32 = torch.float32, torch.bfloat16, torch.int64, torch.int32
    constexpr = staticmethod(lambda x: x)
    static_range = staticmethod(range)
    SliceLayout = BlockedLayout = NVMMADistributedLayout = NVMMASharedLayout = staticmethod(lambda *args, **options: None)
    exp2, sqrt, rsqrt = staticmethod(torch.exp2), staticmethod(torch.sqrt), staticmethod(torch.rsqrt)
    broadcast = staticmethod(torch.broadcast_tensors)
    convert_layout = staticmethod(lambda x, layout: x)

    def __init__(self) -> None:
        self.program: tuple[int, ...] = ()
        self.grid: tuple[int, ...] = ()
        self.tiles: list[Shared] = []
        self.copies, self.products = Copies(), Products()

    def program_id(self, axis: int) -> torch.Tensor:
        return torch.tensor(self.program[axis], dtype=torch.int32)

    def num_programs(self, axis: int) -> int:
        return self.grid[axis]

    def arange(self, start: int, stop: int, layout: object) -> torch.Tensor:
        return torch.arange(start, stop, dtype=torch.int32)

    def zeros(self, shape: list[int], dtype: torch.dtype, layout: object) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def load(self, at: Pointer, mask: torch.Tensor | None = None, other: float = 0.0) -> torch.Tensor:
        flat, offsets, live = at.cells(mask)
        return torch.where(live, flat[torch.where(live, offsets, 0)], torch.tensor(other, dtype=flat.dtype))

    def store(self, at: Pointer, value: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        flat, offsets, live = at.cells(mask)
        assert value.dtype == flat.dtype, "a store that converts"
        value, offsets, live = torch.broadcast_tensors(value, offsets, live)
        flat[offsets[live]] = value[live]

    def sum(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.sum(axis)

    def full(self, shape: list[int], value: float, dtype: torch.dtype, layout: object) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype)

    def where(self, condition: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
        return torch.where(condition, a, b)

    def max(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.amax(axis)

    def fma(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        assert a.shape == b.shape == c.shape
        return (a.double() * b.double() + c.double()).float()

    def minimum(self, a: Any, b: Any) -> torch.Tensor:
        return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))

    def maximum(self, a: Any, b: Any) -> torch.Tensor:
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: object) -> Shared:
        self.tiles.append(Shared(torch.full(shape, torch.nan, dtype=dtype), [State() for _ in range(shape[0] if len(shape) == 3 else 1)]))
        return self.tiles[-1]

    def fence(self) -> None:
        for state in (state for tile in self.tiles for state in tile.states):
            state.fenced = True

    def barrier(self) -> None:
        for state in (state for tile in self.tiles for state in tile.states):
            state.settled, state.read, state.visible = True, False, state.fenced


def launcher(kernel: JITFunction[Any], module: types.ModuleType, names: dict[str, Callable[[Language], Any]]) -> Any:
    """What stands in for a kernel: `launcher(...)[grid](*args, **options)`. `names`: what of the module's globals stands for what."""
    language = Language()
    space: dict[str, Any] = {}
    for name, value in vars(module).items():
        if isinstance(value, JITFunction):
            space[name] = types.FunctionType(value.fn.__code__, space, name, value.fn.__defaults__)
        else:
            space[name] = value.value if isinstance(value, real.constexpr) else value
    space["gl"] = language
    space["range"] = lambda *bounds: (torch.tensor(i, dtype=torch.int32) for i in range(*map(int, bounds)))
    space.update({name: choose(language) for name, choose in names.items()})
    function = space[kernel.fn.__name__]

    def run(grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        given = [Pointer(a) if isinstance(a, torch.Tensor) else a for a in args]
        options = {name: value for name, value in options.items() if name not in ("num_warps", "maxnreg", "enable_fp_fusion")}
        for z, y, x in itertools.product(*map(range, reversed((*grid, 1, 1)[:3]))):
            language.program, language.grid, language.tiles, language.copies.groups, language.products.begun = (x, y, z), grid, [], [], []
            function(*given, **options)

    class Launcher:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: run(grid, *args, **options)

    return Launcher()
