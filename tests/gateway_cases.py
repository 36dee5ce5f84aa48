"""A gateway on a port of this machine, as uvicorn serves it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn

from driftline.services.gateway.app import Gateway
from driftline.services.gateway.client import EngineClient


@asynccontextmanager
async def served(client: EngineClient, **settings: object) -> AsyncIterator[str]:
    gateway = Gateway(client, **settings)  # type: ignore[arg-type]
    server = uvicorn.Server(uvicorn.Config(gateway.app, port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        async with asyncio.timeout(10):
            await serving


async def until(condition: object, *, within_s: float = 10.0) -> None:
    assert callable(condition)
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for is in another task's or thread's hands
            await asyncio.sleep(0.005)
