"""What clients ask for, read from three routes' requests into one form.

    POST /inference/v1/generate   token ids in, token ids out (vLLM's route; sampling_params inside)
    POST /v1/completions          a text, texts, or token ids
    POST /v1/chat/completions     a conversation

Guarantees: an `Order` is checked against the model before anything is queued: its prompt and completion fit the context, its token ids are the vocabulary's,
its model or adapter is there. Temperature 0 means `COLDEST`. Sources of the names: OpenAI's API reference, vLLM's SamplingParams.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from driftline.services.gateway.body import Body
from driftline.services.gateway.client import Ask, Message, ModelCard, Text
from driftline.services.gateway.errors import BadRequest

__all__ = ["COLDEST", "Order", "Route", "read_order"]

COLDEST: Final = 1e-4
"""Temperature 0: a token that is likelier by 0.002 of a logit is e^20 times as likely. Log-probabilities are of this distribution."""

HOTTEST: Final = 10.0
MOST_CHOICES: Final = 128
MOST_PROMPTS: Final = 256
MOST_STOPS: Final = 16
COMPLETION_TOKENS: Final = 16
"""What /v1/completions gives who names no max_tokens; the other routes give what the context leaves."""

_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "typical_p": (1,), "repetition_penalty": (1,), "presence_penalty": (0,), "frequency_penalty": (0,),
    "length_penalty": (1,), "min_tokens": (0,), "best_of": (1,), "use_beam_search": (False,), "logit_bias": (), "bad_words": (), "allowed_token_ids": (),
    "logits_processors": (), "prompt_logprobs": (), "truncate_prompt_tokens": (), "structured_outputs": (), "guided_json": (), "guided_regex": (),
    "guided_choice": (), "guided_grammar": (), "thinking_token_budget": (), "extra_args": (), "vllm_xargs": (),
}
_HARMLESS: Final = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "spaces_between_special_tokens", "detokenize", "flat_logprobs",
                    "output_kind", "cache_salt")
"""`cache_salt`: cached rows are never used under other weights than their own, whatever the salt."""


class Route(StrEnum):
    GENERATE = "generate"
    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclass(frozen=True)
class Order:
    """One request: `n` asks for each prompt, in order. `model` is the name it was called by. `include_usage`: a stream ends with the counts. `token_ids`: ids are
    wanted beside the text; `token_names`: tokens are named token_id:N."""

    route: Route
    id: str
    model: str
    asks: tuple[Ask, ...]
    n: int
    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    token_ids: bool = False
    token_names: bool = False

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        return tuple(ask.tokens for ask in self.asks[:: self.n])


def read_order(route: Route, raw: bytes, card: ModelCard, text: Text, *, session: str = "", default_id: str = "") -> Order:
    """Raises BadRequest naming the parameter, ConfigError where the chat template refuses the conversation."""
    body = Body.of(raw)
    name, adapter = _model(body, card)
    request_id = body.string("request_id") or default_id or secrets.token_hex(12)
    session = body.string("session_id") or session
    priority = body.integer("priority", 0)
    stream, include_usage = body.flag("stream"), _stream_options(body)
    prompts: tuple[tuple[int, ...], ...]
    match route:
        case Route.GENERATE:
            prompts = (_ids(body, "token_ids", body.take("token_ids"), text),)
            settings = body.inner("sampling_params")
            body.neutral({"features": (), "content_parts": (), "kv_transfer_params": (), "output_mode": ("tokens",)})
        case Route.COMPLETIONS:
            prompts, settings = _prompts(body, text), body
            body.neutral({"suffix": ("",), "echo": (False,), "prompt_embeds": ()})
            body.ignore(("add_special_tokens",))
        case Route.CHAT:
            prompts, settings = (tuple(text.encode_chat(_messages(body))),), body
            body.neutral({"tools": (), "functions": (), "tool_choice": ("none", "auto"), "function_call": ("none",), "parallel_tool_calls": (True, False), "modalities": (["text"],),
                          "audio": (), "prediction": (), "reasoning_effort": (), "verbosity": (), "web_search_options": (), "chat_template": (), "chat_template_kwargs": (),
                          "documents": (), "continue_final_message": (False,), "add_generation_prompt": (True,)})
            body.ignore(("add_special_tokens",))
    logprobs = _logprobs(route, settings)
    n = settings.integer("n", 1, low=1, high=MOST_CHOICES) or 1
    limit = settings.integer("max_tokens", None, low=1)
    limit = settings.integer("max_completion_tokens", limit, low=1)
    temperature = settings.number("temperature", 1.0, low=0.0, high=HOTTEST)
    seed = settings.integer("seed", None)
    stop, keep_stop = settings.strings("stop", most=MOST_STOPS), settings.flag("include_stop_str_in_output")
    stop_ids = frozenset(_ids(settings, "stop_token_ids", settings.take("stop_token_ids") or [], text, empty=True))
    ignore_eos = settings.flag("ignore_eos")
    settings.neutral(_NEUTRAL)
    settings.neutral({"response_format": ({"type": "text"},), "skip_special_tokens": (True, False) if route is Route.GENERATE else (True,)})
    settings.ignore(_HARMLESS)
    token_ids, token_names = body.flag("return_token_ids"), body.flag("return_tokens_as_token_ids")
    body.ignore(_HARMLESS)
    settings.done()
    body.done()
    seed = secrets.randbits(63) if seed is None else seed
    nonce = secrets.token_hex(4)  # two requests may call themselves the same: a retry, or a proxy's header
    asks = tuple(
        Ask(f"{request_id}-{nonce}-{p * n + draw}", prompt, _room(route, settings, prompt, limit, card),
            temperature=max(temperature, COLDEST), seed=seed, draw=p * n + draw, stop_ids=stop_ids, ignore_eos=ignore_eos, adapter=adapter, session=session,
            priority=priority or 0)
        for p, prompt in enumerate(prompts) for draw in range(n)
    )
    return Order(route, request_id, name, asks, n, stop, keep_stop, logprobs, stream, include_usage, token_ids, token_names or route is Route.GENERATE)


def _model(body: Body, card: ModelCard) -> tuple[str, str]:
    """The name it is called by, and the adapter ("" for the base)."""
    name = body.string("model")
    if name in ("", card.name):
        return card.name, ""
    if name not in card.adapters:
        raise BadRequest("no such model", field="model", value=name, remedy=f"one of {', '.join([card.name, *card.adapters][:20])}", status=404, code="model_not_found")
    return name, name


def _stream_options(body: Body) -> bool:
    options = body.inner("stream_options")
    include = options.flag("include_usage")
    options.neutral({"continuous_usage_stats": (False,)})
    options.ignore(("include_obfuscation",))
    options.done()
    return include


def _logprobs(route: Route, settings: Body) -> bool:
    """Whether the sampled tokens' are wanted; those of other tokens are not to be had."""
    if route is Route.CHAT:
        settings.neutral({"top_logprobs": (0,)})
        return settings.flag("logprobs")
    return settings.integer("logprobs", None, low=0, high=1) is not None


