"""How a learner computes, as every manifest says it: what must agree for a version to be made again bit for bit.

`numerics` is the run's mode and `kernels` the set of operators. `fingerprint` is measured, not declared: a hash of what this process's products, norms, recurrence
and log-softmax make of fixed operands in that mode. Where it differs between two machines, so will log-probabilities.
"""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from driftline.kernels.dispatch import has_triton
from driftline.kernels.kda import kda
from driftline.kernels.linear import linear
from driftline.kernels.logprob import selected_logprobs
from driftline.kernels.mode import KERNEL_SET, Numerics, using
from driftline.kernels.rmsnorm import rmsnorm
from driftline.services.config import Config
from driftline.services.policy_model import compute_dtype

__all__ = ["fingerprint", "numerics_facts", "processor"]

_WIDTH, _ROWS, _HEADS = 128, 20, 2
"""Of the fixed operands: KDA's kernels take heads of 128 channels."""


@cache
def processor(device: str) -> str:
    """What chooses the kernels: the CUDA device's name, or the CPU's model and the instructions torch uses of it."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {names[0] if names else platform.processor()}"


def _kernels(device: str) -> str:
    """The set's number, and what makes its code on a device."""
    if not device.startswith("cuda") or not has_triton():
        return f"{KERNEL_SET} torch"
    try:
        return f"{KERNEL_SET} triton {version('triton')}"
    except PackageNotFoundError:
        return f"{KERNEL_SET} triton"


@cache
def fingerprint(mode: Numerics, device: str, dtype: torch.dtype, threads: int) -> str:
    """16 hexadecimal digits: of the bits that `mode` gives on `device` in `dtype`. `threads`: of torch now, which is what the answer is kept by."""
    source = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source).to(dtype).to(device)

    rows, weight, gain = drawn(_ROWS, _WIDTH), drawn(3 * _WIDTH, _WIDTH), drawn(_WIDTH)
    q, k, v, z = (drawn(1, _ROWS, _HEADS, _WIDTH) for _ in range(4))
    beta, rate, bias = drawn(1, _ROWS, _HEADS), drawn(_HEADS).float(), drawn(_HEADS * _WIDTH).float()
    found = hashlib.blake2b(digest_size=8)
    with using(mode), torch.no_grad():
        normal = rmsnorm(rows, gain, 1e-6)
        parts = [normal, linear(normal, weight), *kda(q, k, v, z, beta, rate, bias), *selected_logprobs(normal, weight, torch.arange(_ROWS, device=device))]
    for part in parts:
        found.update(part.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def numerics_facts(config: Config, optimizer: str) -> dict[str, str]:
    """`optimizer`: where its state came from (see `recovery.How`), or `continued`."""
    learner = config.learner
    mode, dtype = Numerics(config.run.numerics.value), compute_dtype(config, learner.device)
    return {"device": learner.device, "processor": processor(learner.device), "compute": str(dtype).removeprefix("torch."), "policy": config.policy.dtype,
            "torch": torch.__version__, "threads": str(learner.threads), "router_replay": str(learner.router_replay).lower(),
            "numerics": mode.value, "kernels": _kernels(learner.device),
            "fingerprint": fingerprint(mode, learner.device, dtype, torch.get_num_threads()), "optimizer": optimizer}
