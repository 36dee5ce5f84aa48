"""Cases: speculation on and off, closed-loop replay against a snapshot of the state behind every token, and the exactness of both rules."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from rollout_cache import says
from rollout_models import DEVICE, ON_GPU, engine_of, k3_model, released, say_of, warmed
from rollout_rows import Given, Row, row
from rollout_workload import Run, Workload, drive

from driftline.kernels.kda_decode import Window, kda_decode, replay_decode
from driftline.messages.types import Group, Sampling
from driftline.models.checkpoint import load_checkpoint
from driftline.models.logprob import scaled_log_softmax
from driftline.services.rollout.randomness import uniforms
from driftline.services.rollout.sampler import sample
from driftline.services.rollout.speculation import NgramDrafter, Pays, Purpose, Speculator, Verdict, matching
from driftline.services.rollout.speculation.judging import judge
from driftline.services.rollout.speculation.rules import streams

__all__ = ["exactness", "replay", "speculation"]

LENGTH = 3


def speculation(given: Given) -> list[Row]:
    """N-gram drafts of 3 under MATCH, which samples what plain decoding samples: on text that says nothing twice, on text that goes in circles, and on a trained
    policy's task. Random weights say nothing twice; those whose embeddings drown the layers go in circles, at no other cost a step."""
    rows: list[Row] = []
    load = Workload(trajectories=8, turns=2, members=4, system=96, task=48, sampled=32, tool=8, branch=0)
    if not given.quick:
        load = Workload(trajectories=32 if ON_GPU else 8, turns=4, members=8, system=256, task=128, sampled=64, tool=16, branch=0)
    model = k3_model(load.longest + 64)
    kinds = (("nothing repeats", load), ("it goes in circles", load._replace(temperature=0.01, repeats=True)))
    for i, (name, one) in enumerate(kinds):
        if i:
            with torch.no_grad():
                model.model.embed_tokens.weight.mul_(1e4)
        left = max(2.0, given.left / (len(kinds) - i + 0.5))
        plain, _ = _drafted(model, one, left / 3, None)
        for adaptive in (False, True):
            speculator = Speculator(NgramDrafter(), length=LENGTH, pays=Pays() if adaptive else None)
            run, speculator = _drafted(model, one, left / 3, speculator)
            rows.append(row(f"tokens sampled, {name}, n-gram drafts{', off by themselves' if adaptive else ''}", run.tokens_per_s, "tokens/s", peer="no drafts", peer_value=plain.tokens_per_s,
                            note=f"{speculator.acceptance.length:.2f} tokens a row and step, {speculator.acceptance.drafted_length:.2f} where there were drafts; {_places(speculator)}; "
                                 f"{_equal(plain, run)}; temperature {one.temperature:g}; {say_of(model)}; {says(one)}"))
    return [*rows, *_policy(given)]


def _drafted(model: Any, load: Workload, limit_s: float, speculator: Speculator | None) -> tuple[Run, Any]:
    engine = engine_of(model, max_batch=load.trajectories, **({"speculator": speculator} if speculator else {}))
    if ON_GPU:
        warmed(engine, load.system + load.task, load.longest, windows=(1, LENGTH + 1) if speculator else (1,))
        drive(engine, load._replace(turns=2, sampled=8, seed=99), limit_s=30)
    if speculator is not None:
        speculator.acceptance.reset()
    run = drive(engine, load, limit_s=limit_s, keep=True)
    del engine
    released()
    return run, speculator


def _places(speculator: Speculator) -> str:
    found = speculator.acceptance
    return "drafts that stood by place " + "/".join(f"{100 * s / max(1, r):.0f} %" for s, r in zip(found.stood, found.reached, strict=True))


def _equal(plain: Run, run: Run) -> str:
    common = plain.answers.keys() & run.answers.keys()
    return f"{sum(np.array_equal(plain.answers[k].tokens, run.answers[k].tokens) for k in common)} of {len(common)} answers have the tokens of the run without"