def _room(route: Route, settings: Body, prompt: Sequence[int], limit: int | None, card: ModelCard) -> int:
    room = card.context - len(prompt)
    if room < 1 or (limit is not None and limit > room):
        raise BadRequest(f"the model's context is {card.context} tokens, the prompt has {len(prompt)}", field=settings.name("max_tokens") if room > 0 else "prompt",
                         value=limit if room > 0 else len(prompt), remedy=f"at most {room} remain" if room > 0 else "shorten it", code="context_length_exceeded")
    return limit if limit is not None else min(COMPLETION_TOKENS, room) if route is Route.COMPLETIONS else room


def _ids(body: Body, field: str, value: Any, text: Text, *, empty: bool = False) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise body.wrong(field, value, "not a list of token ids", "whole numbers of the vocabulary")
    if not value and not empty:
        raise body.wrong(field, value, "empty", "a prompt has at least one token")
    out = next((i for i in value if not 0 <= i < text.vocab_size), None)
    if out is not None:
        raise body.wrong(field, out, "not an id of the vocabulary", f"ids are 0 to {text.vocab_size - 1}")
    return tuple(value)


def _prompts(body: Body, text: Text) -> tuple[tuple[int, ...], ...]:
    value = body.take("prompt")
    several: list[Any] = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    if len(several) > MOST_PROMPTS:
        raise body.wrong("prompt", len(several), "too many prompts", f"at most {MOST_PROMPTS} in a request")
    found = []
    for each in several:
        ids = text.encode(each) if isinstance(each, str) else each
        found.append(_ids(body, "prompt", ids, text))
    return tuple(found)


def _messages(body: Body) -> list[Message]:
    value = body.take("messages")
    if not isinstance(value, list) or not value:
        raise body.wrong("messages", value, "not a list of messages", "at least one message")
    return [_message(Body(each, f"messages[{i}]")) if isinstance(each, dict) else _refuse(i, each) for i, each in enumerate(value)]


def _refuse(index: int, each: object) -> Message:
    raise BadRequest("not a message", field=f"messages[{index}]", value=each, remedy="an object with role and content")


def _message(body: Body) -> Message:
    role, content = body.string("role"), body.take("content")
    body.neutral({"tool_calls": (), "function_call": (), "audio": (), "refusal": (), "tool_call_id": ()})
    body.ignore(("name", "reasoning_content", "annotations"))
    body.done()
    known = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
    if role not in known:
        raise body.wrong("role", role, "not a role the templates here know", "system, user or assistant; of tools, send token ids to /inference/v1/generate")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
        if any(not isinstance(part, str) for part in parts):
            raise body.wrong("content", content, "not text", 'parts of {"type": "text", "text": ...}')
        content = "".join(part for part in parts if part is not None)
    if not isinstance(content, str):
        raise body.wrong("content", content, "not text")
    return Message(known[role], content)
