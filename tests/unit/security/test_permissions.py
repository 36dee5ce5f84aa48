"""Permissions as rules: what each role's grant says, whatever the run is called."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.messages.subjects import Subjects, topology
from driftline.services.security.permissions import PLANES, Role, grant, inbox_prefix, role_of

RUNS = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
LIMITED = tuple(role for role in Role if role is not Role.ADMIN)
LEARNERS_OWN = ("policy", "policy.manifest", "record", "control", "ledger.outcome", "ledger.retried", "ledger.divergence")


def matches(pattern: str, subject: str) -> bool:
    """NATS's own rule for wildcards."""
    left, right = pattern.split("."), subject.split(".")
    for index, token in enumerate(left):
        if token == ">":
            return len(right) > index
        if index >= len(right) or token not in ("*", right[index]):
            return False
    return len(left) == len(right)


def may(role: Role, run: str, subject: str) -> bool:
    return any(matches(pattern, subject) for pattern in grant(role, run, "account").publish)


@given(RUNS)
@settings(max_examples=30)
def test_only_the_learner_writes_what_the_policy_and_the_ledger_are_made_of(run: str) -> None:
    root = Subjects(run).root
    for plane in LEARNERS_OWN:
        assert {role for role in LIMITED if may(role, run, f"{root}.{plane}.x")} == {Role.LEARNER}
    assert {role for role in LIMITED if may(role, run, f"{root}.policy.head")} == {Role.LEARNER}
    # Shortcuts have packs of their own, and packs are named by what is in them: who writes them can spoil none.
    assert {role for role in LIMITED if may(role, run, f"{root}.blob.x")} == {Role.LEARNER, Role.POLICY_STORE}
    assert {role for role in LIMITED if may(role, run, f"{root}.ledger.admitted.x")} == {Role.DISPATCHER}
    assert {role for role in LIMITED if may(role, run, f"{root}.groups")} == {Role.DISPATCHER, Role.LEARNER}


@given(RUNS, RUNS)
@settings(max_examples=30)
def test_nothing_of_another_run_is_granted(run: str, other: str) -> None:
    if run == other:
        return
    subjects = [f"{Subjects(other).root}.{plane.lower()}.x" for plane in PLANES]
    subjects += [f"$JS.API.DIRECT.GET.{Subjects(other).stream(plane)}" for plane in PLANES]
    assert not [(role, subject) for role in Role for subject in subjects if subject.startswith("dl.") and may(role, run, subject)]
    assert not [(role, subject) for role in LIMITED for subject in subjects if may(role, run, subject)]


@pytest.mark.parametrize("role", LIMITED)
def test_no_role_but_the_admin_administers(role: Role) -> None:
    names = Subjects("r")
    for plane in PLANES:
        stream = names.stream(plane)
        for verb in ("CREATE", "UPDATE", "DELETE", "RESTORE", "SNAPSHOT", "MSG.DELETE", "MSG.GET"):
            assert not may(role, "r", f"$JS.API.STREAM.{verb}.{stream}")
    for consumer in topology("r").consumers:
        assert not may(role, "r", f"$JS.API.CONSUMER.DELETE.{consumer.stream}.{consumer.durable}")
        assert not may(role, "r", f"$JS.API.CONSUMER.CREATE.{consumer.stream}")
    assert not may(role, "r", "$SYS.REQ.SERVER.PING")
    assert not [pattern for pattern in grant(role, "r", "a").publish if pattern in (">", "$JS.>", "$JS.API.>", "dl.>", "_INBOX.>")]


def test_work_is_taken_only_by_the_service_it_is_for() -> None:
    for consumer, taker in zip(topology("r").consumers, (Role.ROLLOUT, Role.GRADER, Role.LEARNER), strict=True):
        for subject in (f"$JS.API.CONSUMER.MSG.NEXT.{consumer.stream}.{consumer.durable}", f"$JS.ACK.{consumer.stream}.{consumer.durable}.1.1"):
            assert {role for role in LIMITED if may(role, "r", subject)} == {taker}


def test_an_engine_says_that_it_relays_and_nothing_else_on_the_control_plane() -> None:
    names = Subjects("r")
    assert {role for role in LIMITED if may(role, "r", names.relay("h-0"))} == {Role.ROLLOUT, Role.LEARNER}
    for subject in (names.finished, names.learner, names.relay("a.b"), f"{names.root}.control.relay"):
        assert not may(Role.ROLLOUT, "r", subject)


def test_readers_write_nothing_of_the_run() -> None:
    for role in (Role.OBSERVER, Role.RECORDER):
        assert not [pattern for pattern in grant(role, "r", "a").publish if not pattern.startswith("$JS.API.")]
        assert not [pattern for pattern in grant(role, "r", "a").publish if "PURGE" in pattern]


def test_each_role_listens_on_an_inbox_of_its_own() -> None:
    inboxes = [grant(role, "r", account).subscribe for role in Role for account in ("a", "b")]
    assert len(set(inboxes)) == len(inboxes)
    assert all(len(subscribed) == 1 for subscribed in inboxes)
    for role in Role:
        for other in Role:
            heard = matches(grant(role, "r", "a").subscribe[0], f"{inbox_prefix('a', other)}.x.1")
            assert heard == (role is other)


def test_a_connection_s_name_says_its_role() -> None:
    assert role_of("rollout-0") is Role.ROLLOUT
    assert role_of("policy-store") is Role.POLICY_STORE
    assert role_of("policy-store-1") is Role.POLICY_STORE
    assert role_of("driftline-run") is Role.ADMIN
