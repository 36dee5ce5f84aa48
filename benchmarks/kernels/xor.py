"""XOR of a policy's tensors with their base, in place, with counts: how near it comes to a copy.

    python benchmarks/kernels/xor.py [--quick] [--sweep] [--only TEXT] [--commit ID]

An element is read twice and written once; a copy on the same device reads and writes as many bytes as the ceiling says. Peers: torch's `bitwise_xor_` alone
(the same bytes, nothing counted), and torch's XOR with counts, eager.
"""

from __future__ import annotations

from functools import partial

import torch
from harness import Row, arguments, finish, measure, peak_bytes

from driftline.kernels import policy_delta
from driftline.kernels.policy_delta import triton_xor

BLOCK = 4096


def pair(mebibytes: int, dtype: torch.dtype, spans: int = 1) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Spans that differ in about one element in a hundred."""
    count = mebibytes * 2**20 // dtype.itemsize // spans
    base = [torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, device="cuda") for _ in range(spans)]
    new = []
    for span in base:
        other = span.clone().view(-1, dtype.itemsize)
        other[torch.randint(0, count, (count // 100,), device="cuda")] ^= 1
        new.append(other.view(-1).view(dtype))
    return [span.view(dtype) for span in base], new


def moved(new: list[torch.Tensor]) -> int:
    return sum(3 * span.nbytes + 4 * -(-span.numel() // BLOCK) for span in new)


def torch_xor(bits: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for base, new in bits:
        new.bitwise_xor_(base)


def torch_counted(base: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    new ^= base
    return (new != 0).view(-1, BLOCK).sum(1, dtype=torch.int32)


def rows(quick: bool, only: str) -> list[Row]:
    out = []
    cases = [(4096, torch.bfloat16, 1), (4096, torch.bfloat16, 2048), (256, torch.bfloat16, 1), (4096, torch.float32, 1), (2048, torch.float8_e4m3fn, 1)]
    for mebibytes, dtype, spans in cases[: 3 if quick else None]:
        case = f"{mebibytes} MiB of {str(dtype).removeprefix('torch.')} in {spans} span{'s' * (spans > 1)}"
        if only not in case:
            continue
        base, new = pair(mebibytes, dtype, spans)
        kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
        bits = [(b.view(kind), n.view(kind)) for b, n in zip(base, new, strict=True)]
        b, n = bits[0]
        run = policy_delta.Xor(base, new, block=BLOCK).run if spans > 1 else partial(policy_delta.xor_blocks, base[0], new[0], block=BLOCK)
        ours, peak, bytes_moved = measure(run, rounds=20).median_ms, peak_bytes(run), moved(new)
        peer = measure(partial(torch_xor, bits), rounds=5 if spans > 1 else 20).median_ms
        out.append(Row(case, ours, "torch bitwise_xor_, not counted", peer, bytes=bytes_moved, peak=peak, peer_peak=0))
        if spans == 1:
            peer = measure(partial(torch_counted, b, n), rounds=10).median_ms
            out.append(Row(case + ", counted by both", ours, "torch eager, XOR and counts", peer, bytes=bytes_moved, peak=peak,
                           peer_peak=peak_bytes(partial(torch_counted, b, n))))
        del base, new, bits, b, n, run
        torch.cuda.empty_cache()
    return out


def sweep() -> list[Row]:
    out = []
    base, new = pair(4096, torch.bfloat16)
    for configuration in triton_xor.CONFIGURATIONS:
        timing = measure(partial(triton_xor.xor, base[0], new[0], block=BLOCK, configuration=configuration), rounds=20)
        out.append(Row(f"4 GiB of bfloat16, {configuration}", timing.median_ms, bytes=moved(new)))
    return out


def main() -> None:
    options = arguments(__doc__)
    if options.sweep:
        finish("xor", sweep(), write=False)
    else:
        finish("xor", rows(options.quick, options.only), commit=options.commit, note="pairs that differ in 1 % of their elements", write=not options.quick)


if __name__ == "__main__":
    main()
