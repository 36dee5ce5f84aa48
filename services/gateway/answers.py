"""Answers as clients expect them: whole, or as events of a stream.

Guarantees: log-probabilities have one entry for each completion token, the one that ended it included; `token_ids` and log-probabilities are of the same tokens.
Shapes: OpenAI's chat.completion, chat.completion.chunk and text_completion; vLLM's GenerateResponse, whose tokens are named token_id:N.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from driftline.services.gateway.client import Text
from driftline.services.gateway.orders import Order, Route
from driftline.services.gateway.sampling import Choice, Delta

__all__ = ["Answers"]

_PREFIX = {Route.CHAT: "chatcmpl-", Route.COMPLETIONS: "cmpl-", Route.GENERATE: ""}
_OBJECT = {Route.CHAT: "chat.completion", Route.COMPLETIONS: "text_completion", Route.GENERATE: "generate"}


class Answers:
    """One order's answers."""

    def __init__(self, order: Order, text: Text) -> None:
        self._order, self._text = order, text
        self._created = int(time.time())
        self._offsets = [0] * len(order.asks)

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        order = self._order
        rows = [self._choice(i, choice) for i, choice in enumerate(choices)]
        answer = {**self._head(), "choices": rows, "usage": self.usage(choices)}
        if order.route is Route.GENERATE:
            answer |= {"prompt_logprobs": None, "prompt_token_ids": list(order.prompts[0])}
        elif order.token_ids and order.route is Route.CHAT:
            answer["prompt_token_ids"] = list(order.prompts[0])
        return answer

    def opening(self) -> list[dict[str, Any]]:
        """The first events of a stream: who speaks."""
        if self._order.route is not Route.CHAT:
            return []
        return [self._event([{"index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}]) for i in range(len(self._order.asks))]

    def event(self, delta: Delta) -> dict[str, Any] | None:
        """None where there is nothing to say yet."""
        order = self._order
        if not (delta.text or delta.finish or (delta.tokens and (order.logprobs or order.token_ids or order.route is Route.GENERATE))):
            return None
        row: dict[str, Any] = {"index": delta.index}
        match order.route:
            case Route.CHAT:
                row |= {"delta": {"content": delta.text} if delta.text or not delta.finish else {}, "logprobs": self._chat_logprobs(delta.tokens, delta.logprobs)}
            case Route.COMPLETIONS:
                row |= {"text": delta.text, "logprobs": self._text_logprobs(delta.index, delta.tokens, delta.logprobs)}
            case Route.GENERATE:
                row |= {"logprobs": self._chat_logprobs(delta.tokens, delta.logprobs), "policy_versions": _runs(delta.versions)}
        row |= {"finish_reason": _reason(delta.finish), "stop_reason": delta.stop}
        if order.token_ids or order.route is Route.GENERATE:
            row["token_ids"] = list(delta.tokens)
        return self._event([row])

    def closing(self, choices: Sequence[Choice]) -> dict[str, Any] | None:
        """The counts, where they are wanted."""
        return {**self._event([]), "usage": self.usage(choices)} if self._order.include_usage else None

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        prompt = sum(map(len, self._order.prompts))
        sampled = sum(len(choice.tokens) for choice in choices)
        cached = [choice.cached_tokens for choice in choices]
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled,
                "prompt_tokens_details": {"cached_tokens": sum(cached[:: self._order.n])}}

    def _head(self) -> dict[str, Any]:
        order = self._order
        head: dict[str, Any] = {"id": f"{_PREFIX[order.route]}{order.id}", "object": _OBJECT[order.route], "created": self._created, "model": order.model}
        return {"request_id": order.id, **head} if order.route is Route.GENERATE else head

    def _event(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        head = self._head()
        if self._order.route is Route.CHAT:
            head["object"] = "chat.completion.chunk"
        return {**head, "choices": rows}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        order = self._order
        row: dict[str, Any] = {"index": index}
        match order.route:
            case Route.CHAT:
                row |= {"message": {"role": "assistant", "content": choice.text, "refusal": None}, "logprobs": self._chat_logprobs(choice.tokens, choice.logprobs)}
            case Route.COMPLETIONS:
                row |= {"text": choice.text, "logprobs": self._text_logprobs(index, choice.tokens, choice.logprobs)}
                if order.token_ids:
                    row["prompt_token_ids"] = list(order.asks[index].tokens)
            case Route.GENERATE:
                row |= {"logprobs": self._chat_logprobs(choice.tokens, choice.logprobs), "policy_versions": _runs(choice.versions)}
        row |= {"finish_reason": _reason(choice.finish), "stop_reason": choice.stop}
        if order.token_ids or order.route is Route.GENERATE:
            row["token_ids"] = list(choice.tokens)
        return row

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._order.token_names else self._text.decode((token,))

    def _chat_logprobs(self, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        if not self._order.logprobs:
            return None
        rows: list[Mapping[str, Any]] = []
        for token, logprob in zip(tokens, logprobs, strict=True):
            name = self._name(token)
            rows.append({"token": name, "logprob": logprob, "bytes": None if "\ufffd" in name else list(name.encode("utf-8")), "top_logprobs": []})
        return {"content": rows, "refusal": None}

    def _text_logprobs(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        if not self._order.logprobs:
            return None
        names, offsets = [self._name(token) for token in tokens], []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(self._text.decode((token,)))
        return {"tokens": names, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": offsets}


def _reason(finish: Any) -> str | None:
    return None if finish is None else str(finish.value)


def _runs(versions: Sequence[int]) -> list[dict[str, int]]:
    """Which policy drew the tokens: versions in order, each with how many it drew."""
    return [{"version": version, "tokens": len(list(run))} for version, run in groupby(versions)]
