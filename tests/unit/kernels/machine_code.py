"""What is where in the machine code of a compiled kernel."""

from __future__ import annotations

import re

from driftline.kernels.offline import CompiledKernel


def product_loop(kernel: CompiledKernel) -> list[str]:
    """The lines of the first loop that holds matrix products."""
    lines = kernel.sass().splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := re.match(r"(\.L_x_\d+):", line.strip()))}
    jumps = [(labels.get(found[1], i), i) for i, line in enumerate(lines) if (found := re.search(r"BRA `\((\.L_x_\d+)\)", line))]
    return next(lines[a:b] for a, b in jumps if any("HGMMA" in line for line in lines[a:b]))


def spills(lines: list[str]) -> int:
    """Accesses of local memory."""
    return sum("STL" in line or "LDL" in line for line in lines)