def _policy(given: Given) -> list[Row]:
    """The trained base policy on words to be spelt backward, groups of 8: members repeat each other."""
    from driftline.environments.source import load_source

    source = load_source("reasoning_gym", "spell_backward", {"min_word_len": 5, "max_word_len": 10})
    model = load_checkpoint("base").to(DEVICE)
    count = 8 if given.quick else 32

    def once(speculator: Speculator | None) -> tuple[float, int, dict[tuple[str, int], list[int]]]:
        engine = engine_of(model, max_batch=32, cache_bytes=300 * 2**20, **({"speculator": speculator} if speculator else {}))
        if ON_GPU:
            warmed(engine, 1, 200, windows=(1, LENGTH + 1) if speculator else (1,))
            _groups(engine, source, range(900, 902))
            if speculator:
                speculator.acceptance.reset()
        tokens, began = engine.tokens_sampled, time.perf_counter()
        found = _groups(engine, source, range(count))
        return (engine.tokens_sampled - tokens) / (time.perf_counter() - began), engine.tokens_sampled - tokens, found

    plain, _, one = once(None)
    speculator = Speculator(NgramDrafter(), length=LENGTH)
    drafted, tokens, other = once(speculator)
    same = sum(one[key] == other[key] for key in one)
    return [row("tokens sampled, the base policy spells words backward, n-gram drafts", drafted, "tokens/s", peer="no drafts", peer_value=plain,
                note=f"{speculator.acceptance.length:.2f} tokens a row and step; {_places(speculator)}; {count} groups of 8, {tokens} tokens; {same} of {len(one)} answers have the tokens of the run without")]


def _groups(engine: Any, source: Any, indices: range) -> dict[tuple[str, int], list[int]]:
    for index in indices:
        engine.submit(Group(run="bench", group=f"g{index}", index=index, task=source.task(index, 0), members=8, sampling=Sampling(max_tokens=16), seed=0))
    found = {}
    while not engine.idle:
        for done in engine.step():
            found[done.group, done.member] = done.tokens.tolist()
    return found


def replay(given: Given) -> list[Row]:
    """A layer's states over a window of four tokens: read and written once by replay, and written behind every token by snapshots. What a byte budget holds."""
    heads, dim = (8, 128) if ON_GPU else (4, 32)
    batch, window = (128, LENGTH + 1) if ON_GPU else (32, LENGTH + 1)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    g = torch.Generator(DEVICE).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device=DEVICE).to(dtype)

    q, k, v, z = (random(batch, window, heads, dim) for _ in range(4))
    beta = random(batch, window, heads)
    a_log, bias = torch.zeros(heads, device=DEVICE), torch.zeros(heads * dim, device=DEVICE)
    slots = torch.arange(batch, dtype=torch.int32, device=DEVICE)
    state = torch.zeros(batch, heads, dim, dim, device=DEVICE)
    kept = Window.empty(batch, window, heads, dim, dtype=dtype, device=DEVICE)
    accepted = torch.full((batch,), 2, dtype=torch.int32, device=DEVICE)
    snapshots = torch.zeros(window, batch, heads, dim, dim, device=DEVICE)
    parts = [[t[:, i].contiguous() for t in (q, k, v, z, beta)] for i in range(window)]
    rows_at = slots.long()

    def by_replay() -> None:
        replay_decode(q, k, v, z, beta, a_log, bias, state, slots, kept, accepted)

    def by_snapshots() -> None:
        state.copy_(snapshots[accepted.long() - 1, rows_at])  # back to behind what was accepted
        for i, part in enumerate(parts):
            kda_decode(*part, a_log, bias, state, slots)
            snapshots[i].copy_(state)

    ours, theirs = _timed(by_replay, given), _timed(by_snapshots, given)
    one = state[0].nbytes
    held = kept.bytes // batch
    note = f"{batch} rows, windows of {window}, {heads} heads of {dim}, {str(dtype)[6:]} inputs, float32 states" + ("" if ON_GPU else "; the forms of reference, which count operators and not bytes")
    return [
        row("a layer's states over a window, replay", 1e3 * ours, "ms", peer="a snapshot behind every token", peer_value=1e3 * theirs, smaller=True, note=note),
        row("states that fit into 1 GiB, one layer", float(2**30 // (one + held)), "sequences", peer="a snapshot behind every token", peer_value=float(2**30 // (one * (window + 1))),
            note=f"a state is {one / 2**20:.3g} MiB, a window's inputs {held / 2**20:.3g} MiB"),
    ]


def _timed(what: Any, given: Given) -> float:
    """Median seconds of a call; on a device several in a row between two waits."""
    repeats = 20 if ON_GPU else 1
    what()
    times = []
    for _ in range(5 if given.quick else 15):
        if ON_GPU:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            what()
        if ON_GPU:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / repeats)
    return float(np.median(times))


