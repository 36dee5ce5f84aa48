"""Causal attention of grouped queries at the widths of dense models: prefill, its backward, and decode; and the rotation before it.

    python benchmarks/kernels/gqa.py [--quick] [--sweep] [--only TEXT] [--commit ID]

FLOPs of a query, head and key it sees: 4 D forward, 10 D backward (the least; ours computes scores and their gradient twice, 14 D, so that no sum needs an
atomic). Decode is counted in bytes of keys and values. The peers are torch's own, by the grouped call where they take it, else with the keys copied to every
head: cuDNN's attention and FlashAttention-2, bfloat16 output, backward as they have it. A peer that does not take the call is left out.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from harness import Row, arguments, finish, measure, peak_bytes
from torch.nn.attention import SDPBackend, sdpa_kernel

from driftline.kernels.gqa import Layout, attention
from driftline.kernels.gqa.layout import Sizes
from driftline.kernels.rope import rotate

PEERS = ((SDPBackend.CUDNN_ATTENTION, "torch cuDNN attention"), (SDPBackend.FLASH_ATTENTION, "torch FlashAttention-2"))


class Case(NamedTuple):
    """`batch` sequences of `steps` new tokens, the last of `columns`."""

    batch: int
    steps: int
    columns: int
    heads: int
    key_heads: int
    width: int

    @property
    def name(self) -> str:
        keys = "" if self.steps == self.columns else f" of {self.columns}"
        return f"B {self.batch}, T {self.steps}{keys}, {self.heads}/{self.key_heads} heads of {self.width}"

    @property
    def pairs(self) -> float:
        ahead = self.columns - self.steps
        return self.batch * self.heads * (self.steps * ahead + self.steps * (self.steps + 1) / 2.0)

    @property
    def forward_flops(self) -> float:
        return 4.0 * self.width * self.pairs

    @property
    def backward_flops(self) -> float:
        return 10.0 * self.width * self.pairs

    @property
    def cached_bytes(self) -> float:
        return 4.0 * self.batch * self.columns * self.key_heads * self.width

    def drawn(self, device: str = "cuda") -> list[torch.Tensor]:
        shapes = ((self.steps, self.heads), (self.columns, self.key_heads), (self.columns, self.key_heads))
        return [torch.randn(self.batch, *shape, self.width, dtype=torch.bfloat16, device=device) for shape in shapes]

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.batch * self.steps, self.batch * self.columns, self.heads, self.key_heads, self.width, self.width)


PREFILL = (
    Case(1, 8192, 8192, 32, 8, 128), Case(8, 1024, 1024, 32, 8, 128), Case(1, 32_768, 32_768, 32, 8, 128), Case(1, 8192, 8192, 9, 3, 64), Case(32, 512, 512, 9, 3, 64),
)
DECODE = (Case(64, 1, 4096, 32, 8, 128), Case(8, 1, 32_768, 32, 8, 128), Case(256, 1, 1000, 9, 3, 64), Case(1, 1, 8192, 32, 8, 128))


def torchs(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, grouped: bool) -> torch.Tensor:
    """torch's attention of [B, T, H, D] tensors; without `grouped`, of keys and values in every head."""
    one = q.shape[1] == 1
    out = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, keys, values)), is_causal=not one, enable_gqa=grouped)
    return out.transpose(1, 2)


class Peer(NamedTuple):
    name: str
    forward_ms: float
    forward_peak: int
    backward_ms: float
    backward_peak: int


