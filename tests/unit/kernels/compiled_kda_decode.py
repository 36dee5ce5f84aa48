"""The KDA decode kernels compiled for Hopper at K3's shapes: 96 heads of 128, 64 rows. Run by test_kernels_interpreted.py in a process of its own."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from driftline.kernels.kda_decode import sequence
from driftline.kernels.kda_decode import triton as kernels
from driftline.kernels.kda_decode.window import Window
from driftline.kernels.offline import SHARED_LIMIT, CompiledKernel, compiling_for

torch.set_num_threads(1)

ROWS, HEADS, DIM, SLOTS = 64, 96, 128, 256
REGISTERS = 65_536
"""Of one multiprocessor."""


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def rows(count: int, tokens: int) -> torch.Tensor:
    return empty(count, tokens, HEADS, DIM)


@cache
def compiled(kind: str, tokens: int) -> CompiledKernel:
    """`kind`: decode, replay or fold; tokens of the window. Exactly one kernel is launched."""
    q, k, v, z, beta = rows(ROWS, tokens), rows(ROWS, tokens), rows(ROWS, tokens), rows(ROWS, tokens), empty(ROWS, tokens, HEADS)
    fp32 = torch.float32
    weights = empty(HEADS, dtype=fp32), empty(HEADS * DIM, dtype=fp32)
    pool, slots, accepted = empty(SLOTS, HEADS, DIM, DIM, dtype=fp32), empty(ROWS, dtype=torch.int32), empty(ROWS, dtype=torch.int32)
    window = Window(rows(SLOTS, tokens), rows(SLOTS, tokens), rows(SLOTS, tokens), empty(SLOTS, tokens, HEADS))
    with compiling_for(90) as found:
        if kind == "decode":
            kernels.kda_decode(q[:, 0], k[:, 0], v[:, 0], z[:, 0], beta[:, 0], *weights, pool, slots, -5.0)
        elif kind == "replay":
            kernels.replay_decode(q, k, v, z, beta, *weights, pool, slots, window, accepted, -5.0)
        else:
            kernels.fold(*weights, pool, slots, window, accepted, -5.0)
    (kernel,) = found
    return kernel


@cache
def machine_code(kind: str, tokens: int) -> str:
    return compiled(kind, tokens).sass()


CASES = [("decode", 1), ("replay", 4), ("replay", 8), ("replay", 16), ("fold", 4)]


@pytest.mark.parametrize(("kind", "tokens"), CASES)
def test_the_programs_fit_a_multiprocessor_and_nothing_is_spilled(kind: str, tokens: int) -> None:
    """Two that stay, with 85 % of the 6,144 items between them; the rest are programs of one item. A window of 16 leaves room for one at a time: there the
    arithmetic takes longer than the memory."""
    kernel, programs = compiled(kind, tokens), kernels.CONFIGURATION.programs
    assert programs == 2
    assert kernel.warps == 4
    stay = programs * 132
    assert kernel.grid == (stay + ROWS * HEADS - stay * (ROWS * HEADS * 85 // 100 // stay),)
    assert kernel.registers * kernel.warps * 32 * programs <= REGISTERS
    assert kernel.stack == 0 or tokens == 16
    assert kernel.shared * (programs if tokens <= 8 else 1) <= SHARED_LIMIT


@pytest.mark.parametrize(("kind", "tokens"), CASES)
def test_a_state_is_copied_in_and_written_out_in_accesses_of_16_bytes(kind: str, tokens: int) -> None:
    """A thread has 128 of the state's 16,384 elements: 32 accesses each way. A copy is begun in three places: for the first item, for the one behind
    this one, and for the one behind a padding row. The raw inputs, four channels a thread, are copied beside it: of 3 tensors of an old token, 4 of a new."""
    sass = machine_code(kind, tokens)
    tile = max(4, tokens) // 4
    raw = 3 * tile * (kind != "decode") + 4 * tile * (kind != "fold")
    assert sass.count("LDGSTS.E.BYPASS.128") == 3 * 32
    assert sass.count("LDGSTS") == 3 * (32 + raw)
    assert sass.count("STG.E.128") == 32


@pytest.mark.parametrize(("kind", "tokens"), CASES)
def test_the_step_is_multiply_adds_that_were_asked_for(kind: str, tokens: int) -> None:
    """A thread's 128 elements: 112 of the dot product and 128 of the update for folding, 112 more for the output. No atomics, and with contraction off
    the compiler's own choice is in no bit: every other product and sum in the PTX is rounded by itself."""
    sass = machine_code(kind, tokens)
    assert sass.count(" FFMA ") >= {"decode": 352, "fold": 240, "replay": 592}[kind]
    assert " RED" not in sass
    assert " ATOM" not in sass
    lines = [line.split()[0] for line in compiled(kind, tokens).ptx.splitlines() if line.strip().startswith(("mul.f32", "add.f32", "sub.f32"))]
    assert not lines, "a product or sum that the assembler may contract"


@pytest.mark.parametrize(("kind", "tokens"), CASES)
def test_no_warp_waits_for_another_between_tokens(kind: str, tokens: int) -> None:
    """Three barriers for an item: it has come; every warp has its part of it; the tokens' tiles are there."""
    assert machine_code(kind, tokens).count("BAR.SYNC") == 3


@pytest.mark.parametrize(("kind", "tokens"), CASES)
def test_an_item_is_waited_for_once_and_no_raw_row_is_loaded_then(kind: str, tokens: int) -> None:
    """Raw rows lie in shared memory when their item's turn comes; the next item is asked for behind that wait, before the tokens."""
    sass = machine_code(kind, tokens)
    assert sass.count("DEPBAR.LE SB0, 0x0") == 1
    assert "LDG.E.64" not in sass
    wait = sass.index("DEPBAR.LE SB0, 0x0")
    assert wait < sass.index("LDGSTS", wait) < sass.index("STG.E.128")


@pytest.mark.parametrize("window", sequence.WINDOWS)
def test_whole_sequences_keep_their_state_in_registers_and_spill_nothing(window: int) -> None:
    steps = 300
    q, k, v, z = (rows(4, steps) for _ in range(4))
    weights = empty(HEADS, dtype=torch.float32), empty(HEADS * DIM, dtype=torch.float32)
    with compiling_for(90) as found:
        sequence.kda_sequence(q, k, v, z, empty(4, steps, HEADS), *weights, -5.0, None, None, window)
    (kernel,) = found
    assert kernel.grid == (4 * HEADS,)
    assert kernel.warps == 4
    assert kernel.stack == 0
    assert 2 * kernel.registers * kernel.warps * 32 <= REGISTERS
    assert 2 * kernel.shared <= SHARED_LIMIT
