"""The expert MLP's kernels through the compiler for Hopper, at K3's shapes: the matrix unit fed from registers, its instructions in flight, no spills in a loop."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from driftline.kernels.moe import forward, gluon_packed, triton_forward, triton_rows
from driftline.kernels.moe.activations import Activations
from driftline.kernels.moe.grouped import ROWS, TABLE, Form, Pinned, pinned
from driftline.kernels.moe.plan import Plan, most_tiles
from driftline.kernels.mxfp4.weights import ExpertWeight, Fp8Weight, Mxfp4Weight
from driftline.kernels.offline import SHARED_LIMIT, CompiledKernel, compiling_for

EXPERTS, TOP_K, LATENT, INNER = 896, 16, 3584, 3072
HELD = 32
"""Experts whose weights are there: nothing that is compiled depends on it, and 896 in bfloat16 are more than some machines promise."""
STACK = 512
"""Bytes of registers that the widest tiles may put away around their loops; inside one, none."""


def weight(form: Form, out: int, width: int) -> ExpertWeight:
    if form is Form.MXFP4:
        return Mxfp4Weight(torch.empty(HELD, out, width // 2, dtype=torch.uint8), torch.empty(HELD, out, width // 32, dtype=torch.uint8))
    if form is Form.FP8:
        return Fp8Weight(torch.empty(HELD, out, width, dtype=torch.float8_e4m3fn), torch.empty(HELD, out, width // 128))
    return torch.empty(HELD, out, width, dtype=torch.bfloat16)


def compiled(form: Form, activations: Activations, configuration: Pinned, tokens: int = 8192) -> dict[str, CompiledKernel]:
    pairs, block = tokens * TOP_K, configuration.grouping.block
    tiles = most_tiles(pairs, EXPERTS, block)
    tables = [torch.empty(n, dtype=torch.int32) for n in (pairs, pairs, EXPERTS + 1, tiles, tiles)]
    rows = Plan(*tables, block)
    fp8 = activations is Activations.FP8_128
    h = torch.empty(pairs, INNER, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16)
    hs, y = torch.empty(INNER // 128, pairs), torch.empty(pairs, LATENT, dtype=torch.bfloat16)
    with compiling_for(90) as kernels:
        z, w1, w3, w2 = torch.empty(tokens, LATENT, dtype=torch.bfloat16), weight(form, INNER, LATENT), weight(form, INNER, LATENT), weight(form, LATENT, INNER)
        if configuration.gathered:
            assert isinstance(w1, Mxfp4Weight)
            assert isinstance(w3, Mxfp4Weight)
            assert isinstance(w2, Mxfp4Weight)
            triton_rows.gather(z, rows, y, top_k=TOP_K, form=form, rounding=activations)
            gluon_packed.up(y, w1, w3, rows, h, beta=4.0, linear_beta=25.0, grouping=configuration.grouping, product=configuration.up,
                             rounding=activations)
            gluon_packed.down(h, w2, rows, y, grouping=configuration.grouping, product=configuration.down)
        else:
            x, xs = triton_rows.prepare(z, form, activations)
            triton_forward.up(x, xs, w1, w3, rows, h, hs, top_k=TOP_K, beta=4.0, linear_beta=25.0, grouping=configuration.grouping, product=configuration.up,
                              form=form, rounding=activations)
            triton_forward.down(h, hs, w2, rows, y, grouping=configuration.grouping, product=configuration.down, form=form, rounding=activations)
        triton_rows.combine(y, rows, torch.empty(tokens, TOP_K), torch.empty(tokens, LATENT, dtype=torch.bfloat16))
    return {kernel.name: kernel for kernel in kernels}


def loops(sass: str) -> list[list[str]]:
    """The instructions of each innermost loop that uses the matrix unit."""
    lines = [line for line in sass.splitlines() if line.startswith(".L_") or re.match(r"\s+/\*[0-9a-f]{4,}\*/", line)]
    labels = {line.rstrip(":").strip(): i for i, line in enumerate(lines) if line.startswith(".L_")}
    found = []
    for i, line in enumerate(lines):
        target = re.search(r"BRA.*?`\(?(\.L_x_\d+)", line)
        if target and labels.get(target[1], i) < i and any("GMMA" in body for body in lines[labels[target[1]] : i]):
            found.append(lines[labels[target[1]] : i])
    return found


def serialised(kernel: CompiledKernel, folder: Path) -> bool:
    """Whether the assembler gave up keeping the matrix unit's instructions in flight, as it says by C7510 to C7514."""
    import triton.backends.nvidia as backend

    source = folder / "kernel.ptx"
    source.write_text(kernel.ptx)
    folder_of_tools = Path(next(iter(backend.__path__))) / "bin"
    for tool in ("ptxas", "ptxas-blackwell"):  # the older of the two does not know the newest PTX
        command = [folder_of_tools / tool, "-v", "--gpu-name", "sm_90a", source, "-o", folder / "kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return "serialized" in done.stderr
    raise AssertionError(done.stderr)


def in_step(kernel: CompiledKernel) -> None:
    """Of `gluon_packed`: every loop decodes a quarter of a stretch while the quarter before is multiplied, with weights from registers and rows by descriptor."""
    bodies = [body for body in loops(kernel.sass()) if sum("HGMMA" in line for line in body) <= 32 and not any("EXIT" in line for line in body)]
    assert bodies
    for body in bodies:
        assert not any(re.search(r"\b(STL|LDL)\b", line) for line in body)
        waits = [line for line in body if "WARPGROUP.DEPBAR" in line]
        assert len(waits) == 8
        assert all(re.search(r"gsb0, 0x[12]\b", line) for line in waits), "one group of products is always under way"
        assert sum("UTMALDG" in line for line in body) in (1, 2)
        assert sum("LDG.E.128" in line for line in body) == 4
        first = [re.search(r"HGMMA\S* R\d+, (R\d+|gdesc)", line) for line in body]
        assert all(match[1] != "gdesc" for match in first if match)


def distinct() -> list[tuple[Form, Activations, int]]:
    """One of each form that decode uses, and the widest of the form that K3's checkpoints have. (tests/gpu/test_moe_device.py compiles and runs all of them.)"""
    narrow = [(form, Activations.FP8_128 if fp8 else Activations.SAME, 0) for form, fp8 in TABLE]
    return [*narrow, (Form.MXFP4, Activations.SAME, len(ROWS))]


@pytest.mark.parametrize(("form", "activations", "row"), distinct())
def test_pinned_configurations_compile_within_the_device(form: Form, activations: Activations, row: int, tmp_path: Path) -> None:
    configuration = TABLE[form, activations is Activations.FP8_128][row]
    kernels = compiled(form, activations, configuration)
    products = [kernels["_up"], kernels["_down"]]
    if form is Form.MXFP4 and activations is Activations.SAME:
        assert not any(serialised(kernel, tmp_path) for kernel in products)
    for kernel in kernels.values():
        assert kernel.shared <= SHARED_LIMIT
        assert kernel.stack <= (STACK if kernel in products else 0)
    instruction = "QGMMA" if activations is Activations.FP8_128 else "HGMMA"
    for kernel in products:
        text = kernel.sass()
        assert instruction in text
        if configuration.gathered:
            in_step(kernel)
            continue
        assert " HMMA" not in text
        bodies = loops(text)
        assert form is not Form.MXFP4 or len(bodies) == len(configuration.grouping.widths), "one loop a width; short ones of other forms are unrolled"
        for body in bodies:
            assert not any(re.search(r"\b(STL|LDL)\b", line) for line in body)
            assert any("LDGSTS.E.BYPASS.128" in line for line in body)
            if form is Form.MXFP4:
                first = [re.search(instruction + r"\S* R\d+, (R\d+|gdesc)", line) for line in body]
                assert all(match[1] != "gdesc" for match in first if match), "decoded weights go from registers into the matrix unit"


def test_the_table_has_a_row_for_every_number_of_rows() -> None:
    assert all(len(rows) == len(ROWS) + 1 for rows in TABLE.values())
    for (form, fp8), rows in TABLE.items():
        for row in rows:
            assert INNER % row.up.features == 0
            assert LATENT % row.down.features == 0
            if row.gathered:
                assert form is Form.MXFP4
                assert not fp8
                assert (row.up.features, row.down.features) == (16 * row.up.warps, 32 * row.down.warps) == (128, 256), "as many rows as the warps of a block hold"
            assert not fp8 or row.up.features == 128, f"{form}: a group of 128 of h is rounded by one tile"
            assert (form is not Form.MXFP4) or all(p.features % (16 * p.warps) == 0 for p in (row.up, row.down))


def test_widths_that_no_tile_of_256_divides_get_tiles_of_128() -> None:
    for rows, gathered in ((200, True), (1, False)):
        found = pinned(Form.MXFP4, Activations.SAME, rows * EXPERTS, EXPERTS, 384)
        assert found.gathered is gathered
        assert found.down.features == 128
        assert not gathered or found.down.features == 32 * found.down.warps


def test_the_workspace_is_that_of_a_microbatch() -> None:
    assert forward.tokens_at_once(None, TOP_K, LATENT) == forward.MICROBATCH
    assert forward.tokens_at_once(10**9, TOP_K, LATENT) * TOP_K * LATENT < 2**31
    assert forward.workspace_bytes(8192, TOP_K, LATENT, INNER, Activations.SAME) == 8192 * (LATENT * 2 + TOP_K * (INNER * 2 + LATENT * 2))
