"""vLLM's and SGLang's servers as far as a rollout engine asks them, on a port of this machine: what their documentation and routers say they do.

They really read the files that are handed over, and sample from a distribution that is a function of those bytes: so a token's log-probability says which weights drew it.
Rows cached under the old weights are used until the cache is reset, as theirs are.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from aiohttp import web

from driftline.models.tokenizer import ByteTokenizer

VOCAB = 264
END = ByteTokenizer.eos


class Drawn(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    reason: str


def digest_of(directory: Path) -> str:
    """Of the weights in a directory: what the fakes' distribution is a function of."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(directory.glob("*.safetensors")))).hexdigest()


def distribution(digest: str, before: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities [VOCAB] of the token after `before`; the end is likely behind every 31st."""
    seed = int.from_bytes(hashlib.sha256(f"{digest}/{before[-1]}/{len(before)}".encode()).digest()[:8], "little")
    logits = np.random.default_rng(seed).normal(size=VOCAB) * 3.0
    logits[END] = 9.0 if len(before) % 32 == 31 else -20.0
    logits = logits / temperature
    return np.asarray(logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max())


@dataclass
class _Running:
    model: str
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class Fake(ABC):
    """`hold_at`: sampled tokens at which every request waits until `release` (from any thread). `raw_logprobs`: of the model and not of the sampling distribution."""

    def __init__(self, base: Path | None = None, *, context: int = 2048, raw_logprobs: bool = False) -> None:
        self.context, self.raw_logprobs = context, raw_logprobs
        self.base = digest_of(base) if base is not None else "born with"
        self.cached = self.base  # whose rows the prefix cache holds
        self.adapters: dict[str, str] = {}
        self.hold_at: int | None = None
        self.away = self.refuse_updates = self.drop_end = self.drop_logprob = False
        self.requests: list[dict[str, Any]] = []
        self.log: list[str] = []
        self.disconnected = 0
        self.running: dict[str, _Running] = {}
        self.paused = False
        self._loop = asyncio.new_event_loop()
        self._released, self._resumed = asyncio.Event(), asyncio.Event()
        self._resumed.set()

    def release(self) -> None:
        self.hold_at = None
        self._loop.call_soon_threadsafe(self._released.set)

    @contextmanager
    def served(self) -> Iterator[str]:
        thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        thread.start()
        runner = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._loop.close()

    async def _start(self) -> web.AppRunner:
        app = web.Application(middlewares=[self._guard])
        app.add_routes(self.routes())
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)  # a connection that closes ends its request, as theirs do
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    @abstractmethod
    def routes(self) -> list[web.RouteDef]:
        """The server's own."""

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.log.append(request.path)
        if self.away:
            return web.json_response({"error": "starting"}, status=503)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def draw(self, name: str, model: str, prompt: list[int], limit: int, temperature: float, seed: int) -> Drawn:
        """Token by token, until it is aborted."""
        await self._resumed.wait()
        running = self.running[name] = _Running(model)
        digest = self.adapters.get(model, self.cached)
        tokens, logprobs, reason = list[int](), list[float](), "length"
        random = np.random.default_rng(seed)
        try:
            while len(tokens) < limit:
                if self.hold_at is not None and len(tokens) >= self.hold_at:
                    waiting = [asyncio.ensure_future(event.wait()) for event in (self._released, running.aborted)]
                    try:
                        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for task in waiting:
                            task.cancel()
                await asyncio.sleep(0)
                if running.aborted.is_set():
                    reason = "abort"
                    break
                logp = distribution(digest, [*prompt, *tokens], temperature)
                token = int(np.searchsorted(np.exp(logp).cumsum(), random.random()).clip(0, VOCAB - 1))
                told = distribution(digest, [*prompt, *tokens]) if self.raw_logprobs else logp
                tokens.append(token)
                logprobs.append(float(told[token]))
                if token == END:
                    reason = "stop"
                    break
        except asyncio.CancelledError:
            self.disconnected += 1
            raise
        finally:
            self.running.pop(name, None)
        if reason == "stop" and self.drop_end:
            del tokens[-1], logprobs[-1]
        return Drawn(tokens, logprobs[:-1] if self.drop_logprob else logprobs, reason)

    def pause(self) -> None:
        self.paused = True
        self._resumed.clear()
        for running in self.running.values():
            running.aborted.set()

    def resume(self) -> None:
        self.paused = False
        self._resumed.set()


class FakeVllm(Fake):
    """`lora`: VLLM_ALLOW_RUNTIME_LORA_UPDATING. `dev`: VLLM_SERVER_DEV_MODE."""

    def __init__(self, *args: Any, lora: bool = True, dev: bool = True, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.lora, self.dev = lora, dev

    def routes(self) -> list[web.RouteDef]:
        found = [web.get("/v1/models", self._models), web.post("/v1/completions", self._completions)]
        if self.lora:
            found += [web.post("/v1/load_lora_adapter", self._load), web.post("/v1/unload_lora_adapter", self._unload)]
        if self.dev:
            found += [web.post("/pause", self._pause), web.post("/resume", self._resume), web.post("/collective_rpc", self._rpc),
                      web.post("/reset_prefix_cache", self._reset)]
        return found

    @staticmethod
    def _error(status: int, message: str, kind: str = "BadRequestError") -> web.Response:
        return web.json_response({"error": {"message": message, "type": kind, "param": None, "code": status}}, status=status)

    async def _models(self, _: web.Request) -> web.Response:
        cards = [{"id": "base-model", "object": "model", "parent": None, "max_model_len": self.context}]
        return web.json_response({"object": "list", "data": cards + [{"id": name, "object": "model", "parent": "base-model"} for name in self.adapters]})

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        model = body["model"]
        if model != "base-model" and model not in self.adapters:
            return self._error(404, f"The model `{model}` does not exist.", "NotFoundError")
        if len(body["prompt"]) + body["max_tokens"] > self.context:
            return self._error(400, f"This model's maximum context length is {self.context} tokens.")
        drawn = await self.draw(body["request_id"], model, body["prompt"], body["max_tokens"], body["temperature"], body["seed"])
        logprobs = {"tokens": ["?"] * len(drawn.tokens), "token_logprobs": drawn.logprobs, "top_logprobs": [], "text_offset": []} if body.get("logprobs") is not None else None
        choice: dict[str, Any] = {"index": 0, "text": "", "logprobs": logprobs, "finish_reason": drawn.reason, "stop_reason": None}
        if body.get("return_token_ids"):
            choice |= {"token_ids": drawn.tokens, "prompt_token_ids": body["prompt"]}
        return web.json_response({"id": f"cmpl-{body['request_id']}", "object": "text_completion", "model": model, "choices": [choice],
                                  "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(drawn.tokens), "prompt_tokens_details": {"cached_tokens": 1}}})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        place = Path(body["lora_path"])
        if body["lora_name"] in self.adapters:
            return self._error(400, f"The lora adapter '{body['lora_name']}' has already been loaded.", "InvalidUserInput")
        if self.refuse_updates or not (place / "adapter_config.json").is_file():
            return self._error(404, f"Loading lora {body['lora_name']} failed: No adapter found for {place}", "NotFoundError")
        self.adapters[body["lora_name"]] = digest_of(place)
        return web.Response(text=f"Success: LoRA adapter '{body['lora_name']}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            return self._error(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _pause(self, request: web.Request) -> web.Response:
        assert request.query["mode"] == "abort"
        self.pause()
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self.resume()
        return web.json_response({"status": "resumed"})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        place = Path(body["kwargs"]["weights_path"])
        if body["method"] != "reload_weights" or self.refuse_updates or not (place / "config.json").is_file():
            return web.json_response({"detail": "Internal Server Error"}, status=500)
        self.base = digest_of(place)
        return web.json_response({"results": [None]})

    async def _reset(self, _: web.Request) -> web.Response:
        self.cached = self.base
        return web.Response()


class FakeSglang(Fake):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.version = "default"

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/get_model_info", self._info), web.post("/generate", self._generate), web.post("/abort_request", self._abort),
                web.post("/load_lora_adapter", self._load), web.post("/unload_lora_adapter", self._unload), web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue), web.post("/update_weights_from_disk", self._update)]

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": "/models/base", "is_generation": True})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        model, settings = body.get("lora_path", ""), body["sampling_params"]
        if model and model not in self.adapters:
            return web.json_response({"error": {"message": f"The following requested LoRA adapters are not loaded: {model}"}}, status=400)
        version = self.version
        drawn = await self.draw(body["rid"], model, body["input_ids"], settings["max_new_tokens"], settings["temperature"], settings["sampling_seed"])
        finish: dict[str, Any] = {"type": drawn.reason}
        finish |= {"stop": {"matched": END}, "length": {"length": len(drawn.tokens)}, "abort": {"message": "Abort in scheduler"}}[drawn.reason]
        rows = [[logprob, token, None] for logprob, token in zip(drawn.logprobs, drawn.tokens, strict=not self.drop_logprob)]
        if self.drop_logprob and rows:
            rows[-1][0] = None
        return web.json_response({"text": "", "output_ids": drawn.tokens, "meta_info": {
            "id": body["rid"], "finish_reason": finish, "prompt_tokens": len(body["input_ids"]), "completion_tokens": len(drawn.tokens), "cached_tokens": 1,
            "weight_version": version, "output_token_logprobs": rows}})

    async def _abort(self, request: web.Request) -> web.Response:
        running = self.running.get((await request.json())["rid"])
        if running is not None:
            running.aborted.set()
        return web.Response()

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        place = Path(body["lora_path"])
        if self.refuse_updates or body["lora_name"] in self.adapters or not (place / "adapter_config.json").is_file():
            return web.json_response({"success": False, "error_message": "Failed to load LoRA adapter", "loaded_adapters": {}}, status=400)
        self.adapters[body["lora_name"]] = digest_of(place)
        return web.json_response({"success": True, "error_message": "", "loaded_adapters": dict.fromkeys(self.adapters, "")})

    async def _unload(self, request: web.Request) -> web.Response:
        found = self.adapters.pop((await request.json())["lora_name"], None)
        return web.json_response({"success": found is not None, "error_message": "" if found else "not loaded", "loaded_adapters": {}})

    async def _pause(self, request: web.Request) -> web.Response:
        assert (await request.json())["mode"] == "abort"
        self.pause()
        return web.json_response({"status": "ok", "message": "Generation paused successfully."})

    async def _continue(self, _: web.Request) -> web.Response:
        self.resume()
        return web.json_response({"status": "ok", "message": "Generation continued successfully."})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        place = Path(body["model_path"])
        if self.refuse_updates or not (place / "config.json").is_file():
            return web.json_response({"success": False, "message": f"Failed to update weights: {place}", "num_paused_requests": 0})
        self.base, self.version = digest_of(place), str(body["weight_version"])
        if body["flush_cache"]:
            self.cached = self.base
        return web.json_response({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})
