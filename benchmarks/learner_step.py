"""A learner's step and an engine's decoding at a real size: tokens a second and peak memory, with layers kept or run again, packed or padded.

`smollm2` is a dense decoder of SmolLM2-135M's sizes, all weights trained; `k3` is a K3 of 4 layers at hidden 7168 with 896 experts a layer in MXFP4, rank-64
adapters on its linears trained. On a CPU both are tiny. Weights are random and completions are of random tokens and lengths (lognormal, the same for every
case), so what is timed is arithmetic, not learning. A step is `Trainer.step`: forward, backward, clipping, AdamW, rounding to the policy, in one order of sums as the
learner's process asks for (`compute_deterministically`); its tokens are those that are fed, a group's prompt once. Memory is the allocator's peak on a device; on a CPU it is what autograd keeps of a token for the backward pass.

    python benchmarks/learner_step.py [--models smollm2 k3] [--device h200] [--quick] [--limit SECONDS] [--commit ID]
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from driftline.messages.types import Finish, Graded, Group, Sampling, Task, Trajectory
from driftline.models.architectures import AnyConfig
from driftline.models.assembly import assembled
from driftline.models.causal_lm import CausalLM
from driftline.models.config import tiny
from driftline.models.dense.config import DenseConfig
from driftline.models.lora import add_lora
from driftline.models.quantisation import Quantisation
from driftline.models.random_weights import RandomTensors
from driftline.models.recompute import Recompute
from driftline.models.sizes import like_k3
from driftline.models.stored import public_shapes, skeleton
from driftline.services.config import LearnerConfig, Proximal
from driftline.services.config import Recompute as LearnerRecompute
from driftline.services.learner.assembler import Batch, BatchGroup
from driftline.services.learner.determinism import compute_deterministically
from driftline.services.learner.micro_batches import by_groups, by_tokens, token_count
from driftline.services.learner.shared_prompts import forward_groups
from driftline.services.learner.trainer import Trainer
from driftline.services.rollout.engine import Engine

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
RUN = "learner-step"
MIB = 2**20
SCALE_OF_A_SMALL_WEIGHT = 120
"""E8M0: 2^-7, which with the values of E2M1 gives experts the spread of the other matrices."""

Row = dict[str, object]


@dataclass(frozen=True)
class Load:
    """What a step is given: groups of members, prompt tokens, the longest completion; tokens of a pack, and groups of a padded micro-batch."""

    groups: int
    members: int
    prompt: int
    longest: int
    pack: int
    padded_groups: int
    decoded: int


@dataclass(frozen=True)
class Subject:
    """`make`: the model with what is trained of it. `load`: see there."""

    name: str
    note: str
    make: Callable[[], CausalLM]
    load: Load


class Case(NamedTuple):
    recompute: Recompute
    packed: bool

    def __str__(self) -> str:
        return f"{'packed' if self.packed else 'padded'}, layers {'run again' if self.recompute is Recompute.LAYERS else 'kept'}"


class Stepped(NamedTuple):
    """memory: MiB, or KiB a token, in the unit of the row."""

    seconds: float
    memory: float


def smollm2_config() -> DenseConfig:
    """SmolLM2-135M-Instruct's config.json, as far as it decides shapes."""
    return DenseConfig.of({
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "max_position_embeddings": 8192, "tie_word_embeddings": True, "hidden_act": "silu",
    }, "smollm2")


def tiny_dense_config() -> DenseConfig:
    return DenseConfig.of({
        "model_type": "llama", "vocab_size": 512, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 3,
        "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "max_position_embeddings": 8192, "tie_word_embeddings": True, "hidden_act": "silu",
    }, "tiny")


