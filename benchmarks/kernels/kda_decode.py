"""KDA decode and closed-loop replay on a pool of states at K3's width: 96 heads of 128, and 12 of them.

    python benchmarks/kernels/kda_decode.py [--quick] [--sweep] [--only TEXT] [--commit ID]

Bytes are each state read once and written once, and the raw inputs, window and outputs. In a replay every row folds as many tokens as it scores, the
most there can be, unless the case says otherwise. Peers: the figures of ai-dynamo/aiconfigurator for an H200 (its collection of vLLM: packed decode, and
verification of a draft, which writes a state a token), and FLA's `fused_recurrent_kda` in this process where `fla` is importable (decode; and the window
as a sequence of T tokens from a state to a new state, with no fold).
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, NamedTuple

import torch
from harness import Row, arguments, finish, graphed, measure, peak_bytes

from driftline.kernels.kda_decode import Window, fold, kda_decode, replay_decode

HEADS, DIM = 96, 128
QUOTED = "aiconfigurator, H200, vLLM"
VLLM_DECODE = {  # ms by (heads, rows): fused_recurrent_kda_packed_decode
    (96, 1): 0.00437, (96, 8): 0.02316, (96, 32): 0.10226, (96, 64): 0.20307, (96, 128): 0.40189, (96, 256): 0.80212,
    (12, 64): 0.02970, (12, 256): 0.10593,
}
VLLM_VERIFY = {  # ms by (heads, rows, tokens): fused_recurrent_kda
    (96, 64, 2): 0.31057, (96, 64, 4): 0.51834, (96, 64, 8): 0.96710, (96, 1, 4): 0.01078, (96, 8, 4): 0.06928, (96, 32, 4): 0.26114,
    (96, 128, 4): 1.03275, (96, 256, 4): 2.06039, (12, 64, 4): 0.07060, (12, 256, 4): 0.26522,
}
SMALL = 32
"""Rows up to which a call is timed in a graph: its launch takes longer to issue than to run."""


class Case(NamedTuple):
    heads: int
    rows: int
    tokens: int


class Peer(NamedTuple):
    name: str | None
    ms: float | None


class Setting(NamedTuple):
    """Fresh random tensors of a case: rows in slots of a pool twice as large, in no order."""

    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    weights: tuple[torch.Tensor, torch.Tensor]
    pool: torch.Tensor
    slots: torch.Tensor
    window: Window


def setting(case: Case) -> Setting:
    heads, rows, tokens = case
    q, k, v, z = (torch.randn(rows, tokens, heads, DIM, device="cuda").bfloat16() for _ in range(4))
    beta = torch.randn(rows, tokens, heads, device="cuda").bfloat16()
    weights = 0.3 * torch.randn(heads, device="cuda"), torch.randn(heads * DIM, device="cuda") - 3
    slots = torch.randperm(2 * rows, device="cuda")[:rows].to(torch.int32)
    window = Window.empty(2 * rows, tokens, heads, DIM, device="cuda")
    for held in (window.k, window.v, window.z, window.beta):
        held.normal_()
    return Setting((q, k, v, z, beta), weights, torch.randn(2 * rows, heads, DIM, DIM, device="cuda"), slots, window)


def least_bytes(case: Case, *, folds: bool) -> int:
    """State both ways; a token's raw inputs and output; with folding, what is read of the old window and written of the new."""
    raw, held = 2 * (4 * DIM + 1) + 2 * DIM, 2 * (3 * DIM + 1)
    return case.rows * case.heads * (2 * 4 * DIM * DIM + case.tokens * (raw + (2 * held if folds else 0)))


def flops(case: Case, *, folded: int) -> float:
    """fp32 operations outside the matrix units: decay, dot product and update are 5 a state element and token, the output 2."""
    return case.rows * case.heads * DIM * DIM * (5 * folded + 7 * case.tokens)


def timed(run: Any, rows: int) -> float:
    return (graphed(run) if rows <= SMALL else measure(run)).median_ms


def replay_row(case: Case, accepted: int, peer: Peer, note: str = "") -> Row:
    at = setting(case)
    counts = torch.full_like(at.slots, accepted)
    run = partial(replay_decode, *at.inputs, *at.weights, at.pool, at.slots, at.window, counts)
    ours = timed(run, case.rows)
    said = f"{flops(case, folded=accepted) / ours / 1e9:.1f} fp32 TFLOP/s" + (", in a graph" if case.rows <= SMALL else "") + (f", {note}" if note else "")
    name = f"replay, {case.heads} heads, {case.rows} rows, fold {accepted} and score {case.tokens}"
    return Row(name, ours, peer.name, peer.ms, bytes=least_bytes(case, folds=True), peak=peak_bytes(run), note=said)


