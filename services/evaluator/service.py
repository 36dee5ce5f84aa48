"""The evaluator: a pinned version on a fixed held-out task set, at the training temperature and greedily.

Guarantees: the tasks are the same for every version and share no question with training; the randomness is the same too, so two versions differ by their
weights alone; a result carries the version whose digest was checked, and which is held (a lease) until the result is stored. Version 0 and the last one are always measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import structlog
import torch

from driftline.environments.source import MixturePart, load_source
from driftline.messages.bus import Bus
from driftline.messages.subjects import Subjects
from driftline.messages.types import EvalResult, Group, Sampling, Task
from driftline.models.causal_lm import CausalLM
from driftline.models.tokenizer import Tokenizer
from driftline.models.tokenizers.loading import load_tokenizer
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.manifest import Manifest
from driftline.policy_store.pins import held
from driftline.policy_store.reader import PolicyReader, VersionCollected
from driftline.services.config import Config
from driftline.services.grader.pool import GraderPool
from driftline.services.grader.private import private_paths
from driftline.services.policy_model import build_model
from driftline.services.rollout.engine import Engine, EngineMemory
from driftline.services.runtime import finished
from driftline.services.starting import starting_place
from driftline.services.telemetry import Reporter
from driftline.services.tensors import from_host

__all__ = ["EvaluatorService", "heldout_tasks", "next_version"]

log = structlog.get_logger("evaluator")

OWNER = "evaluator"
EVAL_SEED = 90_001
MAX_BATCH = 128


@dataclass(frozen=True)
class _Policy:
    """What is measured: the model, into which versions are loaded, and its tokenizer."""

    model: CausalLM
    tokenizer: Tokenizer


@dataclass(frozen=True)
class _Sampled:
    task: Task
    text: str


def next_version(done: int, head: int, every: int) -> int | None:
    """The version to measure next: 0 first, then the newest multiple of `every` that exists and was not measured."""
    if done < 0:
        return 0
    if every == 0:
        return None
    newest = head // every * every
    return newest if newest > done else None


def heldout_tasks(config: Config) -> list[Task]:
    """The run's held-out tasks: `tasks.eval_params` of the family, or what training draws from."""
    tasks = config.tasks
    mixture = [] if tasks.eval_params is not None else [MixturePart(p.family, p.params, p.weight, p.source) for p in tasks.mixture]
    params = tasks.params if tasks.eval_params is None else tasks.eval_params
    source = load_source(tasks.source, tasks.family, params, mixture=mixture, heldout_seed=tasks.heldout_seed, few_shot=tasks.few_shot)
    return source.heldout(tasks.heldout)


