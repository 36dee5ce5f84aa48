"""vLLM's server: sampling by token ids over /v1/completions, weights as LoRA adapters or reloaded from files.

    sampling         POST /v1/completions {prompt: ids, logprobs: 0, return_token_ids: true}   the token that ended it is among token_ids
    adapters         POST /v1/load_lora_adapter, /v1/unload_lora_adapter                        VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora
    files            POST /pause?mode=abort, /collective_rpc reload_weights, /reset_prefix_cache, /resume    VLLM_SERVER_DEV_MODE=1

An adapter's name is new for every version: under one name, blocks cached with the old weights would be hit. Log-probabilities are of the sampling distribution only with
--logprobs-mode processed_logprobs. Sources: docs.vllm.ai (LoRA adapters; OpenAI-compatible server), vLLM's api_router modules for lora, rlhf, rpc, cache.
"""

from __future__ import annotations

from typing import Any

from driftline.messages.errors import IntegrityError
from driftline.services.rollout.external.server import (
    Http,
    Sampled,
    ServerRefused,
    ServerUnavailable,
    Wanted,
    checked,
    finish_of,
)

__all__ = ["Vllm"]


class Vllm:
    name = "vllm"

    def __init__(self, http: Http) -> None:
        self._http = http
        self._base = ""

    async def ready(self) -> str:
        cards = await self._http.get("/v1/models")
        names = [card["id"] for card in cards.get("data", ()) if isinstance(card, dict) and not card.get("parent")] if isinstance(cards, dict) else []
        if not names:
            raise ServerUnavailable("lists no model", field="rollout.engine_url", value=self._http.url, remedy="is it an OpenAI-compatible server of vLLM?")
        self._base = str(names[0])
        return self._base

    async def sample(self, wanted: Wanted) -> Sampled:
        model = wanted.adapter or self._base
        answer = await self._http.post("/v1/completions", {
            "model": model, "prompt": list(wanted.tokens), "max_tokens": wanted.max_tokens, "temperature": wanted.temperature, "seed": wanted.seed, "top_p": 1.0, "top_k": -1,
            "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logprobs": 0, "return_token_ids": True, "skip_special_tokens": False,
            "request_id": wanted.id,
        })
        choice = _choice(answer, model)
        logprobs = choice.get("logprobs") or {}
        tokens, values = checked(choice.get("token_ids"), logprobs.get("token_logprobs"), at="vLLM's choices[0]")
        return Sampled(tokens, values, finish_of(choice.get("finish_reason"), "vLLM"), _cached(answer))

    async def abort(self, id: str) -> None:
        """Closing the connection is how a request is aborted here: nothing to send."""

    async def load_adapter(self, name: str, directory: str) -> None:
        await self._http.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": directory})

    async def unload_adapter(self, name: str) -> None:
        try:
            await self._http.post("/v1/unload_lora_adapter", {"lora_name": name})
        except ServerRefused as error:
            if error.status != 404 or "Not Found" in error.problem:  # that is the route's absence, and not the adapter's
                raise

    async def pause(self) -> None:
        await self._http.post("/pause", query={"mode": "abort"})

    async def reload(self, directory: str, version: int) -> None:
        await self._http.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": directory}})
        await self._http.post("/reset_prefix_cache")

    async def resume(self) -> None:
        await self._http.post("/resume")

    async def close(self) -> None:
        await self._http.close()


def _choice(answer: Any, model: str) -> dict[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise IntegrityError("not one choice", field="vLLM's choices", value=choices, remedy="is it an OpenAI-compatible server of vLLM?")
    if answer.get("model") != model:
        raise IntegrityError("sampled by another model than was asked for", field="vLLM's model", value=answer.get("model"), remedy=f"expected {model}")
    return choices[0]


def _cached(answer: Any) -> int:
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)
