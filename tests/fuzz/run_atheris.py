"""Coverage-guided fuzzing of one target, for as long as it is told. Not part of the tests: it needs `pip install atheris`.

    python tests/fuzz/run_atheris.py frame CORPUS -max_total_time=600 -rss_limit_mb=1024 -max_len=8192

Starts from the seeds (a frame of every schema) and what CORPUS holds, and adds to CORPUS whatever reaches new code. Everything after
the folder goes to libFuzzer. A crash leaves the input beside it: put it into tests/fuzz/corpus/<target>, where `make test` replays it.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import atheris

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

with atheris.instrument_imports(include=["driftline.messages", "driftline.policy_store", "driftline.services.replay", "fuzz_targets"]):
    import fuzz_targets

GOLDEN = HERE.parent / "unit" / "messages" / "golden_frames.json"


def main() -> None:
    target, corpus = sys.argv[1], Path(sys.argv[2])
    corpus.mkdir(parents=True, exist_ok=True)
    frames = {name: base64.b64decode(text) for name, text in json.loads(GOLDEN.read_text()).items()}
    for name, data in fuzz_targets.seeds(target, frames).items():
        (corpus / f"seed-{name}").write_bytes(data)
    kept = HERE / "corpus" / target
    folders = [str(corpus), *([str(kept)] if kept.is_dir() else [])]
    atheris.Setup([sys.argv[0], *folders, *sys.argv[3:]], fuzz_targets.TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
