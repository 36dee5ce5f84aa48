"""The two halves of an engine, and both together: one computes prompts, the other goes on from what it is handed.

Guarantees: a completion is, up to rounding and in deterministic mode to the bit, that of one engine that did both, whatever is refused, evicted or computed
twice on the way; a hand-over that no longer fits (a version came between) is computed again under the new one; what waits between the halves is bounded in
bytes: when it is full, no further prompt is computed until the decoder took some.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from driftline.messages.errors import DriftlineError
from driftline.messages.types import Finish
from driftline.services.rollout.engine import Completion, Engine, QueueFull, Request
from driftline.services.rollout.handover.record import Handover, HandoverRefused, export, place

__all__ = ["Decoder", "Pair", "Prefiller", "PromptComputer"]

WAIT_S = 0.05
"""For a prompt, where nothing decodes meanwhile."""

Answer = Handover | Completion
"""Of a prompt: what to go on from, or all there is to it."""


class PromptComputer(Protocol):
    """Whoever computes prompts: in this process, or in another."""

    @property
    def idle(self) -> bool: ...
    def submit_request(self, request: Request) -> None: ...
    def take(self, wait_s: float = 0.0) -> list[Answer]: ...
    def cancel(self, name: str) -> int: ...
    def load(self, version: int, state: Mapping[str, torch.Tensor]) -> None: ...


class Prefiller:
    """Over an `engine` that does nothing else. `take` computes a step of it and returns what that finished."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._asked: dict[str, Request] = {}

    @property
    def idle(self) -> bool:
        return not self._asked

    def submit_request(self, request: Request) -> None:
        """Raises what the engine's does."""
        self.engine.submit_request(replace(request, sampling=request.sampling.model_copy(update={"max_tokens": 1}), session=""))
        self._asked[request.id] = request

    def take(self, wait_s: float = 0.0) -> list[Answer]:
        """There is nothing to wait for: what is asked is computed here."""
        if self.engine.idle:
            return []
        self.engine.step()
        answers: list[Answer] = []
        for done in self.engine.take_completions():
            request = self._asked.pop(done.id)
            if done.finish is Finish.STOP or request.sampling.max_tokens == 1:
                answers.append(done)
                continue
            handover = export(self.engine, request, int(done.tokens[0]), float(done.logprobs[0]), done.cached_tokens)
            if handover is None:
                self.submit_request(request)  # evicted before it could be exported
            else:
                answers.append(handover)
        return answers

    def cancel(self, name: str) -> int:
        self._asked.pop(name, None)
        return self.engine.cancel(name)

    def load(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        self.engine.load(version, state)


class Decoder:
    """Over an `engine` that is handed its prompts."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._begun: dict[str, Handover] = {}

    @property
    def idle(self) -> bool:
        return self.engine.idle

    def accept(self, handover: Handover) -> bool:
        """False: no memory or a full queue now. Raises HandoverRefused, and what `submit_request` raises."""
        if not place(self.engine, handover):
            return False
        request = handover.request
        try:
            self.engine.submit_request(replace(
                request, tokens=handover.prompt + array("i", [handover.first_token]), first_draw=request.first_draw + 1,
                sampling=request.sampling.model_copy(update={"max_tokens": request.sampling.max_tokens - 1}),
            ))
        except QueueFull:
            return False  # what was placed stays cached
        self._begun[request.id] = handover
        return True

    def step(self) -> list[Completion]:
        self.engine.step()
        return [self._whole(done) for done in self.engine.take_completions()]

    def cancel(self, name: str) -> int:
        self._begun.pop(name, None)
        return self.engine.cancel(name)

    def _whole(self, rest: Completion) -> Completion:
        """With the token that came with the hand-over."""
        given = self._begun.pop(rest.id, None)
        if given is None:
            raise DriftlineError("a completion of a request that was never handed over", field="request", value=rest.id,
                                 remedy="submit to a decoder's engine through accept")
        return replace(
            rest, tokens=np.concatenate([np.array([given.first_token], np.int32), rest.tokens]),
            logprobs=np.concatenate([np.array([given.first_logprob], np.float32), rest.logprobs]),
            versions=np.concatenate([np.array([given.version], np.int32), rest.versions]), prompt_tokens=rest.prompt_tokens - 1, cached_tokens=given.cached_tokens,
        )


class Pair:
    """A prefiller and a decoder as one: `submit_request`, `step`, `take_completions`. `waiting_bytes`: of hand-overs between them, beyond which no prompt is computed."""

    def __init__(self, prefiller: PromptComputer, decoder: Decoder, *, waiting_bytes: int = 2**30) -> None:
        self.prefiller, self.decoder, self.waiting_bytes = prefiller, decoder, waiting_bytes
        self._between: deque[Handover] = deque()
        self._done: list[Completion] = []
        self.handed = 0
        self.handed_bytes = 0
        self.refused = 0

    @property
    def idle(self) -> bool:
        return self.prefiller.idle and not self._between and self.decoder.idle

    def submit_request(self, request: Request) -> None:
        self.prefiller.submit_request(request)

    def step(self) -> None:
        """Take what was computed, hand over what there is memory for, advance what runs."""
        if sum(h.nbytes for h in self._between) < self.waiting_bytes:
            for answer in self.prefiller.take(WAIT_S if self.decoder.idle and not self._between else 0.0):
                if isinstance(answer, Completion):
                    self._done.append(answer)
                else:
                    self._between.append(answer)
        self._hand_over()
        if not self.decoder.idle:
            self._done += self.decoder.step()

    def _hand_over(self) -> None:
        while self._between:
            handover = self._between[0]
            try:
                if not self.decoder.accept(handover):
                    if self.decoder.idle:
                        raise DriftlineError("no memory for one hand-over", field="rollout.cache_mb", value=handover.nbytes,
                                             remedy="give the decoding engine's cache more")
                    return
            except HandoverRefused:
                if handover.version == self.decoder.engine.version:
                    raise  # another model: computing it again would change nothing
                self.refused += 1
                self.prefiller.submit_request(handover.request)
            else:
                self.handed += 1
                self.handed_bytes += handover.nbytes
            self._between.popleft()

    def take_completions(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def cancel(self, name: str) -> int:
        """Forget a request, wherever it is; returns how many there were."""
        between = [h for h in self._between if h.request.id == name]
        self._between = deque(h for h in self._between if h.request.id != name)
        return len(between) + self.prefiller.cancel(name) + self.decoder.cancel(name)

    def load(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Both halves; what is between them is computed again."""
        self.prefiller.load(version, state)
        self.decoder.engine.load(version, state)