def random_model(config: AnyConfig, experts: Quantisation) -> CausalLM:
    """bfloat16 on a GPU and float32 on a CPU; packed experts are random codes, drawn and never packed, which takes seconds and not minutes."""
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    plain = RandomTensors(config, public_shapes(skeleton(config, Quantisation.NONE)), 0, DEVICE)
    shapes = public_shapes(skeleton(config, experts))
    generator = torch.Generator(DEVICE).manual_seed(0)

    def read(name: str) -> torch.Tensor:
        if name.endswith("_packed"):
            return torch.randint(0, 256, shapes[name].shape, dtype=torch.uint8, device=DEVICE, generator=generator)
        if name.endswith("_scale"):
            return torch.full(shapes[name].shape, SCALE_OF_A_SMALL_WEIGHT, dtype=torch.uint8, device=DEVICE)
        return plain.read(name)

    return assembled(config, experts, read, dtype=dtype, device=DEVICE)


def k3_with_adapters(config: AnyConfig, experts: Quantisation, rank: int) -> CausalLM:
    model = random_model(config, experts)
    torch.manual_seed(0)
    add_lora(model, rank, targets=r".*proj$")
    return model.to(DEVICE)


def subjects(quick: bool) -> list[Subject]:
    if not ON_GPU:
        load = Load(groups=4, members=4, prompt=24, longest=40, pack=256, padded_groups=1, decoded=16)
        return [
            Subject("smollm2", "tiny: 4 layers of 96, float32, all weights", lambda: random_model(tiny_dense_config(), Quantisation.NONE), load),
            Subject("k3", "tiny: 5 layers of 128, 16 experts in MXFP4, float32, rank 4 on the linears", lambda: k3_with_adapters(tiny(), Quantisation.MXFP4, 4), load),
        ]
    small = Load(groups=4, members=8, prompt=256, longest=256, pack=8192, padded_groups=1, decoded=32)
    dense = small if quick else Load(groups=32, members=8, prompt=256, longest=1024, pack=32768, padded_groups=4, decoded=64)
    moe = small if quick else Load(groups=4, members=8, prompt=512, longest=1024, pack=8192, padded_groups=1, decoded=48)
    return [
        Subject("smollm2", "30 layers of 576, bfloat16 with fp32 masters, all 135M weights", lambda: random_model(smollm2_config(), Quantisation.NONE), dense),
        Subject("k3", "4 layers of 7168, 896 experts in MXFP4, bfloat16, rank 64 on the linears",
                lambda: k3_with_adapters(like_k3(4, 7168, vocab_size=163840), Quantisation.MXFP4, 64), moe),
    ]


def batch_of(load: Load, vocabulary: int) -> Batch:
    """Random tokens; half of the completions are shorter than a quarter of the longest."""
    rng = np.random.default_rng(0)
    groups = []
    for index in range(load.groups):
        prompt = rng.integers(0, vocabulary, load.prompt)
        task = Task(id=f"learner-step/{index}", source="benchmark", family="none", prompt="none", answer="")
        name = f"g{index:08d}"
        group = Group(run=RUN, group=name, index=index, task=task, members=load.members, sampling=Sampling(max_tokens=load.longest), seed=0)
        lengths = np.clip(np.exp(rng.normal(np.log(load.longest / 4), 0.8, load.members)), 2, load.longest).astype(int)
        members = []
        for member, length in enumerate(lengths):
            total = load.prompt + int(length)
            mask = np.arange(total) >= load.prompt
            trajectory = Trajectory(
                run=RUN, group=name, member=member, members=load.members, index=index, task=task, prompt_tokens=load.prompt,
                tokens=np.concatenate([prompt, rng.integers(0, vocabulary, int(length))]).astype(np.int32), action_mask=mask,
                logprobs=np.where(mask, -float(np.log(vocabulary)), 0).astype(np.float32), versions=np.where(mask, 0, -1).astype(np.int32), finish=Finish.LENGTH,
            )
            members.append(Graded(run=RUN, trajectory=trajectory, reward=float(member % 2)))
        groups.append(BatchGroup(group, tuple(members), ()))
    return Batch(0, tuple(groups))


