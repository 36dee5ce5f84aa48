"""Cases: the prefix cache on and off, what it leaves bit for bit as it was, and transformers' generate on the same dense model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from rollout_models import DEVICE, ON_GPU, dense_model, engine_of, k3_model, released, say_of, warmed
from rollout_rows import Given, Row, row
from rollout_workload import Run, Workload, drive

from driftline.kernels.mode import Numerics, using
from driftline.models.causal_lm import CausalLM
from driftline.models.dense.config import DenseConfig
from driftline.models.paged import Pool
from driftline.services.rollout.weights import parameters_of

__all__ = ["cache", "identical", "peer", "workload_of"]

SMALL = Workload(trajectories=16, turns=10, members=4, system=96, task=48, sampled=8, tool=4, branch=5)
MEDIUM = Workload(trajectories=32, turns=25, members=8, system=256, task=128, sampled=12, tool=6, branch=12)


def workload_of(given: Given) -> Workload:
    """The issue's on a GPU; on a CPU one that ends."""
    if given.quick:
        return SMALL
    return Workload() if ON_GPU else MEDIUM


def says(load: Workload) -> str:
    return (f"{load.trajectories} trajectories of {load.turns} turns, {load.sampled} sampled and {load.tool} of a tool each, {load.system} tokens shared by all and "
            f"{load.task} by {load.members}; prompts of {load.mean_prompt:.0f} tokens in the mean, {load.longest} at the end")


def cache(given: Given) -> list[Row]:
    load = workload_of(given)
    model = k3_model(load.longest + 64)
    on = _run(model, load, given, 0.6, prefix_cache=True)
    off = _run(model, load, given, 0.6, prefix_cache=False)
    together = _run(model, load._replace(tool_steps=0), given, 1.0, prefix_cache=True)
    note = f"{say_of(model)}; {says(load)}"
    rows = [
        row("prompt tokens that were cached", 100 * on.hit_rate, "%", bound=100 * load.best_hit_rate, note=f"{_share(on, load)}; bound: a cache that forgets nothing; {note}"),
        row("tokens sampled, whole run", on.tokens_per_s, "tokens/s", peer="cache off", peer_value=off.tokens_per_s,
            note=f"{on.turns} turns in {on.seconds:.1f} s; off {off.turns} turns in {off.seconds:.1f} s" + ("" if off.whole else ", the early, shorter ones")),
        row("tokens sampled, all tools answer at once", together.tokens_per_s, "tokens/s", note=f"cache on; {_share(together, load)}, {together.seconds:.1f} s; a turn's prompts are one forward"),
    ]
    return rows + _by_length(on, off, "cache off")


def _share(run: Run, load: Workload) -> str:
    return f"all {run.turns} turns" if run.whole else f"{run.turns} of {load.trajectories * load.turns} turns, the time was over"


def _by_length(ours: Run, theirs: Run, name: str) -> list[Row]:
    """Ours at its own mean lengths; theirs at the nearest it came to, where that is near."""
    other = theirs.by_length()
    rows = []
    for length, rate in ours.by_length():
        near = min(other, key=lambda pair: abs(pair[0] - length), default=None)
        value = near[1] if near is not None and abs(near[0] - length) < 0.15 * length else None
        rows.append(row(f"tokens sampled at histories of {length:.0f}", rate, "tokens/s", peer=name, peer_value=value, note="" if near is None or value is None else f"peer at {near[0]:.0f}"))
    return rows


def _run(model: CausalLM, load: Workload, given: Given, share: float, **how: Any) -> Run:
    """In that share of the time left when everything is compiled and captured."""
    engine = engine_of(model, max_batch=load.trajectories, **how)
    if ON_GPU:
        warmed(engine, load.system + load.task, load.longest)
        drive(engine, load._replace(turns=2, branch=0, sampled=4, seed=99), limit_s=20)
    run = drive(engine, load, limit_s=max(2.0, share * given.left))
    del engine
    released()
    return run


def identical(given: Given) -> list[Row]:
    """Deterministic mode: the same tokens and log-probabilities, bit for bit, whatever the cache did."""
    load = SMALL._replace(trajectories=6, members=2, turns=2, branch=1, sampled=40 if given.quick else 160)
    with using(Numerics.DETERMINISTIC):
        return _identical(given, load)


