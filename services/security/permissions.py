"""What each role may do on a run's broker: the least that its service needs, and nothing by default.

Only the learner may write policies, outcomes, retries, control messages and records; only the dispatcher may admit; only the policy
store may pin and delete versions (where their bytes live is said by either, once); a rollout engine's one control message is that it passes packs on. A role reads
the streams it works from and no others, receives only on its own inbox, and administers nothing: streams are the admin's.

A list of subjects alone would not hold. A request carries the subject its answer goes to, nobody's permission is asked for that,
and an answer is a message like any other: "read me this trajectory, and answer on policy.head" would store a head that a
rollout worker wrote. So every role but the admin has an account of its own, into which exactly the subjects below are imported as
services; an answer can then only go to a subject of that account, where no stream listens. Runs are apart in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from driftline.messages.subjects import ConsumerSpec, Subjects, topology

__all__ = ["ANSWERED_IN_PARTS", "PLANES", "Grant", "Role", "grant", "inbox_prefix", "role_of"]

PLANES = ("GROUPS", "TRAJECTORIES", "GRADED", "LEDGER", "POLICY", "BLOB", "CLAIM", "RECORD", "CONTROL", "METRICS", "EVAL", "DEAD")
ANSWERED_IN_PARTS = "$JS.API.CONSUMER.MSG.NEXT."
"""A request that begins like this has as many answers as messages were asked for."""


class Role(StrEnum):
    DISPATCHER = "dispatcher"
    ROLLOUT = "rollout"
    GRADER = "grader"
    LEARNER = "learner"
    EVALUATOR = "evaluator"
    POLICY_STORE = "policy-store"
    RECORDER = "recorder"
    """Reads everything a recording holds."""
    OBSERVER = "observer"
    """Reads everything, for `watch`, `status`, `policy` and `audit`; writes nothing."""
    ADMIN = "admin"
    """Declares the streams, deletes, sends dead letters back: `driftline provision`, `driftline run`, `driftline dead-letters`."""


@dataclass(frozen=True)
class Grant:
    """Subjects a role's user may publish to (requests to JetStream among them) and subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def role_of(name: str) -> Role:
    """The role of a connection's name: a service, perhaps with its instance, or the supervisor and the command line."""
    found = [role for role in Role if name == role or name.startswith(f"{role}-")]
    return max(found, key=len) if found else Role.ADMIN


def inbox_prefix(account: str, role: Role) -> str:
    return f"_INBOX_{account}_{role}"


def grant(role: Role, run: str, account: str) -> Grant:
    """What `role` may do on `run`."""
    rules = _Rules(run)
    publish = sorted(set(rules.of(role)))
    return Grant(tuple(publish), (f"{inbox_prefix(account, role)}.>",))


