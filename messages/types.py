"""The vocabulary on the wire: what the services say to each other, and nothing about how.

A `Group` of n rollouts of one `Task` is the unit of dispatch, of advantage and of outcome. A `Trajectory` is one
member of a group: token ids with, per token, whether the model sampled it, its behaviour log-probability and the policy
version that made its logits. `Graded` is a trajectory with its reward. The ledger is the sequence of `Admitted` and
`OutcomeEvent`: every admitted group gets exactly one `Outcome`.

Validation happens at construction, so a message that exists is well formed: lengths agree, versions are -1 exactly where
the model did not act, log-probabilities of action tokens are finite. Arrays are numpy, one-dimensional unless noted.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

__all__ = [
    "Admitted",
    "Divergence",
    "DivergenceLevel",
    "DivergenceSignal",
    "EvalResult",
    "Finish",
    "Graded",
    "Group",
    "LearnerOwner",
    "Message",
    "Metrics",
    "Outcome",
    "OutcomeEvent",
    "RelayPeer",
    "Retried",
    "RunFinished",
    "Sampling",
    "Taken",
    "Task",
    "Trajectory",
    "array_field",
]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", arbitrary_types_allowed=True, ser_json_inf_nan="constants")


class Message(_Frozen):
    """Base of everything that crosses the broker. `schema_name` and `schema_version` travel in the envelope; unknown
    versions are dead-lettered, unknown fields ignored."""

    schema_name: ClassVar[str] = ""
    schema_version: ClassVar[int] = 1

    run: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")


def array_field(dtype: str, ndim: int = 1) -> BeforeValidator:
    """A pydantic validator for a numpy array of exactly `dtype` and `ndim` (lists are converted; arrays never are)."""
    want = np.dtype(dtype)

    def check(value: Any) -> np.ndarray:
        if isinstance(value, (list, tuple)):
            try:
                value = np.asarray(value, dtype=want)
            except (TypeError, OverflowError) as error:  # pydantic collects only ValueError
                raise ValueError(f"not a list of {want}: {error}") from error
        if not isinstance(value, np.ndarray):
            raise ValueError(f"expected an array of {want}, got {type(value).__name__}")
        if value.dtype != want or value.ndim != ndim:
            raise ValueError(f"expected a {ndim}-d array of {want}, got {value.ndim}-d {value.dtype}")
        return value

    return BeforeValidator(check)


Int32 = Annotated[np.ndarray, array_field("<i4")]
Float32 = Annotated[np.ndarray, array_field("<f4")]
Bool = Annotated[np.ndarray, array_field("bool")]
Routes = Annotated[np.ndarray, array_field("<i2", 3)]


class Task(_Frozen):
    """One problem: a prompt and what its scorer needs. `id` is stable, so the same task has the same id everywhere."""

    id: str = Field(min_length=1, max_length=256)
    source: str
    family: str
    prompt: str
    answer: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class Sampling(_Frozen):
    """How a completion is sampled: full support (no top-p, top-k or penalties), so the learner's ratio means something."""

    temperature: float = Field(default=1.0, gt=0.0, le=10.0)
    max_tokens: int = Field(default=64, ge=1)


class Group(Message):
    """n rollouts of one task. `group` is the id (subject-safe); `index` is the dispatcher's cursor position.

    A group whose deadline passed may be queued again: `attempt` counts from 0, and `wanted` names the members still missing
    (empty: all). The members' randomness does not depend on the attempt.
    """

    schema_name: ClassVar[str] = "group"

    group: str = Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=64)
    index: int = Field(ge=0)
    task: Task
    members: int = Field(ge=1, le=1024)
    sampling: Sampling = Sampling()
    seed: int = 0
    deadline_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    attempt: int = Field(default=0, ge=0)
    wanted: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _wanted_members_exist(self) -> Self:
        if any(not 0 <= member < self.members for member in self.wanted) or len(set(self.wanted)) != len(self.wanted):
            raise ValueError(f"wanted = {list(self.wanted)}: different members of a group of {self.members}")
        return self

    @property
    def to_sample(self) -> tuple[int, ...]:
        """The members this message asks for: those of a retry, or all."""
        return self.wanted or tuple(range(self.members))


