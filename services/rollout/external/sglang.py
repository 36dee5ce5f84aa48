"""SGLang's server: sampling by token ids over /generate, weights as LoRA adapters or reloaded from files, stamped with their version.

    sampling         POST /generate {rid, input_ids, sampling_params, return_logprob: true}     meta_info.output_token_logprobs = [[logprob, id, text], ...]
    aborting         POST /abort_request {rid}
    adapters         POST /load_lora_adapter, /unload_lora_adapter; a request names one as lora_path       --enable-lora
    files            POST /pause_generation {mode: abort}, /update_weights_from_disk {model_path, weight_version, flush_cache}, /continue_generation

meta_info.weight_version says which weights answered, and is compared. Sources: docs.sglang.io (native APIs; sampling parameters; SGLang for RL systems; LoRA serving).
"""

from __future__ import annotations

from typing import Any

from driftline.messages.errors import IntegrityError
from driftline.services.rollout.external.server import (
    Http,
    Sampled,
    ServerRefused,
    Wanted,
    checked,
    finish_of,
)

__all__ = ["Sglang"]


class Sglang:
    name = "sglang"

    def __init__(self, http: Http) -> None:
        self._http = http

    async def ready(self) -> str:
        info = await self._http.get("/get_model_info")
        return str(info.get("model_path", "")) if isinstance(info, dict) else ""

    async def sample(self, wanted: Wanted) -> Sampled:
        body: dict[str, Any] = {
            "rid": wanted.id, "input_ids": list(wanted.tokens), "return_logprob": True, "logprob_start_len": -1, "stream": False,
            "sampling_params": {"max_new_tokens": wanted.max_tokens, "temperature": wanted.temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
                                "presence_penalty": 0.0, "frequency_penalty": 0.0, "skip_special_tokens": False, "no_stop_trim": True,
                                "sampling_seed": wanted.seed & 0x7FFFFFFF},
        }
        if wanted.adapter:
            body["lora_path"] = wanted.adapter
        answer = await self._http.post("/generate", body)
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        if not isinstance(meta, dict):
            raise IntegrityError("has no meta_info", field="SGLang's answer", value=answer, remedy="is it SGLang's native server?")
        rows = meta.get("output_token_logprobs") or []
        if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) >= 2 for row in rows):
            raise IntegrityError("not rows of log-probability and token", field="SGLang's output_token_logprobs", value=rows, remedy="is it SGLang's native server?")
        tokens, logprobs = checked([row[1] for row in rows], [row[0] for row in rows], at="SGLang's output_token_logprobs")
        version = meta.get("weight_version")
        return Sampled(tokens, logprobs, finish_of(_ended(meta.get("finish_reason")), "SGLang"), int(meta.get("cached_tokens") or 0), None if version is None else str(version))

    async def abort(self, id: str) -> None:
        await self._http.post("/abort_request", {"rid": id, "abort_all": False})

    async def load_adapter(self, name: str, directory: str) -> None:
        self._done(await self._http.post("/load_lora_adapter", {"lora_name": name, "lora_path": directory}), "load_lora_adapter", name)

    async def unload_adapter(self, name: str) -> None:
        self._done(await self._http.post("/unload_lora_adapter", {"lora_name": name}), "unload_lora_adapter", name)

    async def pause(self) -> None:
        await self._http.post("/pause_generation", {"mode": "abort"})

    async def reload(self, directory: str, version: int) -> None:
        answer = await self._http.post("/update_weights_from_disk", {"model_path": directory, "weight_version": str(version), "flush_cache": True})
        self._done(answer, "update_weights_from_disk", directory)

    async def resume(self) -> None:
        await self._http.post("/continue_generation", {})

    async def close(self) -> None:
        await self._http.close()

    @staticmethod
    def _done(answer: Any, what: str, value: object) -> None:
        """Failures come as a 200 that says so."""
        if not isinstance(answer, dict) or answer.get("success") is not True:
            said = answer.get("message") or answer.get("error_message") if isinstance(answer, dict) else answer
            raise ServerRefused(f"was not done: {said}", field=f"SGLang's {what}", value=value, remedy="see the server's log")


def _ended(reason: Any) -> Any:
    """The kind of a reason; what is not in SGLang's form stays what it is, in a form that is no kind."""
    return reason.get("type") if isinstance(reason, dict) else [reason]
