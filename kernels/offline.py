# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""Compile what an op launches for a GPU that is not there: what each kernel takes of registers, shared memory and compile time.

Inside `compiling_for(...)`, Triton's launches compile for the named architecture (Hopper: 90) with the arguments they were given, on CPU tensors, and
run nothing: outputs hold whatever `torch.empty` held. Everything on the way is the real path: the arguments' specialisation, the compiler, ptxas.

    with compiling_for(90) as kernels:
        op(*cpu_tensors)
    for kernel in kernels: print(kernel)
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = ["SHARED_LIMIT", "CompiledKernel", "compiling_for"]

SHARED_LIMIT = 232_448
"""Bytes of shared memory that one block of a Hopper GPU may take."""


@dataclass(frozen=True)
class CompiledKernel:
    """One compiled specialisation. registers and spills (bytes of stack a thread) as the compiler's resource report says; shared in bytes a block."""

    name: str
    registers: int
    stack: int
    shared: int
    warps: int
    stages: int
    seconds: float
    grid: tuple[int, ...]
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)

    def sass(self) -> str:
        """The machine code, by the disassembler that Triton's package carries."""
        return _disassembled(self.cubin)

    def count(self, instruction: str) -> int:
        """How many machine instructions begin with this name (HGMMA, QGMMA, LDL, STL, MUFU, ...)."""
        return len(re.findall(rf"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?{instruction}\b", self.sass(), re.MULTILINE))


def _tool(name: str, cubin: bytes, *flags: str) -> str:
    import triton.backends.nvidia as backend

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        tool = Path(next(iter(backend.__path__))) / "bin" / name
        return subprocess.run([tool, *flags, path], capture_output=True, text=True, check=True).stdout


@lru_cache(maxsize=256)
def _disassembled(cubin: bytes) -> str:
    return _tool("nvdisasm", cubin, "-c")


def _resources(cubin: bytes) -> tuple[int, int]:
    found = re.search(r"REG:(\d+) STACK:(\d+)", _tool("cuobjdump", cubin, "--dump-resource-usage"))
    assert found is not None
    return int(found[1]), int(found[2])


class _Utils:
    def load_binary(self, name, binary, shared, device):
        return 0, 0, *_resources(binary), 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": SHARED_LIMIT, "multiprocessor_count": 132, "max_num_regs": 65_536, "warpSize": 32, "sm_clock_rate": 1_980_000,
                "mem_clock_rate": 3_201_000, "mem_bus_width": 6144}

    def fill_tma_descriptor(self, *args):
        return None

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class _Driver:
    """What Triton asks of a driver, for a device of which only the architecture is known."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target, self.utils = GPUTarget("cuda", arch, 32), _Utils()

    def get_current_target(self):
        return self._target

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_current_device(self):
        return 0

    def set_current_device(self, device):
        return None

    def get_current_stream(self, device):
        return 0

    def get_device_capability(self, device=0):
        return divmod(self._target.arch, 10)

    def get_device_interface(self):
        import torch

        return torch.cpu

    def map_python_to_cpp_type(self, kind):
        return kind

    def assemble_tensormap_to_arg(self, tensormaps_info, args):
        return args

    def launcher_cls(self, source, metadata):
        def launch(grid_0, grid_1, grid_2, stream, function, packed, launch_metadata, enter, leave, *args):
            return None

        return launch


@contextmanager
def compiling_for(arch: int = 90) -> Iterator[list[CompiledKernel]]:
    """Launches inside compile for compute capability `arch` (90: Hopper) and run nothing. Yields the kernels, one for each specialisation that was
    launched, in order; nothing is read from Triton's cache, so `seconds` is what a first call costs. Raises ImportError without Triton."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    kernels: list[CompiledKernel] = []
    before, real = driver._active, JITFunction.run
    caches: dict[int, tuple[Any, dict[Any, Any]]] = {}
    found: list[Any] = []

    def run(self, *args, grid, warmup, **kwargs):
        if id(self) not in caches:
            caches[id(self)] = self, dict(self.device_caches)
            self.device_caches.clear()
        start = time.perf_counter()
        kernel = real(self, *args, grid=grid, warmup=warmup, **kwargs)
        spent = time.perf_counter() - start
        if kernel is not None and all(kernel is not k for k in found):
            shape = grid(dict(zip(self.arg_names, args, strict=False)) | kwargs) if callable(grid) else grid
            found.append(kernel)
            registers, stack = _resources(kernel.asm["cubin"])
            kernels.append(CompiledKernel(self.fn.__name__, registers, stack, kernel.metadata.shared, kernel.metadata.num_warps,
                                          kernel.metadata.num_stages, round(spent, 2), tuple(shape), kernel.asm["ptx"], kernel.asm["cubin"]))
        return kernel

    with tempfile.TemporaryDirectory() as folder, _environment("TRITON_CACHE_DIR", folder):
        driver.set_active(_Driver(arch))
        JITFunction.run = run
        try:
            yield kernels
        finally:
            JITFunction.run = real
            driver._active = before
            for function, held in caches.values():
                function.device_caches.clear()
                function.device_caches.update(held)
            for kernel in found:
                kernel.module = None  # it was never loaded, so there is nothing to unload


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
