"""One file describes a run: a section per service, checked as a whole before anything starts.

Guarantees: a key that is not listed here is refused with the nearest known name; a value outside its range is refused with
the range and the default; combinations that would deadlock or mislead (a group that can never be complete, a queue smaller
than what the bound admits, a temperature without a distribution) are refused with the sentence that explains them. A
`Config` that exists is runnable. No torch is imported here, so every service and `--help` can read it.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from driftline.messages.credentials import redacted
from driftline.messages.errors import ConfigError
from driftline.messages.subjects import MIB, topology
from driftline.messages.types import Sampling
from driftline.services.config_text import problems, to_toml
from driftline.services.learner_config import (
    GROUP_RELATIVE,
    LearnerConfig,
    LoraScaling,
    Objective,
    Proximal,
    Recompute,
    WatchConfig,
)
from driftline.services.policy_config import (
    Compute,
    Device,
    ExpertsForm,
    PolicyConfig,
    PolicyStoreConfig,
    RelayConfig,
    Section,
    anchored_store,
    clash,
)
from driftline.services.rollout_config import (
    EngineKind,
    PolicyUpdate,
    RolloutConfig,
    Speculation,
    SpeculationRule,
)

__all__ = [
    "Compute",
    "Config",
    "DeadlinePolicy",
    "EngineKind",
    "ExpertsForm",
    "LearnerConfig",
    "LoraScaling",
    "Numerics",
    "Objective",
    "PolicyUpdate",
    "Proximal",
    "Recompute",
    "RolloutConfig",
    "Sandbox",
    "Speculation",
    "SpeculationRule",
    "StalePolicy",
    "WatchConfig",
    "in_flight_members",
    "load",
    "resolve",
    "to_toml",
]

RUN_NAME = r"^[A-Za-z0-9_-]+$"
PYTHON_SOURCE = "python:"


class Numerics(StrEnum):
    """In what order sums are taken: the fastest for each shape, or one order everywhere, so that a token's log-probability is the same bits in the rollout
    and in the learner."""

    FAST = "fast"
    DETERMINISTIC = "deterministic"


class DeadlinePolicy(StrEnum):
    """What happens to a group that is not complete at its deadline."""

    FAIL_GROUP = "fail_group"
    TRAIN_PARTIAL = "train_partial"
    RETRY = "retry"


class StalePolicy(StrEnum):
    """What happens to a group that the next step would make too old: the step waits for it, or it is dropped."""

    WAIT = "wait"
    DROP = "drop"


class Sandbox(StrEnum):
    """Where rewards run. `auto` takes the strongest that works here."""

    AUTO = "auto"
    BUBBLEWRAP = "bubblewrap"
    NAMESPACE = "namespace"
    RLIMIT = "rlimit"
    OFF = "off"


class RunConfig(Section):
    """What the experiment is. `name` is the run's id in every subject, so it is also what a restart resumes.

    A group that is not complete after `group_deadline_s` is expired, trained with its at least `partial_min_members` members, or
    queued again up to `group_retries` times, as `deadline_policy` says. `max_failed_groups` in a row end the run as failed (0: never).
    So do, not as failed, `max_flat_groups` in a row whose members all have one reward: a policy that no longer varies takes no further step.
    `record`: `driftline run` leaves the run as one file, run.dlr, in the run folder.
    """

    name: str = Field(default="run", min_length=1, max_length=64, pattern=RUN_NAME)
    seed: int = Field(default=0, ge=0, lt=2**31)
    steps: int = Field(default=40, ge=1)
    max_lag: int = Field(default=2, ge=0, le=1024)
    groups_per_step: int = Field(default=16, ge=1, le=65536)
    group_size: int = Field(default=8, ge=1, le=1024)
    dir: str = "runs"
    group_deadline_s: float = Field(default=300.0, gt=0)
    deadline_policy: DeadlinePolicy = DeadlinePolicy.FAIL_GROUP
    partial_min_members: int = Field(default=2, ge=1)
    group_retries: int = Field(default=1, ge=0, le=16)
    stale_policy: StalePolicy = StalePolicy.WAIT
    max_failed_groups: int = Field(default=256, ge=0)
    max_flat_groups: int = Field(default=4096, ge=0)
    record: bool = True
    time_limit_s: float = Field(default=0.0, ge=0)
    numerics: Numerics = Numerics.FAST


class BrokerConfig(Section):
    """Where NATS is. An empty `url` means: start a server inside this run. `credentials` is a file that `driftline keys` made, or
    its folder, in which each service finds its role's. Who may not administer the broker needs `provision` = false: streams are
    then only checked, never declared."""

    url: str = ""
    store_dir: str = ""
    queue_bytes: int = Field(default=256 * MIB, ge=MIB)
    blob_bytes: int = Field(default=4096 * MIB, ge=16 * MIB)
    record_bytes: int = Field(default=1024 * MIB, ge=MIB)
    ledger_bytes: int = Field(default=4096 * MIB, ge=MIB)
    credentials: str = ""
    provision: bool = True
    connect_timeout_s: float = Field(default=10.0, gt=0)
    lost_after_s: float = Field(default=60.0, gt=0)

    @model_validator(mode="after")
    def _secrets_stay_out(self) -> Self:
        if (shown := redacted(self.url)) != self.url:
            raise clash(
                "broker.url", shown, "a run file is copied, printed and logged: it may not hold a password",
                "remove it, and name a file of `driftline keys make` in broker.credentials")
        if self.credentials and not self.url:
            raise clash(
                "broker.credentials", self.credentials, "the server inside a run has no users: it listens on this machine alone",
                "name the broker they are for in broker.url, or remove them")
        return self


class MixturePartConfig(Section):
    """One family of a mixture; an empty `source` is the mixture's own."""

    family: str
    params: dict[str, Any] = Field(default_factory=dict)
    weight: float = Field(default=1.0, gt=0)
    source: str = ""


