"""One update of a policy on its way to a fleet of engines: a discrete-event simulation, pure, the same answer every time.

    encode (learners) -> upload -> store -> [ head moves ] -> store or another engine -> engine -> decode and apply

The unit is a pack. Every stage is a server that takes packs one at a time, in the order they come; each has a rate and counts the
seconds it was busy and the bytes it moved. An engine has `window` packs between asking for and having applied them, as the
reader has; who asks whom for a pack is the relay's own rule (`policy_store.relay_tree`). Bytes are conserved: what the engines
received is what the store and the other engines sent.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache
from typing import NamedTuple

from driftline.policy_store.relay_tree import order

__all__ = ["STORE", "Announce", "Fleet", "Outcome", "Stage", "Tree", "Update", "parents", "simulate"]

STORE = -1


class Stage(Enum):
    ENCODE = "encode"
    UPLOAD = "learner's link"
    STORE_IN = "store, in"
    STORE_OUT = "store, out"
    RELAY = "relay's link"
    ENGINE_IN = "engine's link"
    APPLY = "decode and apply"


class Announce(Enum):
    """When readers learn of a pack."""

    HEAD = auto()
    """When the head has moved, after the last pack is durable: what Driftline does."""
    PACK = auto()
    """When that pack is durable: what a reader that fetched ahead of the head could gain."""


class Tree(Enum):
    """Who asks whom."""

    NONE = auto()
    """Everyone asks the store."""
    FIXED = auto()
    """One tree for all packs: who is near its root serves `fanout` times what a leaf receives, and leaves serve nothing."""
    BY_PACK = auto()
    """A tree of its own for each pack, as Driftline's relay has."""


@dataclass(frozen=True)
class Update:
    """`packs` equal packs of `pack_bytes`, each the encoding of `raw_bytes` of weights. Seconds are of a whole node for one pack."""

    packs: int
    pack_bytes: float
    raw_bytes: float
    encode_s: float
    apply_s: float


@dataclass(frozen=True)
class Fleet:
    """Links in bytes per second, full duplex; `latency_s` is one way. In a tree one engine asks the store for a pack and each serves it to
    at most `fanout` others."""

    engines: int
    learners: int
    learner_link: float
    store_in: float
    store_out: float
    engine_link: float
    latency_s: float
    durable_s: float
    window: int
    tree: Tree = Tree.NONE
    fanout: int = 4
    announce: Announce = Announce.HEAD


class Outcome(NamedTuple):
    """`durable_s`: the head could move. `last_s`: the last engine has applied everything. `pause_s`: the longest time between an
    engine's first and last touch of its weights, when it applies packs as they come. `fetched_s`: the last engine has every
    pack; one that applies only then is paused for `apply_s`. `busy_s` is of the busiest server of each stage."""

    durable_s: float
    fetched_s: float
    last_s: float
    pause_s: float
    apply_s: float
    busy_s: Mapping[Stage, float]
    store_out_bytes: float
    relayed_bytes: float
    received_bytes: float

    @property
    def bottleneck(self) -> Stage:
        return max(self.busy_s, key=lambda stage: self.busy_s[stage])


@dataclass
class _Server:
    """Takes one thing at a time, first come, first served."""

    rate: float = 1.0
    free: float = 0.0
    busy: float = 0.0
    amount: float = 0.0

    def take(self, now: float, amount: float) -> tuple[float, float]:
        """From when to when."""
        start = max(now, self.free)
        self.free = start + amount / self.rate
        self.busy += amount / self.rate
        self.amount += amount
        return start, self.free


