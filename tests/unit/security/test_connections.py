"""Connecting to a broker with TLS and users, wrongly: refused within seconds, with the field and the remedy, and no secret said."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path
from typing import Any

import pytest
from security_cases import ACCOUNT, RUN, Guarded, guarded

from driftline.messages.credentials import Credentials, load_credentials
from driftline.messages.errors import BrokerDenied, BrokerUnavailable, DriftlineError
from driftline.messages.nats_bus import NatsBus
from driftline.messages.server import NatsServer
from driftline.services.security.keys import make_keys
from driftline.services.security.permissions import Role

# A refusal must not wait for the deadline; the deadline is far away, so a test that ends has not waited for it.
FAR_S = 100.0


async def refused(url: str, credentials: Credentials | None, kind: type[DriftlineError] = BrokerDenied) -> DriftlineError:
    async with asyncio.timeout(30):
        with pytest.raises(kind) as failure:
            await NatsBus.connect(url, name="stranger", connect_timeout_s=FAR_S, credentials=credentials)
    assert failure.value.field == "broker.url"
    assert failure.value.remedy
    return failure.value


def changed(path: Path, folder: Path, **fields: Any) -> Path:
    """The credentials of `path`, with other fields, somewhere else."""
    document = json.loads(path.read_text()) | fields
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "ca.crt").write_bytes((path.parent / "ca.crt").read_bytes())
    target = folder / "credentials.json"
    target.touch(mode=0o600)
    target.write_text(json.dumps(document))
    return target


async def test_a_wrong_password_is_refused_at_once(broker: Guarded, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    secret = "not-the-password-but-secret-all-the-same"
    file = changed(broker.file(Role.LEARNER), tmp_path / "c", password=secret)
    error = await refused(broker.url, load_credentials(file))
    assert secret not in str(error)
    output = capfd.readouterr()
    assert secret not in output.out + output.err


async def test_another_role_s_name_with_one_s_own_password_is_refused(broker: Guarded, tmp_path: Path) -> None:
    file = changed(broker.file(Role.ROLLOUT), tmp_path / "c", user=f"{ACCOUNT}.{Role.LEARNER}")
    await refused(broker.url, load_credentials(file))


async def test_a_broker_of_another_authority_is_refused_before_the_password_is_sent(broker: Guarded, tmp_path: Path) -> None:
    stranger = make_keys(tmp_path / "keys", RUN).credentials(Role.LEARNER)
    error = await refused(broker.url, load_credentials(stranger))
    assert "certificate" in error.problem


async def test_a_broker_under_a_name_its_certificate_does_not_have_is_refused(broker: Guarded) -> None:
    error = await refused(broker.url.replace("127.0.0.1", "127.1"), load_credentials(broker.file(Role.LEARNER)))
    assert "certificate" in error.problem


async def test_no_credentials_at_all_are_refused(broker: Guarded) -> None:
    await refused(broker.url, None)


async def test_a_client_that_does_not_use_tls_gets_no_answer_and_sends_no_secret(broker: Guarded) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", broker.server.port)
    async with asyncio.timeout(20):
        info = json.loads((await reader.readline()).removeprefix(b"INFO "))
        assert info["tls_required"]
        assert info["auth_required"]
        writer.write(b'CONNECT {"verbose":false,"user":"acme.admin","pass":"guess"}\r\nPING\r\n')
        said = await reader.read()
    writer.close()
    assert b"PONG" not in said


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_tls_before_1_2_is_refused(broker: Guarded) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.load_verify_locations(broker.file(Role.LEARNER).parent / "ca.crt")
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    async with asyncio.timeout(20):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", broker.server.port, ssl=old)


async def test_an_expired_certificate_is_refused_and_said_to_be(tmp_path: Path) -> None:
    async with guarded(tmp_path, days=-1) as expired:
        error = await refused(expired.url, load_credentials(expired.file(Role.LEARNER)))
        assert "expired" in error.problem
        expired.keys.renew_server(30)
        expired.server.reload()
        async with asyncio.timeout(30):
            while True:  # nothing announces that the server has read its configuration
                try:
                    async with expired.bus(Role.LEARNER) as bus:
                        assert await bus.healthy()
                        break
                except BrokerDenied:
                    await asyncio.sleep(0.05)


async def test_credentials_are_not_sent_to_a_broker_without_tls(tmp_path: Path, nats_url: str) -> None:
    keys = make_keys(tmp_path / "keys", RUN)
    received = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A broker's greeting that asks for no TLS, as somebody on the way would send it."""
        writer.write(b'INFO {"server_id":"x","version":"2.15.0","max_payload":1048576,"headers":true,"auth_required":true}\r\n')
        while data := await reader.read(4096):
            received.extend(data)
        writer.close()

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
        url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises((BrokerDenied, BrokerUnavailable)):
            await NatsBus.connect(url, name="stranger", connect_timeout_s=3.0, credentials=load_credentials(keys.credentials(Role.LEARNER)))
    assert received[:1] == b"\x16"  # a handshake
    assert json.loads(keys.credentials(Role.LEARNER).read_text())["password"].encode() not in received
    assert b"CONNECT" not in received
    error = await refused(nats_url, load_credentials(keys.credentials(Role.LEARNER)), BrokerUnavailable)
    assert "TLS" in error.problem


async def until_it_fails(bus: NatsBus) -> None:
    """The server reads its configuration some time after it was told to, and says so to nobody."""
    while True:
        await bus.healthy()
        await asyncio.sleep(0.05)


async def test_a_rotated_password_ends_who_has_the_old_one_and_lets_in_who_has_the_new(tmp_path: Path) -> None:
    async with guarded(tmp_path) as broker:
        old = load_credentials(broker.file(Role.ROLLOUT))
        async with await NatsBus.connect(broker.url, name="rollout", credentials=old) as bus, broker.bus(Role.GRADER) as other:
            assert await bus.healthy()
            broker.keys.rotate(Role.ROLLOUT, ACCOUNT)
            broker.server.reload()
            async with asyncio.timeout(30):
                with pytest.raises(BrokerDenied):
                    await until_it_fails(bus)
            assert await other.healthy()
            await refused(broker.url, old)
            async with broker.bus(Role.ROLLOUT) as again:
                assert await again.healthy()


async def test_the_server_inside_a_run_listens_on_this_machine_only(tmp_path: Path) -> None:
    from driftline.services.supervisor.broker import EmbeddedBroker

    async with EmbeddedBroker(tmp_path) as embedded:
        assert embedded.url.startswith("nats://127.0.0.1:")
        listening = NatsServer(tmp_path).host
        assert listening == "127.0.0.1"
        assert 'host: "127.0.0.1"' in (tmp_path / "nats-server.conf").read_text()