class TasksConfig(Section):
    """`[[tasks.mixture]]` parts, where given, replace `family` and `params` for training; evaluation keeps `family`. `few_shot`: so many solved examples
    stand ahead of every question."""

    source: str = "reasoning_gym"
    family: str = "spell_backward"
    params: dict[str, Any] = Field(default_factory=dict)
    eval_params: dict[str, Any] | None = None
    mixture: tuple[MixturePartConfig, ...] = ()
    heldout: int = Field(default=128, ge=1)
    heldout_seed: int = Field(default=1_000_003, ge=0)
    few_shot: int = Field(default=0, ge=0, le=16)


class SamplingConfig(Section):
    temperature: float = Field(default=1.0, gt=0.0, le=10.0)
    max_tokens: int = Field(default=16, ge=1)

    def message(self) -> Sampling:
        return Sampling(temperature=self.temperature, max_tokens=self.max_tokens)


class DispatcherConfig(Section):
    full_wait_s: float = Field(default=120.0, gt=0)


class GraderConfig(Section):
    """`sandbox` says where rewards run; see docs/operations.md for what each keeps out."""

    workers: int = Field(default=1, ge=1)
    deadline_s: float = Field(default=5.0, gt=0)
    memory_mb: int = Field(default=1024, ge=64)
    max_in_flight: int = Field(default=256, ge=1)
    sandbox: Sandbox = Sandbox.AUTO


class EvaluatorConfig(Section):
    """Every `every` versions (0: only the first and the last) the held-out tasks are measured."""

    every: int = Field(default=5, ge=0)
    samples: int = Field(default=2, ge=1)
    threads: int = Field(default=1, ge=1)
    device: Device = "cpu"


class TelemetryConfig(Section):
    """`http_port` is the first of a block: each service adds its own offset (0 turns health and metrics pages off)."""

    http_host: str = "127.0.0.1"
    http_port: int = Field(default=0, ge=0, le=65000)
    log_level: Annotated[str, Field(pattern="^(debug|info|warning|error)$")] = "info"
    drain_s: float = Field(default=10.0, gt=0)


def in_flight_members(run: RunConfig) -> int:
    """How many members the admission bound lets be anywhere in the loop at once."""
    return (run.max_lag + 1) * run.groups_per_step * run.group_size


