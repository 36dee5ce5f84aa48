"""The device tests are of the kernels, whatever the process's own setting is when none is made."""

from __future__ import annotations

import os

os.environ.setdefault("DRIFTLINE_KERNELS", "triton")