class _Rules:
    """How the bus does things, in subjects."""

    def __init__(self, run: str) -> None:
        self._names = Subjects(run)
        self._root = self._names.root
        self._consumers = {spec.durable: spec for spec in topology(run).consumers}

    def of(self, role: Role) -> Iterable[str]:
        root = self._root
        match role:
            case Role.ADMIN:
                return (f"{root}.>", "$JS.API.>", "$JS.ACK.>")
            case Role.OBSERVER:
                return (*self._connected(), *self._reads(*PLANES), *self._follows(*PLANES), *self._depths(), *self._lists("POLICY", "BLOB"))
            case Role.RECORDER:
                planes = ("LEDGER", "POLICY", "BLOB", "CLAIM", "RECORD", "CONTROL", "EVAL")
                return (*self._connected(), *self._reads(*planes), *self._follows("LEDGER", "POLICY", "CONTROL"), *self._lists("BLOB"))
            case Role.DISPATCHER:
                return (
                    *self._service(role), *self._sends(f"{root}.ledger.admitted.>", self._names.groups),
                    *self._reads("LEDGER"), *self._works_on("LEDGER", "CONTROL"),
                )  # fmt: skip
            case Role.ROLLOUT:
                return (
                    *self._service(role), *self._pulls("rollout"), *self._sends(f"{root}.trajectories.>", self._names.relay("*")),
                    *self._reads("POLICY", "BLOB", "LEDGER"), *self._lists("BLOB"), *self._works_on("POLICY", "LEDGER", "CONTROL"),
                )  # fmt: skip
            case Role.GRADER:
                return (*self._service(role), *self._pulls("grader"), *self._sends(f"{root}.graded.>"), *self._works_on("LEDGER", "CONTROL"))
            case Role.LEARNER:
                owned = ("policy", "blob", "ledger.outcome", "ledger.retried", "ledger.divergence", "control", "record")
                return (
                    *self._service(role), *self._pulls("learner"), *self._sends(*(f"{root}.{plane}.>" for plane in owned), self._names.groups),
                    *self._reads("LEDGER", "POLICY", "BLOB", "RECORD", "CONTROL", "DEAD"), *self._lists("BLOB"),
                    *self._works_on("LEDGER", "POLICY", "CONTROL", "DEAD"),
                )  # fmt: skip
            case Role.EVALUATOR:
                return (
                    *self._service(role), *self._sends(f"{root}.eval.>", f"{root}.policy.pins"),
                    *self._reads("POLICY", "BLOB", "EVAL"), *self._lists("BLOB"), *self._works_on("POLICY", "CONTROL"),
                )  # fmt: skip
            case Role.POLICY_STORE:
                return (
                    *self._service(role), *self._reads("POLICY", "BLOB", "METRICS"), *self._lists("POLICY", "BLOB"),
                    *self._works_on("POLICY", "CONTROL", "METRICS"),
                    *self._sends(*(f"{root}.{names}" for names in ("policy.pins", "policy.store", "policy.shortcut.>", "blob.>"))),
                    *(f"$JS.API.STREAM.PURGE.{self._names.stream(plane)}" for plane in ("POLICY", "BLOB", "CLAIM")),
                )  # fmt: skip

    def _connected(self) -> Iterable[str]:
        """Is the broker there, and does it have the run's streams?"""
        return ("$JS.API.INFO", "$JS.API.STREAM.NAMES")

    def _service(self, role: Role) -> Iterable[str]:
        return (*self._connected(), self._names.metrics(role))

    def _reads(self, *planes: str) -> Iterable[str]:
        """A message whose frame is too large for a stream lies in the claim stream."""
        return (f"$JS.API.DIRECT.GET.{self._names.stream(plane)}" for plane in (*planes, "CLAIM"))

    def _lists(self, *planes: str) -> Iterable[str]:
        """Which subjects have messages: whether a blob is whole, and what no manifest names."""
        return (f"$JS.API.STREAM.INFO.{self._names.stream(plane)}" for plane in planes)

    def _follows(self, *planes: str) -> Iterable[str]:
        """An ephemeral consumer of one's own, which has no name before it is made. No stream that is followed by a service has
        durable consumers, so `*` names nobody's work there; for an observer of the queues, durable names are left out."""
        for plane in planes:
            stream = self._names.stream(plane)
            if any(spec.stream == stream for spec in self._consumers.values()):
                continue
            yield f"$JS.API.CONSUMER.CREATE.{stream}"
            yield f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*"
            yield f"$JS.API.CONSUMER.DELETE.{stream}.*"

    def _works_on(self, *planes: str) -> Iterable[str]:
        """Follows, and keeps what cannot be understood as a dead letter."""
        return (*self._follows(*planes), *(self._names.dead(plane.lower()) for plane in planes))

    def _pulls(self, durable: str) -> Iterable[str]:
        """Takes work, acknowledges it, makes the consumer anew when a server has lost it, and drops a settled message's claim."""
        spec: ConsumerSpec = self._consumers[durable]
        plane = spec.stream.rpartition("-")[2]
        return (
            f"$JS.API.CONSUMER.MSG.NEXT.{spec.stream}.{durable}",
            f"$JS.API.CONSUMER.CREATE.{spec.stream}.{durable}.{spec.subject}",
            f"$JS.API.CONSUMER.INFO.{spec.stream}.{durable}",
            f"$JS.ACK.{spec.stream}.{durable}.>",
            f"$JS.API.STREAM.INFO.{spec.stream}",
            f"$JS.API.STREAM.PURGE.{self._names.stream('CLAIM')}",
            self._names.dead(plane.lower()),
            *self._reads(),
        )

    def _depths(self) -> Iterable[str]:
        return (f"$JS.API.CONSUMER.INFO.{spec.stream}.{durable}" for durable, spec in self._consumers.items())

    def _sends(self, *subjects: str) -> Iterable[str]:
        """A message too large for a stream is put into the claim stream first; what is there already is looked up."""
        return (*subjects, f"{self._root}.claim.>", *self._reads())
