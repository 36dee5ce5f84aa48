"""The hand: a delivery is settled when all it asks for is stored and never before; whatever happens, none is forgotten."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine_cases import group
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from driftline.messages.types import Group
from driftline.services.rollout.hand import Hand


@dataclass(eq=False)
class Given:
    """Stands for a delivery: the hand only keeps it."""

    message: Group
    settled: bool = False
    stored: set[int] = field(default_factory=set)


def given_group(attempt: int = 0, wanted: tuple[int, ...] = (), index: int = 0) -> Any:
    return Given(group(index, members=4).model_copy(update={"attempt": attempt, "wanted": wanted}))


def test_a_delivery_is_settled_when_its_last_member_is_stored() -> None:
    hand, whole = Hand(), given_group()
    assert hand.add(whole, whole.message) is None
    assert hand.ready() == ["g00000000"]
    assert hand.begin("g00000000") == (0, 1, 2, 3)
    assert hand.ready() == []
    for member in range(4):
        assert hand.settle("g00000000") == []
        hand.finish("g00000000", member)
        assert hand.settle("g00000000") == []
        hand.store("g00000000", member)
    assert hand.settle("g00000000") == [whole]
    assert len(hand) == 0


def test_a_retry_beside_its_first_attempt_shares_the_sampling_and_both_are_settled() -> None:
    hand, first, retry = Hand(), given_group(), given_group(1, (1, 3))
    hand.add(first, first.message)
    hand.begin("g00000000")
    hand.add(retry, retry.message)
    assert hand.begin("g00000000") == (), "what is being sampled is not begun twice"
    hand.store("g00000000", 1)
    hand.store("g00000000", 3)
    assert hand.settle("g00000000") == [retry]
    hand.store("g00000000", 0)
    hand.store("g00000000", 2)
    assert hand.settle("g00000000") == [first]


def test_a_first_attempt_that_comes_after_its_retry_adds_only_what_is_missing() -> None:
    hand, first, retry = Hand(), given_group(), given_group(1, (2,))
    hand.add(retry, retry.message)
    assert hand.begin("g00000000") == (2,)
    hand.finish("g00000000", 2)
    hand.add(first, first.message)
    assert hand.begin("g00000000") == (0, 1, 3)
    assert hand.unfinished == 3
    assert hand.unstored == 4


def test_the_same_message_delivered_again_replaces_its_delivery() -> None:
    hand, first, again = Hand(), given_group(), given_group()
    hand.add(first, first.message)
    hand.begin("g00000000")
    assert hand.add(again, again.message) is first
    hand.lose([first])
    assert hand.orphans() == [], "the older delivery is nobody's any more: its loss is no loss"
    for member in range(4):
        hand.store("g00000000", member)
    assert hand.settle("g00000000") == [again]


def test_a_lost_delivery_leaves_an_orphan_unless_it_comes_again() -> None:
    hand, first, again = Hand(), given_group(), given_group()
    hand.add(first, first.message)
    hand.begin("g00000000")
    hand.lose([first])
    assert hand.orphans() == ["g00000000"]
    hand.add(again, again.message)
    assert hand.orphans() == []
    assert hand.begin("g00000000") == ()


def test_a_group_given_up_is_settled_when_its_aborted_members_are_stored() -> None:
    hand, whole = Hand(), given_group()
    hand.add(whole, whole.message)
    hand.begin("g00000000")
    hand.store("g00000000", 0)
    hand.give_up("g00000000")
    hand.finish("g00000000", 2)
    assert hand.settle("g00000000") == []
    assert hand.ready() == []
    hand.store("g00000000", 2)
    assert hand.settle("g00000000") == [whole], "members 1 and 3 had no token: there is nothing of them to store"


class Life(RuleBasedStateMachine):
    """Any order of what can happen to two groups; a model beside it says which deliveries may be settled."""

    def __init__(self) -> None:
        super().__init__()
        self.hand = Hand()
        self.open: list[Any] = []
        self.engine: set[tuple[str, int]] = set()
        self.out: set[tuple[str, int]] = set()
        self.loose: set[tuple[str, int]] = set()  # finished for a group that was let go: they are stored all the same
        self.stored: set[tuple[str, int]] = set()

    @rule(index=st.integers(0, 1), attempt=st.integers(0, 2), wanted=st.sets(st.integers(0, 3)))
    def deliver(self, index: int, attempt: int, wanted: set[int]) -> None:
        new = given_group(attempt, tuple(sorted(wanted)), index)
        replaced = self.hand.add(new, new.message)
        if replaced is not None:
            self.open.remove(replaced)
        self.open.append(new)
        self.settle(new.message.group)

    @rule()
    def begin(self) -> None:
        for name in self.hand.ready():
            members = {(name, m) for m in self.hand.begin(name)}
            assert members
            assert not members & (self.engine | self.out), "sampled twice at a time"
            self.engine |= members

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.engine:
            name, member = data.draw(st.sampled_from(sorted(self.engine)))
            self.engine.discard((name, member))
            self.out.add((name, member))
            self.hand.finish(name, member)

    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        if self.out | self.loose:
            name, member = data.draw(st.sampled_from(sorted(self.out | self.loose)))
            self.out.discard((name, member))
            self.loose.discard((name, member))
            self.stored.add((name, member))
            self.hand.store(name, member)
            self.settle(name)

    @rule()
    def fail(self) -> None:
        names = self.hand.recall()
        assert {name for name, _ in self.engine} == set(names)
        self.engine.clear()

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        if self.open:
            lost = data.draw(st.sampled_from(self.open))
            self.open.remove(lost)
            self.hand.lose([lost])

    @rule()
    def let_go(self) -> None:
        for name in self.hand.orphans():
            assert not [d for d in self.open if d.message.group == name]
            self.engine = {key for key in self.engine if key[0] != name}
            self.loose |= {key for key in self.out if key[0] == name}
            self.out = {key for key in self.out if key[0] != name}
            assert self.hand.drop(name) == []

    def settle(self, name: str) -> None:
        settled = self.hand.settle(name)
        if name not in self.hand:
            self.loose |= {key for key in self.out if key[0] == name}
            self.out = {key for key in self.out if key[0] != name}
        for done in settled:
            self.open.remove(done)
            assert {(name, m) for m in done.message.to_sample} <= self.stored

    @invariant()
    def nothing_is_forgotten(self) -> None:
        assert sorted(map(id, self.hand.deliveries)) == sorted(map(id, self.open))
        for delivery in self.open:
            name = delivery.message.group
            wanted = {(name, m) for m in delivery.message.to_sample}
            missing = wanted - self.engine - self.out - self.stored
            assert not missing or name in self.hand.ready(), "a member that is wanted, and that nobody will begin"


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
