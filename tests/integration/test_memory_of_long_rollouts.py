"""Fifty rollouts of sixty turns and 57,000 tokens each, held at once: memory is bounded by their bytes, and no turn ships its prefix again.

M1: an orchestrator died at a terabyte with 3,800 buffered rollouts: boxed integers of 36 bytes a token, and every turn sent with its
whole prompt. Here a token held costs at most `HELD_BYTES_PER_TOKEN`, whatever the number of turns, from the wire to the learner.
"""

from __future__ import annotations

import gc
import re
import tracemalloc
from pathlib import Path

import numpy as np

from driftline.environments.multi_turn import CalculatorEpisode, Done, Observation
from driftline.messages import (
    Finish,
    Graded,
    Group,
    NatsBus,
    NatsServer,
    Subjects,
    Task,
    Trajectory,
    encode,
    topology,
)
from driftline.messages.bus import Delivery
from driftline.services.learner.assembler import Arrival, Assembler

ROLLOUTS, TURNS, TOKENS = 50, 60, 57_000
MEMBERS = 10
HELD_BYTES_PER_TOKEN = 24
"""13 of arrays, the text as it came and as a string, and the compressed frame that a delivery keeps until it is acknowledged."""
IN_HAND = 6
"""Rollouts that are sent or decoded at the moment, in several copies: not held, but part of the peak."""

TASK = Task(id="t", source="test", family="calc", prompt="Work it out step by step. " * 8, answer="1")


class ScriptedModel:
    """Writes a line of thought and a call per turn, one token per character."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def segment(self, turn: int, length: int) -> str:
        call = f"<calc>{self._random.integers(100, 999)} * {turn + 10}</calc>" if turn < TURNS - 1 else "answer: 1"
        thought = self._random.integers(97, 123, length - len(call), dtype=np.uint8).tobytes().decode()
        return thought + call


def rollout(run: str, group: str, member: int, *, turns: int = TURNS) -> Trajectory:
    """One conversation, grown turn by turn: what the model says and what the environment answers, appended to one sequence."""
    episode = CalculatorEpisode(TASK.prompt, max_calls=turns)
    model = ScriptedModel(member)
    parts, acted = [episode.start()], [False]
    prompt = len(parts[0])
    share = (TOKENS - prompt) // turns - 32
    answer: Observation | Done | None = None
    for turn in range(turns):
        left = TOKENS - sum(map(len, parts))
        said = model.segment(turn, share) if turn < TURNS - 1 else model.segment(turn, left)
        parts.append(said)
        acted.append(True)
        answer = episode.step(said)
        if isinstance(answer, Observation):
            parts.append(answer.text)
            acted.append(False)
    assert isinstance(answer, Done)
    text = "".join(parts)
    mask = np.repeat(acted, [len(part) for part in parts])
    random = np.random.default_rng(member)
    return Trajectory(
        run=run, group=group, member=member, members=MEMBERS, index=int(group[1:]), task=TASK, prompt_tokens=prompt,
        tokens=np.frombuffer(text.encode(), np.uint8).astype(np.int32), action_mask=mask,
        logprobs=np.where(mask, -random.exponential(size=len(mask)), 0).astype(np.float32),
        versions=np.where(mask, np.arange(len(mask)) * 3 // len(mask), -1).astype(np.int32),
        text=text[prompt:], finish=Finish.STOP, engine="e",
    )  # fmt: skip


def test_a_rollout_of_sixty_turns_travels_once() -> None:
    """M1: as many bytes as the same tokens in one turn, and far fewer than its prefixes would be."""
    many = rollout("r", "g0", 0)
    assert len(many.tokens) == TOKENS
    assert len(re.findall("<result>", many.text)) == TURNS - 1
    mask = np.arange(TOKENS) >= many.prompt_tokens
    one = many.model_copy(update={
        "action_mask": mask, "versions": np.where(mask, 0, -1).astype(np.int32),
        "logprobs": np.where(mask, -np.random.default_rng(0).exponential(size=TOKENS), 0).astype(np.float32),
    })  # fmt: skip
    assert len(encode(many)) < 1.05 * len(encode(one))
    assert len(encode(many)) < 8 * TOKENS


async def test_fifty_long_rollouts_stay_within_their_bytes_from_the_wire_to_the_learner(tmp_path: Path) -> None:
    """M1, through a real broker: published, pulled and graded a few at a time, and all held by the learner's assembler."""
    run = "long"
    made, subjects = topology(run), Subjects(run)
    consumers = {consumer.durable: consumer for consumer in made.consumers}
    assembler = Assembler(run=run, groups_per_step=ROLLOUTS, max_lag=4)
    held: list[Delivery] = []
    async with NatsServer(tmp_path) as server, await NatsBus.connect(server.url, name="memory") as bus:
        await bus.declare(made)
        warm = rollout(run, "g9", 0)
        await bus.publish(subjects.trajectory("g9"), warm, id="warm")
        [delivery] = await bus.pull(consumers["grader"], batch=1, timeout_s=10)
        await delivery.ack()
        del warm, delivery
        gc.collect()
        tracemalloc.start()
        try:
            for number in range(ROLLOUTS):
                group, member = f"g{number // MEMBERS}", number % MEMBERS
                if member == 0:
                    assembler.admit(Group(run=run, group=group, index=number // MEMBERS, task=TASK, members=MEMBERS), 0.0)
                await bus.publish(subjects.trajectory(group), rollout(run, group, member), id=f"{group}/{member}")
            # Published, nothing of them is left here: the stream is the buffer.
            gc.collect()
            after_publishing = tracemalloc.get_traced_memory()[0]
            graded = 0
            while graded < ROLLOUTS:
                for delivery in await bus.pull(consumers["grader"], batch=2, timeout_s=10):
                    trajectory = delivery.message
                    assert isinstance(trajectory, Trajectory)
                    await bus.publish(subjects.graded(trajectory.group), Graded(run=run, trajectory=trajectory, reward=graded % 2),
                                      id=f"{trajectory.id}/graded")  # fmt: skip
                    await delivery.ack()
                    graded += 1
            del trajectory, delivery
            while len(held) < ROLLOUTS:
                for delivery in await bus.pull(consumers["learner"], batch=2, timeout_s=10):
                    message = delivery.message
                    assert isinstance(message, Graded)
                    assert assembler.arrive(message) is Arrival.ACCEPTED
                    held.append(delivery)
            now, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    tokens = ROLLOUTS * TOKENS
    assert assembler.held_members == ROLLOUTS
    print(f"traced: {after_publishing / 1e6:.1f} MB published, {now / tokens:.1f} bytes per token held, peak {peak / tokens:.1f}")
    assert after_publishing < IN_HAND * HELD_BYTES_PER_TOKEN * TOKENS
    assert now < HELD_BYTES_PER_TOKEN * tokens
    assert peak < HELD_BYTES_PER_TOKEN * (tokens + IN_HAND * TOKENS)
    # What the assembler says of itself, by which the learner stops pulling, is not less than half of the truth.
    assert now / 2 < assembler.held_bytes <= now