class EvaluatorService:
    def __init__(self, bus: Bus, blobs: BlobStore, config: Config, reporter: Reporter | None = None) -> None:
        self._bus, self._config = bus, config
        self._reporter = reporter or Reporter(bus, config.run.name, "evaluator")
        self._subjects = Subjects(config.run.name)
        self._reader = PolicyReader(bus, blobs, config.run.name)
        self._head = -1
        self._end: int | None = None
        self._changed = asyncio.Event()
        self.measured: list[int] = []

    async def run(self) -> None:
        """Measure versions until the run is finished and its last version is measured."""
        config, grader = self._config, self._config.grader
        tasks = await asyncio.to_thread(heldout_tasks, config)
        model = await asyncio.to_thread(build_model, config, device=config.evaluator.device, threads=config.evaluator.threads)
        tokenizer = await asyncio.to_thread(load_tokenizer, starting_place(config))
        sources = sorted({task.source for task in tasks})
        pool = GraderPool(
            sources, workers=1, deadline_s=grader.deadline_s, memory_mb=grader.memory_mb, sandbox=grader.sandbox.value,
            hidden=private_paths(config),
        )
        async with pool, asyncio.TaskGroup() as group:
            helpers = [group.create_task(self._follow_head(), name="head"), group.create_task(self._follow_end(), name="end")]
            await self._measure_all(_Policy(model, tokenizer), tasks, pool)
            for helper in helpers:
                helper.cancel()

    async def _follow_head(self) -> None:
        async with aclosing(self._reader.watch()) as heads:  # type: ignore[type-var]
            async for head in heads:
                self._head = head.version
                self._changed.set()

    async def _follow_end(self) -> None:
        self._end = (await finished(self._bus, self._config.run.name)).version
        self._changed.set()

    async def _measure_all(self, policy: _Policy, tasks: Sequence[Task], pool: GraderPool) -> None:
        done = await self._already_measured()
        while True:
            self._changed.clear()
            version = next_version(done, self._head, self._config.evaluator.every) if self._head >= 0 else None
            if self._end is not None and done >= 0:  # a short run may end before its first version was measured
                version = self._end if self._end > done else None
                if version is None:
                    return
            if version is None:
                await self._changed.wait()
                continue
            try:
                async with held(self._bus, self._reader, version, OWNER) as manifest:
                    await self._measure(policy, tasks, pool, manifest)
            except VersionCollected as error:  # it was old when its turn came: the next one is due
                log.warning("version not measured", version=version, cause=str(error))
            done = version

    async def _already_measured(self) -> int:
        """A restarted evaluator goes on after the newest result it finds."""
        last = await self._bus.last(self._subjects.stream("EVAL"), f"{self._subjects.root}.eval.>")
        return last.message.version if last is not None and isinstance(last.message, EvalResult) else -1

    async def _measure(self, policy: _Policy, tasks: Sequence[Task], pool: GraderPool, manifest: Manifest) -> None:
        version = manifest.version
        began = time.monotonic()
        state = from_host(await self._reader.materialise_manifest(manifest))
        samples = self._config.evaluator.samples
        sampled = await asyncio.to_thread(self._sample, policy, version, state, tasks, samples, False)
        greedy = await asyncio.to_thread(self._sample, policy, version, state, tasks, 1, True)
        reward, exact = await self._score(pool, sampled)
        reward_greedy, exact_greedy = await self._score(pool, greedy)
        wall = time.monotonic() - began
        result = EvalResult(
            run=self._config.run.name, version=version, tasks=len(tasks), samples=samples, reward_sampled=reward, reward_greedy=reward_greedy,
            exact_sampled=exact, exact_greedy=exact_greedy, wall_s=wall, at=time.time(),
        )
        await self._bus.publish(self._subjects.evaluation(version), result, id=f"{self._config.run.name}/eval/{version}")
        self.measured.append(version)
        log.info("version measured", version=version, reward=round(reward, 4), greedy=round(reward_greedy, 4), seconds=round(wall, 2))
        await self._reporter.report({"version": version, "reward_sampled": reward, "reward_greedy": reward_greedy, "exact_greedy": exact_greedy,
                                     "exact_sampled": exact, "wall_s": wall}, step=version)

    def _sample(
        self, policy: _Policy, version: int, state: Mapping[str, torch.Tensor], tasks: Sequence[Task], samples: int, greedy: bool
    ) -> list[_Sampled]:
        rollout = self._config.rollout
        engine = Engine(
            policy.model, version=version, max_batch=min(MAX_BATCH, rollout.max_batch) if rollout.cache_mb else MAX_BATCH, name="evaluator",
            greedy_decoding=greedy, tokenizer=policy.tokenizer, memory=EngineMemory(cache_bytes=rollout.cache_mb * 2**20),
        )
        engine.load(version, state)
        sampling: Sampling = self._config.sampling.message()
        for i, task in enumerate(tasks):
            engine.submit(Group(run=self._config.run.name, group=f"eval{i:06d}", index=i, task=task, members=samples, sampling=sampling,
                                seed=EVAL_SEED))
        out = []
        while not engine.idle:
            out += [_Sampled(t.task, t.text) for t in engine.step()]
        return out

    async def _score(self, pool: GraderPool, sampled: Sequence[_Sampled]) -> tuple[float, float]:
        """(mean reward, fraction exactly right). A reward that fails counts as zero: the policy must not gain by breaking it."""
        total = exact = 0.0
        for item in sampled:
            verdict = await pool.grade(item.task, item.text)
            total += verdict.reward or 0.0
            exact += verdict.components.get("exact", 0.0) if verdict.reward is not None else 0.0
        return total / len(sampled), exact / len(sampled)
