"""How a learner computes, as every manifest says it: what must agree for a version to be made again bit for bit."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch

from driftline.services.config import Config

__all__ = ["numerics_facts", "processor"]


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


def numerics_facts(config: Config, optimizer: str) -> dict[str, str]:
    """`optimizer`: where its state came from (see `recovery.How`), or `continued`."""
    learner = config.learner
    return {"device": learner.device, "processor": processor(learner.device), "compute": "float32", "policy": config.policy.dtype,
            "torch": torch.__version__, "threads": str(learner.threads), "router_replay": str(learner.router_replay).lower(),
            "optimizer": optimizer}