def _identical(given: Given, load: Workload) -> list[Row]:
    model = k3_model(load.longest + 64)
    sizes = Pool.sizes(model)
    shared, own = (load.system + load.task) // 64 + 1, (load.longest - load.system - load.task) // 64 + 1
    tight = max(load.longest // 64 + 5, shared + load.trajectories * own // 2) * sizes.page_bytes + load.trajectories * sizes.state_bytes
    ways: dict[str, dict[str, Any]] = {
        "cache on": {}, "half the rows at a time": {"batch": load.trajectories // 2}, "prompts in pieces of 64": {"prefill_tokens": 64},
        "little memory: eviction and preemption": {"cache_bytes": tight}, "little memory, a host tier": {"cache_bytes": tight, "host_bytes": 64 * 2**20},
    }
    reference = _deterministic(model, load, given.left / 3, prefix_cache=False)
    rows = []
    for i, (name, how) in enumerate(ways.items()):
        run = _deterministic(model, load, max(2.0, given.left / (len(ways) - i + 1)), **how)
        common = reference.answers.keys() & run.answers.keys()
        differ = sum(not _same(reference.answers[k], run.answers[k]) for k in common)
        rows.append(row(f"answers that differ from cache off: {name}", float(differ), "answers", bound=0.0,
                        note=f"of {len(common)} in common, {run.tokens} tokens and log-probabilities compared bitwise; {100 * run.hit_rate:.1f} % cached; {run.stale} times a row made room"))
    rows.append(row("answers that differ: another temperature", float(_control(model, load, reference, given)), "answers", note="the comparison can fail: temperature 1.001"))
    return rows


def _control(model: CausalLM, load: Workload, reference: Run, given: Given) -> int:
    other = _deterministic(model, load._replace(turns=1, branch=0, temperature=1.001), max(3.0, given.left))
    return sum(not _same(reference.answers[k], other.answers[k]) for k in reference.answers.keys() & other.answers.keys())


def _same(a: Any, b: Any) -> bool:
    return np.array_equal(a.tokens, b.tokens) and np.array_equal(a.logprobs, b.logprobs)


def _deterministic(model: CausalLM, load: Workload, limit_s: float, *, batch: int | None = None, **how: Any) -> Run:
    engine = engine_of(model, max_batch=batch or load.trajectories, **how)
    run = drive(engine, load, limit_s=limit_s, keep=True)
    run.stale = engine.preemptions
    engine.cache.check()
    del engine
    released()
    return run


def peer(given: Given) -> list[Row]:
    """The same dense weights, batch and lengths through transformers' generate, which computes every turn's prompt again. All tools answer at once, as its batches ask."""
    load = workload_of(given)._replace(tool_steps=0)
    model = dense_model(load.longest + 64)
    ours = _run(model, load, given, 0.5)
    parts = ours.by_length()
    note = f"{say_of(model)}; {_share(ours, load)}; {100 * ours.hit_rate:.2f} % of prompt tokens cached; {says(load)}"
    theirs = _generate(model, load, [length for length, _ in parts], given)
    rows = [row("tokens sampled, dense, whole run", ours.tokens_per_s, "tokens/s", note=note)]
    for (length, rate), found in zip(parts, [*theirs, *[None] * len(parts)], strict=False):
        rows.append(row(f"tokens sampled, dense, at histories of {length:.0f}", rate, "tokens/s", peer="transformers generate", peer_value=found))
    rows.append(row("log-probabilities, dense, ours and transformers' forward", _apart(model), "nats", note="largest difference on 4 sequences of 100 tokens: the models are the same"))
    return rows


def hf_model(model: CausalLM) -> Any:
    """The same weights in transformers' Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.config
    assert isinstance(config, DenseConfig)
    parameters = parameters_of(model)
    dtype = next(iter(parameters.values())).dtype
    theirs = LlamaForCausalLM(LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size, num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads, num_key_value_heads=config.num_key_value_heads, rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings, rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )).to(DEVICE, dtype)
    missing, unexpected = theirs.load_state_dict(parameters, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"transformers' Llama lacks {unexpected[:3]} and wants {missing[:3]}")
    theirs.tie_weights()
    return theirs.eval()


def _apart(model: CausalLM) -> float:
    tokens = torch.randint(0, model.config.vocab_size, (4, 100), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    with torch.inference_mode():
        ours = model.logits(model(tokens).hidden).float().log_softmax(-1)
        theirs = hf_model(model)(tokens).logits.float().log_softmax(-1)
    return float((ours - theirs).gather(2, tokens[..., None]).abs().max())


@torch.inference_mode()
def _generate(model: CausalLM, load: Workload, lengths: Sequence[float], given: Given) -> list[float]:
    theirs, rates = hf_model(model), []
    rng = np.random.default_rng(0)

    def once(length: int, new: int) -> float:
        tokens = torch.from_numpy(rng.integers(0, load.vocabulary, (load.trajectories, length))).to(DEVICE)
        began = time.perf_counter()
        theirs.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new, min_new_tokens=new, pad_token_id=0)
        if ON_GPU:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    once(64, 2)
    for length in lengths:
        if given.left <= 0 and rates:
            break
        rates.append(load.trajectories * load.sampled / once(int(length), load.sampled))
    return rates