def settings(load: Load, case: Case) -> LearnerConfig:
    return LearnerConfig(
        lr=1e-6, proximal=Proximal.RECOMPUTE, eps_low=0.2, eps_high=0.2, micro_batch_groups=load.padded_groups,
        micro_batch_tokens=load.pack if case.packed else 0, recompute=LearnerRecompute(case.recompute.value),
    )


def synchronised() -> float:
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def emptied() -> None:
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def stepped(trainer: Trainer, batch: Batch, repeats: int) -> Stepped:
    """The median of `repeats` steps after one that is not timed."""
    trainer.step(batch)
    emptied()
    times = []
    for _ in range(repeats):
        started = synchronised()
        trainer.step(batch)
        times.append(synchronised() - started)
    memory = torch.cuda.max_memory_allocated() / MIB if ON_GPU else kept_kib(trainer, batch)
    return Stepped(statistics.median(times), memory)


def kept_kib(trainer: Trainer, batch: Batch) -> float:
    """Memory that the first micro-batch's forward leaves allocated while its loss is held, for each token that is fed."""
    tokens = trainer.config.micro_batch_tokens
    part = (by_tokens(batch.groups, tokens) if tokens else by_groups(batch.groups, trainer.config.micro_batch_groups))[0]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        flat = forward_groups(trainer.model, part.groups, packed=tokens > 0, numbers=part.numbers)
    kept: int = sum(event.nbytes() for event in seen.profiler.kineto_results.events() if event.name() == "[memory]")
    del flat
    return kept / 1024 / sum(token_count(range(len(g.members)), g) for g in part.groups)


def learner_rows(subject: Subject, model: CausalLM, cases: Sequence[Case], repeats: int, until: float) -> list[Row]:
    """No case is begun after `until`, by the monotonic clock."""
    load = subject.load
    batch = batch_of(load, min(model.config.vocab_size, 256))
    fed = sum(token_count(range(len(g.members)), g) for g in batch.groups)
    widest = load.groups * (load.prompt - 1 + load.members * max(len(t.tokens) - t.prompt_tokens for t in batch.trajectories))
    found: dict[Case, Stepped | str] = {}
    for case in cases:
        if time.monotonic() > until:
            break
        trainer = Trainer(model, settings(load, case))
        emptied()
        try:
            found[case] = stepped(trainer, batch, repeats)
        except torch.OutOfMemoryError as error:
            found[case] = f"does not fit: {str(error).splitlines()[0][:80]}"
        except (RuntimeError, ValueError) as error:  # the other cases are still worth their time
            found[case] = f"failed: {str(error).splitlines()[0][:120]}"
        del trainer
        emptied()
    rows: list[Row] = []
    for case, result in found.items():
        label = f"{subject.name} learner: {case}"
        if isinstance(result, str):
            rows.append(row(f"{label}: tokens", None, "tokens/s", note=result))
            continue
        peer = found.get(Case(case.recompute, packed=False)) if case.packed else None
        peer = peer if isinstance(peer, Stepped) else None
        named = "padded" if peer else None
        size = f"packs of {load.pack} tokens" if case.packed else f"{load.padded_groups} groups at a time, up to {widest} tokens with padding"
        rows += [
            row(f"{label}: tokens", fed / result.seconds, "tokens/s", named, fed / peer.seconds if peer else None,
                note=f"{1000 * result.seconds:.0f} ms for {fed} tokens of {load.groups} groups of {load.members}; {size}"),
            row(f"{label}: {'peak memory' if ON_GPU else 'kept of a token'}", result.memory, "MiB" if ON_GPU else "KiB", named, peer.memory if peer else None,
                note=subject.note),
        ]
    return rows