class Admitted(Message):
    """Ledger event: the dispatcher put a group into the loop. Carries the group, so the ledger alone can rebuild it."""

    schema_name: ClassVar[str] = "admitted"

    group: Group
    at: float


class Retried(Message):
    """Ledger event: the learner queued the missing members of a group again, after its deadline. `group.attempt` is the new
    attempt and `group.wanted` its members; the deadline counts from `at`."""

    schema_name: ClassVar[str] = "retried"

    group: Group
    at: float


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Trajectory(Message):
    """One sampled member of a group. T tokens, of which the first `prompt_tokens` are the prompt.

    tokens int32 [T]; action_mask bool [T], true where the model sampled the token; logprobs float32 [T], the behaviour
    log-probability in nats at the sampling temperature (0 off the mask); versions int32 [T], the policy version whose
    logits produced the token (-1 off the mask); routes int16 [T, moe layers, top-k] or None.
    """

    schema_name: ClassVar[str] = "trajectory"

    group: str = Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=64)  # becomes part of a subject
    member: int = Field(ge=0)
    members: int = Field(ge=1)
    index: int = Field(ge=0)
    task: Task
    prompt_tokens: int = Field(ge=1)
    tokens: Int32
    action_mask: Bool
    logprobs: Float32
    versions: Int32
    routes: Routes | None = None
    text: str = ""
    finish: Finish
    temperature: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    engine: str = ""
    started_at: float = 0.0
    finished_at: float = 0.0

    @model_validator(mode="after")
    def _well_formed(self) -> Self:
        length = len(self.tokens)
        for name in ("action_mask", "logprobs", "versions"):
            got = len(getattr(self, name))
            if got != length:
                raise ValueError(f"{name} has {got} entries, tokens has {length}: they must be equal")
        if self.routes is not None and len(self.routes) != length:
            raise ValueError(f"routes has {len(self.routes)} rows, tokens has {length}: they must be equal")
        if not self.prompt_tokens < length:
            raise ValueError(f"prompt_tokens = {self.prompt_tokens} leaves no completion in {length} tokens")
        if self.member >= self.members:
            raise ValueError(f"member = {self.member} of a group of {self.members}")
        if not self.action_mask.any():
            raise ValueError("action_mask is empty: a trajectory without a sampled token cannot be trained on")
        if self.action_mask[: self.prompt_tokens].any():
            raise ValueError("action_mask marks a prompt token as sampled")
        if not np.array_equal(self.versions >= 0, self.action_mask):
            raise ValueError("versions must be >= 0 exactly where action_mask is true")
        if not np.isfinite(self.logprobs[self.action_mask]).all():
            raise ValueError("logprobs has a non-finite value at an action token")
        if (self.tokens < 0).any():
            raise ValueError("tokens has a negative id")
        return self

    @property
    def id(self) -> str:
        return f"{self.run}/{self.group}/{self.member}"

    @property
    def oldest_version(self) -> int:
        """The version of the oldest sampled token; the staleness bound is judged on it."""
        return int(self.versions[self.action_mask].min())


class Graded(Message):
    """A trajectory with its reward. `reward is None` means the grading failed and `cause` says why."""

    schema_name: ClassVar[str] = "graded"

    trajectory: Trajectory
    reward: float | None
    components: dict[str, float] = Field(default_factory=dict)
    cause: str = ""
    grade_s: float = 0.0

    @model_validator(mode="after")
    def _reward_is_real(self) -> Self:
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"reward = {self.reward}: use None and a cause for a reward that is not finite")
        if self.reward is None and not self.cause:
            raise ValueError("a failed grading needs a cause")
        return self


class Taken(Message):
    """Ledger event, on the subject of the group's outcome: the learner is about to train on the group, to make `version`. It
    is in the ledger before the step, so that no other learner can end the group meanwhile. Not an outcome: those come after it."""

    schema_name: ClassVar[str] = "taken"

    group: str
    version: int = Field(ge=1)
    epoch: int = Field(ge=0)
    at: float = 0.0