def member_bytes(sampling: SamplingConfig) -> int:
    """A pessimistic size of one trajectory on the wire: token, mask, log-probability and version per token, plus the task."""
    prompt_tokens = 1024
    return 4096 + 13 * (prompt_tokens + sampling.max_tokens)


class Config(BaseModel):
    """A whole run. Sections follow the services; `[run]` and `[sampling]` belong to all."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: RunConfig = Field(default_factory=RunConfig)
    broker: BrokerConfig = Field(default_factory=BrokerConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    tasks: TasksConfig = Field(default_factory=TasksConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    dispatcher: DispatcherConfig = Field(default_factory=DispatcherConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    grader: GraderConfig = Field(default_factory=GraderConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    watch: WatchConfig = Field(default_factory=WatchConfig)
    evaluator: EvaluatorConfig = Field(default_factory=EvaluatorConfig)
    policy_store: PolicyStoreConfig = Field(default_factory=PolicyStoreConfig)
    relay: RelayConfig = Field(default_factory=RelayConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)

    @model_validator(mode="after")
    def _groups_can_end(self) -> Self:
        run, learner = self.run, self.learner
        if learner.min_group_members > run.group_size:
            raise clash(
                "learner.min_group_members", learner.min_group_members,
                f"no group of run.group_size = {run.group_size} can ever reach it, so nothing would be trained",
                f"set it to at most {run.group_size}, or raise run.group_size",
            )
        if learner.objective in GROUP_RELATIVE and run.group_size < 2:
            raise clash(
                "run.group_size", run.group_size,
                f"learner.objective = '{learner.objective}' compares members of a group, so the advantage of a lone "
                "member is always zero and no version would ever be produced",
                "use at least 2",
            )
        if self.watch.count_flips and not learner.router_replay:
            raise clash("watch.count_flips", True, "no routes are recorded to compare with", "set learner.router_replay = true")
        if run.deadline_policy is DeadlinePolicy.TRAIN_PARTIAL and run.partial_min_members > run.group_size:
            raise clash(
                "run.partial_min_members", run.partial_min_members, f"a group has run.group_size = {run.group_size} members",
                f"set it to at most {run.group_size}",
            )
        if learner.checkpoint_every > learner.max_recompute:
            raise clash(
                "learner.checkpoint_every", learner.checkpoint_every,
                f"steps would wait for a checkpoint that is not due before learner.max_recompute = {learner.max_recompute}",
                "make it at most learner.max_recompute",
            )
        if self.grader.deadline_s >= run.group_deadline_s:
            raise clash(
                "grader.deadline_s", self.grader.deadline_s,
                f"a reward that hangs would expire its whole group (run.group_deadline_s = {run.group_deadline_s:g}) "
                "before it is counted as failed",
                "make it smaller than run.group_deadline_s",
            )
        return self

    @model_validator(mode="after")
    def _queues_hold_what_is_admitted(self) -> Self:
        run, broker = self.run, self.broker
        members = in_flight_members(run)
        need = members * member_bytes(self.sampling)
        what = f"the bound admits (max_lag + 1) * groups_per_step * group_size = {members} members"
        if broker.queue_bytes < need:
            raise clash(
                "broker.queue_bytes", broker.queue_bytes,
                f"{what}, about {need} bytes: the queue would fill and every producer would wait for a learner that "
                "waits for them",
                f"set it to at least {need}, or lower run.max_lag, run.groups_per_step or run.group_size",
            )
        learner = next(consumer for consumer in topology(run.name).consumers if consumer.durable == "learner")
        if members > learner.max_ack_pending:
            raise clash(
                "run.groups_per_step", run.groups_per_step,
                f"{what}, but the learner may hold {learner.max_ack_pending} at once: a batch could never complete",
                "lower run.max_lag, run.groups_per_step or run.group_size",
            )
        if self.learner.held_bytes < need:
            raise clash(
                "learner.held_bytes", self.learner.held_bytes, f"{what}, about {need} bytes: a batch could never complete",
                f"set it to at least {need}, or lower run.max_lag, run.groups_per_step or run.group_size",
            )
        per_step = run.groups_per_step * run.group_size * member_bytes(self.sampling)
        if broker.record_bytes < (self.learner.max_recompute + 1) * per_step:
            raise clash(
                "broker.record_bytes", broker.record_bytes,
                f"a learner recovers from the last learner.max_recompute = {self.learner.max_recompute} batches, each about {per_step} bytes",
                f"set it to at least {(self.learner.max_recompute + 1) * per_step}",
            )
        return self

    @model_validator(mode="after")
    def _places_exist(self) -> Self:
        if self.broker.url and self.broker.store_dir:
            raise clash(
                "broker.store_dir", self.broker.store_dir,
                "it is where an embedded server keeps its streams, but broker.url names a running one",
                "remove one of the two",
            )
        if self.broker.url and not re.match(r"^(nats|tls|ws|wss)://", self.broker.url):
            raise clash("broker.url", self.broker.url, "not a NATS address", "write nats://host:4222")
        for source in (self.tasks.source, *(part.source or self.tasks.source for part in self.tasks.mixture)):
            if source not in ("reasoning_gym", "generators") and not re.match(r"^python:[^:]+(:\w+)?$", source):
                raise clash(
                    "tasks.source", source, "unknown kind of task source",
                    "write 'reasoning_gym', 'generators', or 'python:FILE.py:NAME' for your own tasks",
                )
        return self

    @property
    def max_in_flight_groups(self) -> int:
        return (self.run.max_lag + 1) * self.run.groups_per_step


def resolve(document: dict[str, Any], *, origin: str = "configuration") -> Config:
    """A checked Config from parsed TOML. Raises ConfigError with one line per fault, each naming its TOML path."""
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        raise ConfigError(problems(error, Config, origin)) from None


def load(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Config:
    """Read the run file at `path`, apply `section.key=value` overrides, and check the whole.

    A file without `run.name` takes its own name. Relative paths inside the file are relative to the file.
    """
    path = Path(path)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("no such file", field="config", value=str(path), remedy="name an existing TOML file; "
                          "examples/ holds some that work as they are") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", field="config", value=str(path)) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not valid TOML: {error}", field="config", value=str(path),
                          remedy="strings need quotes, sections look like [run]") from None
    for override in overrides:
        _apply(document, override)
    run = document.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", re.sub(r"[^A-Za-z0-9_-]+", "-", path.stem)[:64] or "run")
    _anchor(document, path.resolve().parent)
    return resolve(document, origin=str(path))


def _apply(document: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = [key.strip() for key in dotted.split(".")]
    if not equals or len(keys) < 2 or not all(keys):
        raise ConfigError("not an override", field="--set", value=override, remedy="write section.key=value, "
                          "for example learner.lr=1e-4")
    target = document
    for key in keys[:-1]:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise ConfigError(f"{key} is not a section", field="--set", value=override,
                              remedy="write section.key=value")
    target[keys[-1]] = _parse(text.strip())


def _parse(text: str) -> Any:
    """A TOML value, or the bare text: shells eat quotes, so `tasks.family=chain_sum` must mean the string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _anchor(document: dict[str, Any], base: Path) -> None:
    """Make the file's relative paths absolute, so that a resolved copy means the same from anywhere."""
    policy, tasks, broker = document.get("policy"), document.get("tasks"), document.get("broker")
    if isinstance(broker, dict) and isinstance(broker.get("credentials"), str) and broker["credentials"]:
        broker["credentials"] = str(base / broker["credentials"])
    if isinstance(policy, dict):
        init, store = policy.get("init"), policy.get("store")
        if isinstance(init, str) and init and init != "base" and not init.startswith("package:"):
            policy["init"] = str(base / init)
        if isinstance(store, str):
            policy["store"] = anchored_store(store, base)
    if isinstance(tasks, dict):
        parts = tasks.get("mixture")
        for part in (tasks, *(parts if isinstance(parts, list) else ())):
            if isinstance(part, dict) and str(part.get("source", "")).startswith(PYTHON_SOURCE):
                part["source"] = _anchored(part["source"], base)


def _anchored(source: str, base: Path) -> str:
    file, colon, name = source.removeprefix(PYTHON_SOURCE).partition(":")
    return f"{PYTHON_SOURCE}{base / file}{colon}{name}"