def decode_rows(subject: Subject, model: CausalLM, repeats: int) -> list[Row]:
    """All rows decode together; the first pass, which compiles, is not timed."""
    load = subject.load
    engine = Engine(model, version=0, max_batch=load.groups * load.members)
    batch = batch_of(load, 256)

    def run() -> tuple[float, int]:
        for each in batch.groups:
            task = each.group.task.model_copy(update={"prompt": "x" * (load.prompt - 1)})
            engine.submit(each.group.model_copy(update={"task": task, "sampling": Sampling(max_tokens=load.decoded)}))
        engine.step()
        started, first = synchronised(), engine.tokens_sampled
        while not engine.idle:
            engine.step()
        return synchronised() - started, engine.tokens_sampled - first

    run()
    emptied()
    rates, counts = [], []
    for _ in range(repeats):
        seconds, count = run()
        rates.append(count / seconds)
        counts.append(count)
    rows = [row(f"{subject.name} engine: decode", statistics.median(rates), "tokens/s",
                note=f"{load.groups * load.members} rows after prompts of {load.prompt}, {counts[0]} tokens; {subject.note}")]
    if ON_GPU:
        rows.append(row(f"{subject.name} engine: peak memory", torch.cuda.max_memory_allocated() / MIB, "MiB", note="weights included"))
    return rows


def row(case: str, ours: float | None, unit: str, peer: str | None = None, peer_value: float | None = None, *, note: str = "") -> Row:
    """The ratio is above 1 where ours is better: more tokens, less memory."""
    ratio = None
    if ours is not None and peer_value:
        ratio = ours / peer_value if unit == "tokens/s" else peer_value / ours
    return {"case": case, "ours": None if ours is None else float(f"{ours:.4g}"), "unit": unit, "peer": peer,
            "peer_value": None if peer_value is None else float(f"{peer_value:.4g}"), "ratio": None if ratio is None else float(f"{ratio:.3g}"), "bound": None, "note": note}


def measured(subject: Subject, cases: Sequence[Case], repeats: int, until: float) -> list[Row]:
    model = subject.make()
    compute_deterministically(str(DEVICE))
    rows = learner_rows(subject, model.train(), cases, repeats, until)
    torch.use_deterministic_algorithms(False)  # an engine is another process
    if time.monotonic() < until:
        rows += decode_rows(subject, model, repeats)
    del model
    emptied()
    return rows


def others(path: Path, models: Sequence[str]) -> list[Row]:
    """Rows of models that are not measured now, which an earlier run has left in the file."""
    if not path.exists():
        return []
    rows: list[Row] = json.loads(path.read_text())["rows"]
    return [each for each in rows if not str(each["case"]).startswith(tuple(models))]


def main() -> None:
    compute_deterministically(str(DEVICE))  # cuBLAS reads its setting at its first product
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="h200" if ON_GPU else "cpu-2core", help="the folder of results")
    parser.add_argument("--models", nargs="+", default=["smollm2", "k3"], choices=["smollm2", "k3"])
    parser.add_argument("--quick", action="store_true", help="a small batch, one repeat")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which no further case is begun; a model has an equal share of them")
    parser.add_argument("--commit", default="", help="what to name as measured; git's where there is one")
    parser.add_argument("--out", default="", help="another folder for the result")
    given = parser.parse_args()
    cases = [Case(recompute, packed) for packed in (True, False) for recompute in reversed(Recompute)]
    result = {
        "command": f"python benchmarks/learner_step.py --models {' '.join(given.models)}{' --quick' if given.quick else ''}{f' --limit {given.limit:g}' if given.limit < 3600 else ''}",
        "commit": given.commit or subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "device": given.device,
        "note": f"{torch.cuda.get_device_name() if ON_GPU else 'CPU'}, torch {torch.__version__}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f} at the start",
    }
    path = (Path(given.out) if given.out else Path(__file__).parent / "results" / given.device) / "learner_step.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = others(path, given.models)
    started = time.monotonic()
    for subject in subjects(given.quick):
        if subject.name in given.models:
            share = given.limit * (given.models.index(subject.name) + 1) / len(given.models)
            made = measured(subject, cases, 1 if given.quick else 3, started + share)
            rows += made
            path.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")
            for each in made:
                print(f"{each['case']:64} {each['ours']} {each['unit']}  {each['ratio'] or ''}  {each['note']}", flush=True)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