class Outcome(StrEnum):
    """How a group ended. Exactly one per admitted group."""

    TRAINED = "trained"
    ZERO_VARIANCE = "zero_variance"
    STALE = "stale"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class OutcomeEvent(Message):
    """Ledger event: a group ended, and with it each of its members. `version` is the version that consumed it (trained) or
    was about to be produced. `arrived` are the members that had come, `trained` those a version was trained on; the others
    ended with the group, for its reason."""

    schema_name: ClassVar[str] = "outcome"

    group: str = Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=64)
    outcome: Outcome
    reason: str = ""
    version: int = -1
    lag: int = -1
    members: int = 0
    reward_mean: float | None = None
    at: float = 0.0
    arrived: tuple[int, ...] = ()
    trained: tuple[int, ...] = ()


class DivergenceSignal(StrEnum):
    """What the divergence watch looks at. The first three are token-averaged k3 in nats, the others fractions."""

    NUMERICS = "numerics"
    STALENESS = "staleness"
    TOTAL = "total"
    EXTREME = "extreme"
    FLIPS = "flips"


class DivergenceLevel(StrEnum):
    ALARM = "alarm"
    CLEARED = "cleared"
    HALT = "halt"


class Divergence(Message):
    """Ledger event, on a subject of its own: learner and rollout were further apart than `limit` for `steps` judged steps in a row, the last of them the one that
    was to make `version`; or they no longer are (cleared). `value` is that step's, over `tokens`. At HALT its batch was not trained on and the run ended."""

    schema_name: ClassVar[str] = "divergence"

    version: int = Field(ge=1)
    signal: DivergenceSignal
    level: DivergenceLevel
    value: float
    limit: float
    tokens: int = Field(ge=0)
    steps: int = Field(ge=1)
    at: float = 0.0


class RunFinished(Message):
    """Control event: the learner has produced its last version; everyone drains and exits 0. `failed`: the run was given up,
    for `reason`."""

    schema_name: ClassVar[str] = "finished"

    version: int
    reason: str
    at: float = 0.0
    failed: bool = False


class LearnerOwner(Message):
    """Control event: which process is the run's learner. `epoch` grows with every owner; the same owner renews by repeating
    it with a larger `beat`. A later epoch fences every earlier one off."""

    schema_name: ClassVar[str] = "learner_owner"

    epoch: int = Field(ge=1)
    beat: int = Field(ge=0)
    host: str
    pid: int
    boot: str = ""
    at: float = 0.0
    released: bool = False


class RelayPeer(Message):
    """Control event: an engine that passes packs of policy versions on, and where. It says so again, with a larger `beat`, for as long as it
    does. `token` is what it asks of who asks it: a secret of this process's life, for those who may read the run's control stream.
    `certificate` is the SHA-256 of the one it shows (empty: it does not speak TLS)."""

    schema_name: ClassVar[str] = "relay_peer"

    peer: str = Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=64)
    host: str = Field(pattern=r"^[A-Za-z0-9._:-]+$", max_length=255)
    port: int = Field(ge=1, le=65535)
    token: str = Field(pattern=r"^[0-9a-f]{32,128}$", repr=False)
    certificate: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    beat: int = Field(ge=0)
    at: float
    leaving: bool = False


class Metrics(Message):
    """One service's numbers at one moment; telemetry, so the oldest are dropped when the stream is full."""

    schema_name: ClassVar[str] = "metrics"

    service: str
    instance: str = ""
    at: float = 0.0
    step: int = -1
    values: dict[str, float] = Field(default_factory=dict)
    series: dict[str, list[float]] = Field(default_factory=dict)


class EvalResult(Message):
    """A pinned version measured on the fixed held-out tasks: mean reward when sampling at the training temperature,
    and when decoding greedily."""

    schema_name: ClassVar[str] = "eval"

    version: int = Field(ge=0)
    kind: Literal["heldout"] = "heldout"
    tasks: int
    samples: int
    reward_sampled: float
    reward_greedy: float
    exact_sampled: float = 0.0
    exact_greedy: float = 0.0
    wall_s: float = 0.0
    at: float = 0.0