def decode_row(heads: int, rows: int, peer: Peer) -> Row:
    case = Case(heads, rows, 1)
    at = setting(case)
    q, k, v, z, beta = (t[:, 0] for t in at.inputs)
    run = partial(kda_decode, q, k, v, z, beta, *at.weights, at.pool, at.slots)
    ours = timed(run, rows)
    return Row(f"decode, {heads} heads, {rows} rows", ours, peer.name, peer.ms, bytes=least_bytes(case, folds=False), peak=peak_bytes(run),
               note="in a graph" if rows <= SMALL else "")


def fold_row() -> Row:
    case = Case(HEADS, 64, 4)
    at = setting(case)
    counts = torch.full_like(at.slots, 4)
    run = partial(fold, *at.weights, at.pool, at.slots, at.window, counts)
    return Row("fold 4, 96 heads, 64 rows", measure(run).median_ms, bytes=64 * HEADS * (2 * 4 * DIM * DIM + 4 * 2 * (3 * DIM + 1)), peak=peak_bytes(run))


def fla_rows() -> list[Row]:
    """Ours beside FLA's, one process, one set of inputs. FLA reads the states in the order of its rows and writes new ones."""
    try:
        fused_recurrent_kda = importlib.import_module("fla.ops.kda").fused_recurrent_kda
    except ImportError:
        print("fla is not importable: no rows beside it")
        return []
    out = []
    for case in (Case(HEADS, 64, 1), Case(HEADS, 64, 4)):
        at = setting(case)
        states = at.pool[: case.rows].contiguous()
        run = partial(fused_recurrent_kda, *at.inputs, A_log=at.weights[0], dt_bias=at.weights[1], initial_state=states, output_final_state=True,
                      use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0)
        peer = Peer("FLA fused_recurrent_kda", measure(run).median_ms)
        out.append(decode_row(HEADS, 64, peer) if case.tokens == 1 else replay_row(case, 4, peer, "FLA scores only"))
    return out


def rows(quick: bool, only: str) -> list[Row]:
    def quoted(table: dict[Any, float], *key: int) -> Peer:
        return Peer(QUOTED, table[key]) if key in table else Peer(None, None)

    replays = [Case(*key) for key in VLLM_VERIFY]
    decodes = list(VLLM_DECODE)
    if quick:
        replays, decodes = [Case(HEADS, 64, 4)], [(HEADS, 64)]
    out = []
    for case in replays:
        if only in f"replay, {case.heads} heads, {case.rows} rows":
            for accepted in (case.tokens, 2, 0) if case == (HEADS, 64, 4) else (case.tokens,):
                out.append(replay_row(case, accepted, quoted(VLLM_VERIFY, *case)))
            torch.cuda.empty_cache()
    for heads, count in decodes:
        if only in f"decode, {heads} heads, {count} rows":
            out.append(decode_row(heads, count, quoted(VLLM_DECODE, heads, count)))
            torch.cuda.empty_cache()
    if not quick and not only:
        out += [fold_row(), *fla_rows()]
    return out


def sweep() -> list[Row]:
    """The ways to build a program, on the target's shape and on decode; they give the same bits."""
    from driftline.kernels.kda_decode import triton

    out = []
    for configuration in triton.CANDIDATES:
        for case, accepted in ((Case(HEADS, 64, 4), 4), (Case(HEADS, 64, 4), 2), (Case(HEADS, 64, 8), 8)):
            at = setting(case)
            counts = torch.full_like(at.slots, accepted)
            run = partial(triton.replay_decode, *at.inputs, *at.weights, at.pool, at.slots, at.window, counts, -5.0, configuration)
            out.append(Row(f"{configuration}: fold {accepted}, score {case.tokens}", measure(run).median_ms, bytes=least_bytes(case, folds=True)))
        at = setting(Case(HEADS, 64, 1))
        q, k, v, z, beta = (t[:, 0] for t in at.inputs)
        plain = partial(triton.kda_decode, q, k, v, z, beta, *at.weights, at.pool, at.slots, -5.0, configuration)
        out.append(Row(f"{configuration}: decode", measure(plain).median_ms, bytes=least_bytes(Case(HEADS, 64, 1), folds=False)))
        torch.cuda.empty_cache()
    return out


def main() -> None:
    options = arguments(__doc__)
    if options.sweep:
        finish("kda_decode", sweep(), write=False)
    else:
        finish("kda_decode", rows(options.quick, options.only), commit=options.commit, note="fp32 states, bfloat16 inputs of N(0, 1)", write=not options.quick)


if __name__ == "__main__":
    main()
