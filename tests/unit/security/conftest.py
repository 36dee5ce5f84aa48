from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from security_cases import Guarded, guarded


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Shared: no test of a denial may change what is there."""
    context = guarded(tmp_path_factory.mktemp("guarded"))
    with ThreadPoolExecutor(1) as thread, asyncio.Runner() as runner:  # a session fixture may be asked for inside a running loop
        yield thread.submit(runner.run, context.__aenter__()).result()
        thread.submit(runner.run, context.__aexit__(None, None, None)).result()
