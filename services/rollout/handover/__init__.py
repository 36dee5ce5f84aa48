"""Prompts computed by one engine and gone on with by another. See docs/handover.md."""

from driftline.services.rollout.handover.frame import from_bytes, to_bytes
from driftline.services.rollout.handover.halves import Decoder, Pair, Prefiller
from driftline.services.rollout.handover.process import RemotePrefiller
from driftline.services.rollout.handover.record import (
    Handover,
    HandoverRefused,
    Layout,
    Part,
    export,
    layout_of,
    place,
)

__all__ = [
    "Decoder", "Handover", "HandoverRefused", "Layout", "Pair", "Part", "Prefiller", "RemotePrefiller", "export", "from_bytes", "layout_of", "place", "to_bytes",
]
