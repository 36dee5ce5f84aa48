"""Lossless speculative decoding: drafts, the two rules by which they stand, and whether they pay. See docs/speculation.md."""

from driftline.services.rollout.speculation.drafts import Drafter, Drafts, Row, Seen
from driftline.services.rollout.speculation.ngram import NgramDrafter
from driftline.services.rollout.speculation.pays import Pays
from driftline.services.rollout.speculation.rules import Purpose, Verdict, agreeing, matching, rejecting
from driftline.services.rollout.speculation.speculator import Acceptance, Speculator

__all__ = ["Acceptance", "Drafter", "Drafts", "NgramDrafter", "Pays", "Purpose", "Row", "Seen", "Speculator", "Verdict", "agreeing", "matching", "rejecting"]
