"""Micro-batches: which members of a batch are forwarded and differentiated together. They bound memory and change nothing else.

By groups: as many groups as asked for, in order. By tokens: as many members as a budget holds, packed without padding, a prompt counted once for all the members of
a group that share it there. A group is taken whole where it fits, and cut between members where it does not; a member is never cut, so one that is over the
budget alone is a micro-batch alone. What goes where depends on lengths and order, so that a replay makes the same cut. Depends on no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from driftline.messages.errors import ConfigError
from driftline.services.learner.assembler import BatchGroup

__all__ = ["MicroBatch", "by_groups", "by_tokens", "token_count"]


@dataclass(frozen=True)
class MicroBatch:
    """Groups, each with those of its members that are here, and every member's number in the batch."""

    groups: tuple[BatchGroup, ...]
    numbers: tuple[int, ...]


@dataclass
class _Open:
    """A micro-batch that is being filled."""

    tokens: int = 0
    parts: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """(group, its members here)."""


def by_groups(groups: Sequence[BatchGroup], count: int) -> list[MicroBatch]:
    """`count` whole groups at a time, the last with what is left."""
    firsts = _firsts(groups)
    out = []
    for start in range(0, len(groups), count):
        taken = tuple(groups[start : start + count])
        out.append(MicroBatch(taken, tuple(range(firsts[start], firsts[start] + sum(len(g.members) for g in taken)))))
    return out


def by_tokens(groups: Sequence[BatchGroup], budget: int) -> list[MicroBatch]:
    """Micro-batches of at most `budget` forwarded tokens each, or of one member.

    Largest first into the first that has room, which leaves few tokens of room; within a micro-batch groups and members are in the batch's order. Prompts are told
    apart by their tokens: those that router replay must forward apart for their routes come on top. Raises ConfigError for a budget that is none.
    """
    if budget < 1:
        raise ConfigError("holds no token", field="learner.micro_batch_tokens", value=budget, remedy="give a positive number, or 0 to cut by groups")
    pieces: list[tuple[int, int, tuple[int, ...]]] = []
    for index, group in enumerate(groups):
        pieces += [(tokens, index, members) for tokens, members in _cut(group, budget)]
    made: list[_Open] = []
    for tokens, index, members in sorted(pieces, key=lambda piece: (-piece[0], piece[1], piece[2])):
        room = next((m for m in made if m.tokens + tokens <= budget), None)
        if room is None:
            made.append(room := _Open())
        room.tokens += tokens
        room.parts.append((index, members))
    firsts = _firsts(groups)
    return [_closed(each, groups, firsts) for each in made]


def token_count(members: Sequence[int], group: BatchGroup) -> int:
    """Tokens that a forward of these members feeds: each distinct prompt once without its last token, which starts every completion, and each completion without
    its last."""
    fed = _Fed(group)
    return sum(fed.more(i) for i in members)


class _Fed:
    """How many tokens each further member of a group adds to those that were asked for before it."""

    def __init__(self, group: BatchGroup) -> None:
        self._trajectories = [m.trajectory for m in group.members]
        self._prompts: set[bytes] = set()

    def more(self, member: int) -> int:
        t = self._trajectories[member]
        prompt = t.tokens[: t.prompt_tokens - 1].tobytes()
        new = 0 if prompt in self._prompts else t.prompt_tokens - 1
        self._prompts.add(prompt)
        return new + len(t.tokens) - t.prompt_tokens


def _cut(group: BatchGroup, budget: int) -> list[tuple[int, tuple[int, ...]]]:
    """(tokens, members) of the parts of a group: one if it fits, else consecutive members as the budget allows."""
    everyone = tuple(range(len(group.members)))
    whole = token_count(everyone, group)
    if whole <= budget:
        return [(whole, everyone)]
    out: list[tuple[int, tuple[int, ...]]] = []
    part: list[int] = []
    fed, size = _Fed(group), 0
    for member in everyone:
        more = fed.more(member)
        if part and size + more > budget:
            out.append((size, tuple(part)))
            part, fed, size = [], _Fed(group), 0
            more = fed.more(member)
        part.append(member)
        size += more
    return [*out, (size, tuple(part))]


def _closed(made: _Open, groups: Sequence[BatchGroup], firsts: Sequence[int]) -> MicroBatch:
    parts = sorted(made.parts)
    taken = tuple(BatchGroup(groups[i].group, tuple(groups[i].members[m] for m in members), groups[i].excluded) for i, members in parts)
    return MicroBatch(taken, tuple(firsts[i] + m for i, members in parts for m in members))


def _firsts(groups: Sequence[BatchGroup]) -> list[int]:
    """The number in the batch of each group's first member."""
    out = [0]
    for group in groups:
        out.append(out[-1] + len(group.members))
    return out
