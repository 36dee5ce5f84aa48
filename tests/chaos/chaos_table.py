"""The table of docs/reliability.md from one or more summaries of `make chaos`.

    python tests/chaos/chaos_table.py runs/chaos/summary.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

KINDS = ("learner", "rollout", "grader", "dispatcher", "evaluator", "policy-store")
HEAD = ("seed", "commit", f"killed: {', '.join(KINDS)}", "broker restarts", "paused + cut off", "duplicates", "trajectory ids", "lost", "doubled",
        "audit", "versions", "replay", "learner restored + recomputed", "s")


def table(seeds: Iterable[dict[str, Any]]) -> list[str]:
    seeds = sorted(seeds, key=lambda seed: seed["seed"])
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    for s in seeds:
        resumed = s["resumed"]
        cells = (
            s["seed"], s["commit"], ", ".join(str(s["kills"][kind]) for kind in KINDS), s["broker_stops"] + s["broker_kills"],
            f"{s['pauses']} + {s['cut_offs']}", sum(s["duplicates"].values()), s["ids"], s["lost"], s["doubled"], s["audit_findings"], s["versions"],
            "equal" if s["replay_equal"] else "**differs**", f"{resumed.get('restored', 0)} + {resumed.get('recomputed', 0)}", round(s["wall_s"]),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    kills = sum(sum(s["kills"].values()) for s in seeds)
    total = (
        f"**{len(seeds)}**", "", f"**{kills}**", f"**{sum(s['broker_stops'] + s['broker_kills'] for s in seeds)}**",
        f"**{sum(s['pauses'] + s['cut_offs'] for s in seeds)}**", f"**{sum(sum(s['duplicates'].values()) for s in seeds)}**",
        f"**{sum(s['ids'] for s in seeds)}**", f"**{sum(s['lost'] for s in seeds)}**", f"**{sum(s['doubled'] for s in seeds)}**",
        f"**{sum(s['audit_findings'] for s in seeds)}**", f"**{sum(s['versions'] for s in seeds)}**",
        f"**{sum(bool(s['replay_equal']) for s in seeds)} equal**", f"**{sum(sum(s['resumed'].values()) for s in seeds)}**",
        f"**{round(sum(s['wall_s'] for s in seeds))}**",
    )
    return [*lines, "| " + " | ".join(total) + " |"]


if __name__ == "__main__":
    print("\n".join(table(seed for path in sys.argv[1:] for seed in json.loads(Path(path).read_text())["seeds"])))
