"""Make tests/replay/data/recorded.msgpack again: python tests/replay/make_recording.py

Four groups of four members, sampled by the shipped policy as version 0, each with rewards that differ. To be run when the shipped
policy, the randomness of sampling or the format of a trajectory changes. The file holds frames of the wire codec.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgpack

sys.path.insert(0, str(Path(__file__).parents[1]))

from loop_cases import groups_of, sampled, tiny

from driftline.environments.source import load_scorer
from driftline.messages.codec import encode
from driftline.messages.types import Admitted

FILE = Path(__file__).with_name("data") / "recorded.msgpack"
RUN = "replay"
GROUPS = 4
CONFIG = tiny(RUN, run={"steps": 2}, tasks={"params": {"min_word_len": 7, "max_word_len": 8}}, sampling={"max_tokens": 12})


def main() -> None:
    scorer = load_scorer([CONFIG.tasks.source])
    chosen, index = [], 0
    while len(chosen) < GROUPS:
        (group,) = groups_of(CONFIG, [index])
        members = sampled([group])
        index += 1
        if len({scorer.score(member.task, member.text).reward for member in members}) > 1:
            still = [m.model_copy(update={"started_at": 0.0, "finished_at": 0.0}) for m in members]
            chosen.append([encode(Admitted(run=RUN, group=group, at=0.0)), *(encode(member) for member in still)])
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_bytes(msgpack.packb(chosen))
    print(f"{FILE}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