def peer_of(case: Case, backend: SDPBackend, name: str, rounds: int, backward: bool) -> Peer | None:
    with sdpa_kernel(backend):
        for grouped in (True, False):
            given = case.drawn()
            if not grouped:
                given = [t.repeat_interleave(case.heads // t.shape[2], 2) for t in given]
            run = partial(torchs, *given, grouped=grouped)
            try:
                with torch.no_grad():
                    ahead, peak = measure(run, rounds=rounds).median_ms, peak_bytes(run)
                if not backward:
                    return Peer(name, ahead, peak, 0.0, 0)
                leaves = [t.requires_grad_() for t in given]
                out = torchs(*leaves, grouped=grouped)
                back = partial(torch.autograd.grad, out, leaves, torch.randn_like(out), retain_graph=True)
                return Peer(name if grouped else f"{name}, keys in every head", ahead, peak, measure(back, rounds=rounds).median_ms, peak_bytes(back))
            except RuntimeError as error:
                print(f"{case.name}: {name} does not take this{' grouped' if grouped else ''}: {str(error).splitlines()[0][:100]}")
    return None


def prefill_rows(case: Case) -> list[Row]:
    rounds = 5 if case.steps > 8192 else 15
    given = [t.requires_grad_() for t in case.drawn()]
    layout = Layout.padded(case.batch, case.steps, case.columns, device="cuda")
    run = partial(attention, *given, layout=layout)
    with torch.no_grad():
        ahead, peak = measure(run, rounds=rounds).median_ms, peak_bytes(run)
    out = run()
    back = partial(torch.autograd.grad, out, given, torch.randn_like(out), retain_graph=True)
    behind, back_peak = measure(back, rounds=rounds).median_ms, peak_bytes(back)
    rows = []
    for peer in [p for how in PEERS if (p := peer_of(case, *how, rounds, True)) is not None] or [Peer("none takes this", 0.0, 0, 0.0, 0)]:
        rows.append(Row(f"{case.name}, forward", ahead, peer.name, peer.forward_ms, flops=case.forward_flops, peak=peak, peer_peak=peer.forward_peak))
        rows.append(Row(f"{case.name}, backward", behind, peer.name, peer.backward_ms, flops=case.backward_flops, peak=back_peak, peer_peak=peer.backward_peak))
    return rows


@torch.no_grad()
def decode_rows(case: Case) -> list[Row]:
    """Of all columns, and of columns named by a mask, as after unequal prompts; the layout, which a model makes once for all layers, is not timed."""
    given = case.drawn()
    valid = torch.ones(case.batch, case.columns, dtype=torch.bool, device="cuda")
    plain, named = (measure(partial(attention, *given, layout=Layout.padded(case.batch, 1, case.columns, valid=v, device="cuda")), rounds=20).median_ms for v in (None, valid))
    rows = []
    for peer in [p for how in PEERS if (p := peer_of(case, *how, 20, False)) is not None] or [Peer("none takes this", 0.0, 0, 0.0, 0)]:
        rows.append(Row(f"{case.name}, decode", plain, peer.name, peer.forward_ms, bytes=case.cached_bytes, note=f"{named:.4f} ms where columns are skipped"))
    return rows


def rotation_row() -> Row:
    x = torch.randn(16_384, 32, 128, dtype=torch.bfloat16, device="cuda")
    angle = torch.rand(16_384, 64, device="cuda") * 100
    cos, sin = angle.cos(), angle.sin()
    wide_cos, wide_sin = (torch.cat([t, t], -1).bfloat16()[:, None] for t in (cos, sin))

    def eager() -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * wide_cos + torch.cat([-second, first], -1) * wide_sin

    ours, theirs = measure(partial(rotate, x, cos, sin)).median_ms, measure(eager).median_ms
    return Row("rotation of 16,384 tokens, 32 heads of 128", ours, "torch eager in bfloat16", theirs, bytes=2.0 * x.nbytes + 2.0 * cos.nbytes)


def rows_of(quick: bool, only: str) -> list[Row]:
    rows = []
    for case in PREFILL[: 1 if quick else None]:
        if only in f"{case.name}, forward backward":
            rows += prefill_rows(case)
            torch.cuda.empty_cache()
    for case in DECODE[: 1 if quick else None]:
        if only in f"{case.name}, decode":
            rows += decode_rows(case)
            torch.cuda.empty_cache()
    return [*rows, rotation_row()] if only in "rotation" else rows


def sweep() -> list[Row]:
    from driftline.kernels.gqa import triton_backward as backward
    from driftline.kernels.gqa import triton_forward as forward

    rows = []
    for case in (PREFILL[0], PREFILL[3]):
        given, sizes, layout = case.drawn(), case.sizes, Layout.padded(case.batch, case.steps, case.columns, device="cuda")
        for one in forward.CONFIGURATIONS:
            timing = measure(partial(forward.forward, *given, layout, sizes, 0.1, torch.bfloat16, one), rounds=10)
            rows.append(Row(f"forward {tuple(one)}, width {case.width}", timing.median_ms, flops=case.forward_flops))
        out, lse = forward.forward(*given, layout, sizes, 0.1, torch.bfloat16)
        grad = torch.randn_like(out)
        for of_queries, of_keys in [(q, backward.KEYS_DEFAULT) for q in backward.QUERIES] + [(backward.QUERIES_DEFAULT, k) for k in backward.KEYS[1:]]:
            timing = measure(partial(backward.backward, *given, layout, out, lse, grad, sizes, 0.1, of_queries, of_keys), rounds=10)
            rows.append(Row(f"backward {tuple(of_queries)} {tuple(of_keys)}, width {case.width}", timing.median_ms, flops=case.backward_flops))
    for case in DECODE:
        given, layout = case.drawn(), Layout.padded(case.batch, 1, case.columns, device="cuda")
        for one in (c for c in forward.CONFIGURATIONS if c.rows == forward.DEFAULT.rows):
            run = forward.decode if forward.decodes(layout, case.sizes) else forward.forward
            timing = measure(partial(run, *given, layout, case.sizes, 0.1, torch.bfloat16, one), rounds=10)
            rows.append(Row(f"{case.name}, decode {tuple(one)}", timing.median_ms, bytes=case.cached_bytes))
    return rows


def main() -> None:
    options = arguments(__doc__)
    if options.sweep:
        finish("gqa", sweep(), write=False)
    else:
        finish("gqa", rows_of(options.quick, options.only), commit=options.commit, write=not options.quick)


if __name__ == "__main__":
    main()
