"""Runs flash-linear-attention's own tests of chunk_kda against this repository's KDA, on a CUDA device.

    python benchmarks/kernels/kda_public_tests.py PATH/TO/tests/ops/test_kda.py [pytest's arguments]

Their file is not part of this repository; it is given by its path, and `fla` must be importable for its reference and its tolerances. In it `chunk_kda`
is ours behind an adapter: what their call gives after the norm, the gate and the sigmoid is turned back into the raw inputs that ours takes, in torch
and differentiably. What ours does not have is skipped with the reason: other widths than 128, gates below the bound, keys that are not unit length.
The tests of their other operators are left out.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from driftline.kernels.kda import kda

BOUND = -5.0
EDGE = 1e-6
"""A gate of exactly 0, or at the bound, has no finite raw input; it moves by this part of the bound."""

IGNORED = {"safe_gate", "cu_seqlens_cpu", "disable_recompute", "chunk_size", "use_graph", "max_num_seqs"}
KNOWN = {"scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "lower_bound",
         "cu_seqlens", "A_log", "dt_bias", "state_v_first", "transpose_state_layout"}


def logit(share: torch.Tensor) -> torch.Tensor:
    share = share.clamp(EDGE, 1 - EDGE)
    return torch.log(share) - torch.log1p(-share)


def decay(g: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """Their gate in nats, from whichever input they were given: [B, T, H, K] fp32."""
    if not given.get("use_gate_in_kernel"):
        return g.float()
    heads, width = g.shape[2:]
    raw = g.float() + (given["dt_bias"].float().view(heads, width) if given.get("dt_bias") is not None else 0.0)
    speed = given["A_log"].float().exp().view(heads, 1)
    if given.get("lower_bound") is not None:
        return float(given["lower_bound"]) * torch.sigmoid(speed * raw)
    return -speed * F.softplus(raw)


def chunk_kda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **given: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Their call by our operator. Skips the test for what ours does not have."""
    asked = {name for name, value in given.items() if value is not None and value is not False and name not in KNOWN | IGNORED}
    if asked:
        pytest.skip(f"ours has no {', '.join(sorted(asked))}")
    width = q.shape[-1]
    if width != 128 or v.shape[-1] != 128:
        pytest.skip(f"ours has heads of 128 channels, not {width} and {v.shape[-1]}")
    nats = decay(g, given)
    if bool((nats < BOUND).any()):
        pytest.skip("a gate is below -5 nats")
    repeat = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(repeat, 2) if repeat > 1 else x for x in (q, k))
    long = torch.ones((), device=q.device)
    if not given.get("use_qk_l2norm_in_kernel"):
        long = q.float().norm(dim=-1, keepdim=True)
        if bool(((k.float().norm(dim=-1) - 1).abs() > 0.01).any()):
            pytest.skip("the keys are not of unit length and are not to be made so")
    strength = beta.float() if given.get("use_beta_sigmoid_in_kernel") else logit(beta.float())
    scale = given.get("scale")
    factor = long * (width**0.5 * (width**-0.5 if scale is None else float(scale)))
    turned = bool(given.get("state_v_first") or given.get("transpose_state_layout"))
    state = given.get("initial_state")
    state = state.mT if turned and state is not None else state
    heads = v.shape[2]
    zero = torch.zeros(heads, device=q.device), torch.zeros(heads * width, device=q.device)
    out, final = kda(q.bfloat16(), k.bfloat16(), v.bfloat16(), logit(nats / BOUND), strength, *zero, lower_bound=BOUND, initial_state=state,
                     cu_seqlens=given.get("cu_seqlens"))
    return (out.float() * factor).to(v.dtype), (final.mT if turned else final) if given.get("output_final_state") else None


def main() -> int:
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        sys.exit(f"usage: {Path(__file__).name} PATH/TO/test_kda.py [pytest's arguments]")
    if not torch.cuda.is_available():
        sys.exit("these tests need a CUDA device")
    import fla.ops.kda as theirs

    unknown = set(inspect.signature(theirs.chunk_kda).parameters) - KNOWN - IGNORED - {"q", "k", "v", "g", "beta", "kwargs"}
    print(f"their chunk_kda also takes {sorted(unknown)}: tests that use it are skipped")
    theirs.chunk_kda = chunk_kda
    return int(pytest.main([sys.argv[1], "-k", "chunk and not naive and not token_parallel", "-q", "-rs", "-p", "no:cacheprovider", *sys.argv[2:]]))


if __name__ == "__main__":
    sys.exit(main())
