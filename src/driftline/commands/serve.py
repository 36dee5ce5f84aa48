"""`driftline serve`: a checkpoint behind vLLM's token route and OpenAI's completions, for verifiers, prime-rl environments and ordinary clients.

Exit codes: 0 stopped by a signal; 1 the engine's machine failed; 2 used wrongly, or not a checkpoint.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from driftline.messages.errors import ConfigError

if TYPE_CHECKING:
    from driftline.services.rollout.local import LocalEngine

__all__ = ["register"]

KEY = "DRIFTLINE_API_KEY"


class Mode(StrEnum):
    FAST = "fast"
    DETERMINISTIC = "deterministic"


class Drafts(StrEnum):
    OFF = "off"
    NGRAM = "ngram"
    DRAFTER = "drafter"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("serve")(serve)


def serve(
    place: Annotated[str, typer.Argument(metavar="DIR", help='A checkpoint directory, a .gguf file, "base" or "package:NAME".')],
    host: Annotated[str, typer.Option("--host", help="Whom it listens to: 0.0.0.0 is everybody.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8000,
    name: Annotated[str, typer.Option("--name", help="What clients call the model. Default: the last part of DIR.", show_default=False)] = "",
    adapter: Annotated[list[str] | None, typer.Option("--adapter", metavar="NAME=DIR", help="A PEFT adapter as a model of its own; may be repeated.")] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option("--dtype", help="auto, bfloat16 or float32.")] = "auto",
    numerics: Annotated[Mode, typer.Option("--numerics", help="deterministic: the same bits whatever else is sampled.")] = Mode.FAST,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Of a CPU.")] = 1,
    context: Annotated[int, typer.Option("--context", min=0, help="Longest sequence. 0: the model's.")] = 0,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Rows decoded together.")] = 64,
    prefill_tokens: Annotated[int, typer.Option("--prefill-tokens", min=64, help="Prompt tokens beside a step of decoding.")] = 2048,
    cache_mb: Annotated[int, typer.Option("--cache-mb", min=0, help="Memory for rows and states. 0: by what is free.")] = 0,
    host_cache_mb: Annotated[int, typer.Option("--host-cache-mb", min=0, help="Memory behind that, of a GPU's host.")] = 0,
    prefix_cache: Annotated[bool, typer.Option("--prefix-cache/--no-prefix-cache", help="Compute no prefix twice.")] = True,
    queue_mb: Annotated[int, typer.Option("--queue-mb", min=1, help="Requests that wait, at most; more are told to come again.")] = 256,
    cuda_graphs: Annotated[bool, typer.Option("--cuda-graphs/--no-cuda-graphs", help="Replay a step of decoding.")] = True,
    speculation: Annotated[Drafts, typer.Option("--speculation", help="Who drafts tokens; the completions are the same.")] = Drafts.OFF,
    drafter: Annotated[str, typer.Option("--drafter", metavar="DIR", help="Of `driftline drafter train`.", show_default=False)] = "",
    draft_tokens: Annotated[int, typer.Option("--draft-tokens", min=1, max=15, help="At a time.")] = 3,
    api_key: Annotated[str, typer.Option("--api-key", envvar=KEY, help="Who asks must send it. Empty: everybody is served.", show_default=False)] = "",
) -> None:
    """Serve a model: POST /inference/v1/generate, /v1/completions, /v1/chat/completions; GET /v1/models, /health, /metrics."""
    from driftline.kernels.mode import Numerics
    from driftline.services.rollout.serving import Served, open_local
    from driftline.services.rollout_config import Speculation
    from driftline.services.runtime import configure_logging

    if (speculation is Drafts.DRAFTER) != bool(drafter):
        raise ConfigError("a trained drafter and its directory go together", field="--drafter", value=drafter, remedy="--speculation drafter --drafter DIR")
    configure_logging("serve")
    local = open_local(Served(
        place, name, _adapters(adapter or ()), device, dtype, Numerics(numerics.value), threads, context, max_batch, prefill_tokens, cache_mb, host_cache_mb, prefix_cache,
        queue_mb, cuda_graphs, Speculation(speculation.value), drafter, draft_tokens,
    ))
    _listen(local, host, port, api_key)
    if local.failure:
        typer.echo(f"error: {local.failure}", err=True)
        raise typer.Exit(1)


def _adapters(given: list[str] | tuple[str, ...]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for each in given:
        name, equals, place = each.partition("=")
        if not equals or not name or not place or name in found:
            raise ConfigError("not NAME=DIR, each name once", field="--adapter", value=each, remedy="e.g. --adapter tuned=runs/x/adapter")
        found[name] = Path(place)
    return found


def _listen(local: LocalEngine, host: str, port: int, api_key: str) -> None:
    """Until a signal; a second one leaves at once."""
    import signal
    import socket

    import uvicorn

    from driftline.services.gateway.app import Gateway

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen: {error.strerror}", field="--host, --port", value=f"{host}:{port}", remedy="choose a free port of this machine, or 0") from None
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # uvicorn raises what stopped it once more: it has been heeded by then
    local.start()
    try:
        typer.echo(f"serving {', '.join([local.card.name, *local.card.adapters])} on http://{host}:{listener.getsockname()[1]}", err=True)
        server = uvicorn.Server(uvicorn.Config(Gateway(local, api_key=api_key).app, log_level="warning", lifespan="off", timeout_graceful_shutdown=5))
        server.run(sockets=[listener])
    finally:
        local.close()
        listener.close()