@cache
def parents(engines: int, tree: Tree, fanout: int, pack: int) -> tuple[int, ...]:
    """Whom each engine asks for a pack."""
    if tree is Tree.NONE:
        return (STORE,) * engines
    names = [str(engine) for engine in range(engines)]
    ranked = names if tree is Tree.FIXED else order(f"{pack:032x}", names)
    found = [STORE] * engines
    for position, name in enumerate(ranked[1:], 1):
        found[int(name)] = int(ranked[(position - 1) // fanout])
    return tuple(found)


class _Event(Enum):
    ENCODED = auto()
    UPLOADING = auto()
    ANNOUNCED = auto()
    ASKED = auto()
    SENDING = auto()
    RECEIVED = auto()
    APPLIED = auto()


@dataclass
class _Engine:
    link_in: _Server
    link_out: _Server
    cpu: _Server = field(default_factory=_Server)
    next: int = 0
    has: set[int] = field(default_factory=set)
    asked: dict[int, deque[int]] = field(default_factory=dict)
    first_touch: float = float("inf")
    last_touch: float = 0.0
    fetched: float = 0.0


class _Run:
    def __init__(self, update: Update, fleet: Fleet) -> None:
        self.update, self.fleet = update, fleet
        self.events: list[tuple[float, int, _Event, int, int]] = []
        self.order = 0
        self.coders = [_Server() for _ in range(fleet.learners)]
        self.learners = [_Server(fleet.learner_link) for _ in range(fleet.learners)]
        self.store_in, self.store_out = _Server(fleet.store_in), _Server(fleet.store_out)
        self.engines = [_Engine(_Server(fleet.engine_link), _Server(fleet.engine_link)) for _ in range(fleet.engines)]
        self.stored: set[int] = set()
        self.waiting: dict[int, deque[int]] = {}
        self.durable = 0.0
        self.durable_packs = 0

    def at(self, time: float, event: _Event, engine: int, pack: int) -> None:
        self.order += 1  # what was caused first is handled first: ties never depend on anything else
        heapq.heappush(self.events, (time, self.order, event, engine, pack))

    def play(self) -> None:
        for pack in range(self.update.packs):
            _, done = self.coders[pack % self.fleet.learners].take(0.0, self.update.encode_s)
            self.at(done, _Event.ENCODED, pack % self.fleet.learners, pack)
        for engine in range(self.fleet.engines):
            for _ in range(self.fleet.window):
                self.ask(0.0, engine)
        while self.events:
            now, _, event, who, pack = heapq.heappop(self.events)
            match event:
                case _Event.ENCODED:
                    start, _ = self.learners[who].take(now, self.update.pack_bytes)
                    self.at(start, _Event.UPLOADING, who, pack)
                case _Event.UPLOADING:
                    self.upload(now, pack)
                case _Event.ANNOUNCED:
                    self.announce(now, pack)
                case _Event.ASKED:
                    self.asked(now, who, pack)
                case _Event.SENDING:
                    self.enter(now, who, pack)
                case _Event.RECEIVED:
                    self.received(now, who, pack)
                case _Event.APPLIED:
                    self.engines[who].last_touch = now
                    self.ask(now, who)

    def upload(self, now: float, pack: int) -> None:
        _, entered = self.store_in.take(now, self.update.pack_bytes)
        done = max(entered, now + self.update.pack_bytes / self.fleet.learner_link) + self.fleet.latency_s + self.fleet.durable_s
        self.durable = max(self.durable, done)
        self.durable_packs += 1
        if self.fleet.announce is Announce.PACK:
            self.at(done + self.fleet.latency_s, _Event.ANNOUNCED, STORE, pack)
        elif self.durable_packs == self.update.packs:
            # The manifest and the head, each durable before the next, then the news of it.
            moved = self.durable + 2 * (2 * self.fleet.latency_s + self.fleet.durable_s)
            self.durable = moved
            for each in range(self.update.packs):
                self.at(moved + self.fleet.latency_s, _Event.ANNOUNCED, STORE, each)

    def announce(self, now: float, pack: int) -> None:
        self.stored.add(pack)
        for engine in self.waiting.pop(pack, ()):
            self.send(now, STORE, engine, pack)

    def ask(self, now: float, engine: int) -> None:
        one = self.engines[engine]
        if one.next < self.update.packs:
            self.at(now + self.fleet.latency_s, _Event.ASKED, engine, one.next)
            one.next += 1

    def asked(self, now: float, engine: int, pack: int) -> None:
        parent = self.parent(engine, pack)
        has, waiting = (self.stored, self.waiting) if parent == STORE else (self.engines[parent].has, self.engines[parent].asked)
        if pack in has:
            self.send(now, parent, engine, pack)
        else:
            waiting.setdefault(pack, deque()).append(engine)

    def parent(self, engine: int, pack: int) -> int:
        return parents(self.fleet.engines, self.fleet.tree, self.fleet.fanout, pack)[engine]

    def sender(self, which: int) -> _Server:
        return self.store_out if which == STORE else self.engines[which].link_out

    def send(self, now: float, sender: int, engine: int, pack: int) -> None:
        start, _ = self.sender(sender).take(now, self.update.pack_bytes)
        self.at(start, _Event.SENDING, engine, pack)

    def enter(self, now: float, engine: int, pack: int) -> None:
        """What leaves one link enters the other at once; the last byte is through when it is through both."""
        left = now + self.update.pack_bytes / self.sender(self.parent(engine, pack)).rate
        _, entered = self.engines[engine].link_in.take(now, self.update.pack_bytes)
        self.at(max(left, entered) + self.fleet.latency_s, _Event.RECEIVED, engine, pack)

    def received(self, now: float, engine: int, pack: int) -> None:
        one = self.engines[engine]
        one.has.add(pack)
        one.fetched = now
        for child in one.asked.pop(pack, ()):
            self.send(now, engine, child, pack)
        start, done = one.cpu.take(now, self.update.apply_s)
        one.first_touch = min(one.first_touch, start)
        self.at(done, _Event.APPLIED, engine, pack)


def simulate(update: Update, fleet: Fleet) -> Outcome:
    """Play it to the end. Every engine has every pack then, or this is a fault of the simulation: RuntimeError."""
    run = _Run(update, fleet)
    run.play()
    if any(len(engine.has) != update.packs for engine in run.engines):
        raise RuntimeError("an engine was left without a pack")
    busiest = {
        Stage.ENCODE: run.coders,
        Stage.UPLOAD: run.learners,
        Stage.STORE_IN: [run.store_in],
        Stage.STORE_OUT: [run.store_out],
        Stage.RELAY: [engine.link_out for engine in run.engines],
        Stage.ENGINE_IN: [engine.link_in for engine in run.engines],
        Stage.APPLY: [engine.cpu for engine in run.engines],
    }
    return Outcome(
        durable_s=run.durable,
        fetched_s=max(engine.fetched for engine in run.engines),
        last_s=max(engine.last_touch for engine in run.engines),
        pause_s=max(engine.last_touch - engine.first_touch for engine in run.engines),
        apply_s=update.apply_s * update.packs,
        busy_s={stage: max(server.busy for server in servers) for stage, servers in busiest.items()},
        store_out_bytes=run.store_out.amount,
        relayed_bytes=sum(engine.link_out.amount for engine in run.engines),
        received_bytes=sum(engine.link_in.amount for engine in run.engines),
    )
