"""Between torch tensors and the policy store's bytes, without copies where the memory allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from driftline.policy_store.tensor import HostTensor, Layout, State

__all__ = ["TORCH_DTYPES", "from_host", "host_layout", "host_tensor", "to_host"]

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "bool": torch.bool, "uint8": torch.uint8, "int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64,
    "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64,
    "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def to_host(tensors: Mapping[str, torch.Tensor]) -> State:
    """Contiguous CPU tensors as a State that shares their memory: the tensors must not change while it is in use."""
    out: State = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().contiguous().view(-1)
        data = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, dtype=np.uint8)
        out[name] = HostTensor(_NAMES[tensor.dtype], tuple(tensor.shape), data)
    return out


def host_tensor(tensor: torch.Tensor) -> HostTensor:
    """A contiguous CPU tensor, its memory shared."""
    return to_host({"": tensor})[""]


def host_layout(shape: Sequence[int], dtype: torch.dtype) -> Layout:
    return Layout(_NAMES[dtype], tuple(int(size) for size in shape))


def from_host(state: State) -> dict[str, torch.Tensor]:
    """A State as tensors that share its memory."""
    out = {}
    for name, host in state.items():
        dtype = TORCH_DTYPES[host.dtype]
        if host.data.size:
            out[name] = torch.from_numpy(host.data).view(dtype).view(host.shape)
        else:
            out[name] = torch.empty(host.shape, dtype=dtype)
    return out
