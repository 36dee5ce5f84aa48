"""What can be done with a dead letter: open it, queue it again, or drop it.

Queueing again stores the original bytes anew, so their count of deliveries starts at one, under an id made of the letter's place;
then the letter is deleted. A crash in between leaves both: done again, the broker recognises the id and stores nothing. Past its
memory of ids (an hour) a second copy is stored and does no harm: rollouts, grader and learner publish members under ids of their
own, and a group ends once. A letter whose group has ended is refused: its work would be thrown away by whoever pulls it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final

from driftline.messages import frames
from driftline.messages.bus import Bus
from driftline.messages.dead_letters import DeadLetter, dead_letters, group_of, run_of
from driftline.messages.errors import ConfigError, DriftlineError, IntegrityError, MalformedMessage
from driftline.messages.subjects import Subjects
from driftline.messages.types import Message, OutcomeEvent

__all__ = ["Refused", "contents", "drop", "every", "requeue", "those"]

QUEUES: Final = ("groups", "trajectories", "graded")
PAGE: Final = 64  # letters of at most 2 MiB: what is held at once


class Refused(DriftlineError):
    """Queueing this letter again would be of no use."""


async def every(bus: Bus, run: str, kind: str | None = None) -> AsyncIterator[DeadLetter]:
    """The letters of a run, or those from one plane, oldest first. Only those there now: what is queued again and comes straight
    back is a new letter, and is not met again."""
    numbers: list[int] = []
    start = 1
    while page := await dead_letters(bus, run, start=start, limit=PAGE):
        numbers += [letter.seq for letter in page if kind is None or letter.kind == kind]
        start = page[-1].seq + 1
    for number in numbers:
        if (letter := await _letter(bus, run, number)) is not None:
            yield letter


async def those(bus: Bus, run: str, numbers: Sequence[int]) -> AsyncIterator[DeadLetter]:
    """The letters with these sequences. ConfigError for one that is not there."""
    for number in dict.fromkeys(numbers):
        letter = await _letter(bus, run, number)
        if letter is None:
            raise ConfigError("the run has no such dead letter", field="SEQ", value=number, remedy=f"driftline dead-letters ls {run}")
        yield letter


async def _letter(bus: Bus, run: str, number: int) -> DeadLetter | None:
    found = await dead_letters(bus, run, start=max(number, 1), limit=1)
    return found[0] if found and found[0].seq == number else None


async def contents(bus: Bus, letter: DeadLetter) -> Message:
    """The message in a letter. Raises MalformedMessage, or IntegrityError when its large part is gone."""
    return await frames.open_frame(bus, letter.subject, letter.data)


async def requeue(bus: Bus, run: str, letter: DeadLetter, *, force: bool = False) -> bool:
    """Back into the queue it was taken from. False when it was there already, from an attempt that was cut off. Raises Refused;
    `force` overrides what the group's state says, never that the message was in no queue."""
    if letter.kind not in QUEUES or not letter.subject or run_of(letter.subject) != (run, letter.kind):
        raise Refused("it was in no work queue: the original is still in its stream", field="dead letter", value=letter.seq,
                      remedy="drop it when it is understood")
    if not force:
        await _check(bus, run, letter)
    dead = Subjects(run).stream("DEAD")
    ack = await bus.publish_bytes(letter.subject, letter.data, id=f"requeue/{dead}/{letter.seq}")
    await bus.delete(dead, letter.seq)
    return not ack.duplicate


async def drop(bus: Bus, run: str, letter: DeadLetter) -> bool:
    """Delete it for good, and with it the large part of a message that was in a work queue. False: it was gone already."""
    if not await bus.delete(Subjects(run).stream("DEAD"), letter.seq):
        return False
    claim = frames.claim_in(letter.data)
    if claim is not None and letter.kind in QUEUES and claim.run == run:
        await frames.drop_claim(bus, claim)
    return True


async def _check(bus: Bus, run: str, letter: DeadLetter) -> None:
    try:
        await contents(bus, letter)
    except (MalformedMessage, IntegrityError) as error:
        raise Refused(f"it still cannot be read and would come straight back: {error}", field="dead letter", value=letter.seq,
                      remedy="--force queues it all the same") from error
    name = group_of(letter)
    if name is None:
        return
    names = Subjects(run)
    word = await bus.last(names.stream("LEDGER"), names.outcome(name))
    if word is not None and isinstance(word.message, OutcomeEvent):
        raise Refused(f"its group {name} has ended as {word.message.outcome.value}: the work would be thrown away",
                      field="dead letter", value=letter.seq, remedy="drop it; --force queues it all the same")