VOCABULARY, TEMPERATURE = 5, 0.8


def exactness(given: Given) -> list[Row]:
    """Total variation between what is sampled under drafts and the target, 4e5 draws of a language of five tokens; two rules that look right are caught."""
    trials = 400_000
    target, drafter = (1.2 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in (1, 2))
    keys = np.arange(trials, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(12345)
    tokens, probs = _chain_drafts(drafter, keys)
    greedy, greedy_probs = _chain_drafts(drafter, keys, greedy=True)
    p = scaled_log_softmax(target, TEMPERATURE).exp()[0]

    def tv(found: torch.Tensor) -> float:
        return float((torch.bincount(found, minlength=VOCABULARY).double() / trials - p).abs().sum() / 2)

    def judged(drafts: torch.Tensor, q: torch.Tensor | None) -> Verdict:
        counts = torch.full((trials,), LENGTH, dtype=torch.int32)
        return judge(target[drafts], drafts, counts, torch.full((trials,), TEMPERATURE), torch.from_numpy(keys.view(np.int64)), torch.zeros(trials, dtype=torch.int64), q)

    chosen = torch.stack([sample(target[tokens[:, j]], TEMPERATURE, uniforms(keys, np.full(trials, j)))[0] for j in range(LENGTH + 1)], 1)
    accepted = matching(tokens[:, 1:], torch.full((trials,), LENGTH, dtype=torch.int32), chosen)
    other = scaled_log_softmax(probs.log().flatten(0, 1), 1.25).exp().view_as(probs)
    rejected = judged(tokens, probs)
    note = f"{trials} draws, {VOCABULARY} tokens, chain drafts of {LENGTH}"
    return [
        row("total variation, MATCH", tv(chosen[:, 0]), "", bound=0.003, note=f"{note}; {1 + float(accepted.double().mean()):.2f} tokens a step"),
        row("total variation, REJECTION", tv(rejected.tokens[:, 0]), "", bound=0.003, note=f"{note}; {1 + float(rejected.accepted.double().mean()):.2f} tokens a step"),
        row("total variation, a greedy draft under its softmax", tv(judged(greedy, greedy_probs).tokens[:, 0]), "", bound=0.003, note="a wrong rule: the bound can fail"),
        row("total variation, a draft's probabilities at another temperature", tv(judged(tokens, other).tokens[:, 0]), "", bound=0.003, note="a wrong rule"),
    ]


def _chain_drafts(drafter: torch.Tensor, keys: np.ndarray, *, greedy: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, probs = [torch.zeros(len(keys), dtype=torch.int64)], []
    for place in range(LENGTH):
        q = scaled_log_softmax(drafter[tokens[-1]], TEMPERATURE).exp().float()
        probs.append(q)
        running = q.double().cumsum(-1)
        point = torch.from_numpy(uniforms(streams(keys, Purpose.DRAFT), np.full(len(keys), place)))[:, None] * running[:, -1:]
        tokens.append(q.argmax(-1) if greedy else torch.searchsorted(running, point, right=True).squeeze(-1).clamp_max(VOCABULARY - 1))
    return torch.stack(tokens, 1), torch.stack(probs, 1)
