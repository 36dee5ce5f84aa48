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


def unwritten(sass: str) -> list[str]:
    """Instructions that read a uniform register before any in the code wrote it. The assembler of CUDA 12.8 to 12.9 makes such when a kernel has more
    descriptors of matrix operands than uniform registers: a product then reads shared memory anywhere."""
    written: set[int] = set()
    found = []
    for line in sass.splitlines():
        code = re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);", line)
        if code is None:
            continue
        name, operands = code[1], re.split(r",(?![^\[]*\])", code[2])
        into = re.match(r"\s*UR(\d+)\s*$", operands[0])
        read: set[int] = set()
        for operand in operands[1:] if into else operands:
            for at in (int(text) for text in re.findall(r"\bUR(\d+)", operand)):
                if "gdesc[" in operand:
                    read |= set(range(at + (0 if "gdesc[" in operands[1] else 2), at + 4))
                else:
                    read |= {at, at + ("desc[" in operand or (name.startswith("UIADD3") and ".64" in name))}
        if read - written:
            found.append(line.strip())
        written |= read
        if into:
            first = int(into[1])
            written |= set(range(first, first + (4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1)))
    return found
