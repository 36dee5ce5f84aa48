"""How each service is made from a configuration: the one place that knows every constructor.

Imports are inside the builders, so that a service pays for what it uses: a dispatcher never loads torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from driftline.messages.bus import Bus
from driftline.services.config import Config
from driftline.services.runtime import Build, Context, Service

if TYPE_CHECKING:
    from driftline.environments.source import TaskSource
    from driftline.policy_store.blobs import BlobStore

__all__ = ["SERVICES", "blob_store", "scorer_specs", "task_source"]


def blob_store(bus: Bus, config: Config) -> BlobStore:
    """Where policy bytes live."""
    from driftline.policy_store.location import open_store

    policy = config.policy
    return open_store(policy.store, bus, config.run.name, endpoint=policy.s3_endpoint, region=policy.s3_region)


async def _located(context: Context) -> BlobStore:
    """The store, for a service that writes there: whoever reads the run is told of it first. ConfigError when the run has another."""
    from driftline.policy_store.location import locate

    policy = context.config.policy
    await locate(context.bus, context.config.run.name, policy.store, endpoint=policy.s3_endpoint, region=policy.s3_region)
    return blob_store(context.bus, context.config)


def task_source(config: Config) -> TaskSource:
    """The training tasks, and the held-out ones they share no question with, behind the run's solved examples."""
    from driftline.environments.source import MixturePart, load_source

    tasks = config.tasks
    mixture = [MixturePart(part.family, part.params, part.weight, part.source) for part in tasks.mixture]
    return load_source(tasks.source, tasks.family, tasks.params, mixture=mixture, heldout_seed=tasks.heldout_seed, few_shot=tasks.few_shot)


def scorer_specs(config: Config) -> tuple[str, ...]:
    """Every source a trajectory of this run may come from."""
    sources = {config.tasks.source, *(part.source or config.tasks.source for part in config.tasks.mixture)}
    return tuple(sorted(sources))


def _dispatcher(context: Context) -> Service:
    from driftline.services.dispatcher.service import DispatcherService

    return DispatcherService(context.bus, context.config, task_source(context.config), context.reporter)


def _grader(context: Context) -> Service:
    from driftline.services.grader.private import private_paths
    from driftline.services.grader.service import GraderService

    grader = context.config.grader
    return GraderService(
        context.bus, context.config.run.name, scorer_specs(context.config), workers=grader.workers,
        deadline_s=grader.deadline_s, memory_mb=grader.memory_mb, max_in_flight=grader.max_in_flight,
        reporter=context.reporter, sandbox=grader.sandbox.value, hidden=private_paths(context.config, context.run_dir),
    )


async def _policy_store(context: Context) -> Service:
    from driftline.policy_store.model_files import CONFIG
    from driftline.services.policy_store.service import PolicyStoreService
    from driftline.services.starting import starting_config

    config, store = context.config, context.config.policy_store
    return PolicyStoreService(
        context.bus, await _located(context), config.run.name, keep_versions=store.keep_versions, keep_s=store.keep_s,
        keep_bytes=store.keep_bytes, keep_start=store.keep_start, grace_s=store.grace_s, shortcuts=store.shortcuts,
        form=config.policy.delta_form,
        mirror_dir=context.run_dir / "policy" if store.mirror else None, mirror_keep=store.mirror_keep,
        mirror_beside={CONFIG: starting_config(config).encode()},
        reporter=context.reporter,
    )


def _rollout(context: Context) -> Service:
    from driftline.services.rollout.service import RolloutService

    blobs, instance = blob_store(context.bus, context.config), context.instance or "0"
    if context.config.relay.enabled:
        from driftline.services.rollout.relay import RelayedRollout

        return RelayedRollout(context.bus, blobs, context.config, instance, context.reporter)
    return RolloutService(context.bus, blobs, context.config, instance, context.reporter)


async def _learner(context: Context) -> Service:
    from driftline.services.learner.service import LearnerService

    blobs = await _located(context)
    return LearnerService(context.bus, blobs, context.config, context.run_dir, context.reporter)


def _evaluator(context: Context) -> Service:
    from driftline.services.evaluator.service import EvaluatorService

    return EvaluatorService(context.bus, blob_store(context.bus, context.config), context.config, context.reporter)


SERVICES: Mapping[str, Build] = {
    "dispatcher": _dispatcher,
    "grader": _grader,
    "learner": _learner,
    "policy-store": _policy_store,
    "evaluator": _evaluator,
    "rollout": _rollout,
}
