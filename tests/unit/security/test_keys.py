"""The folder of keys: private, never overwritten by accident, and rotated without touching what others hold."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from driftline.cli import app
from driftline.messages.credentials import Credentials, load_credentials, redacted
from driftline.messages.errors import ConfigError
from driftline.messages.server import server_binary, server_config
from driftline.services.config import load, resolve, to_toml
from driftline.services.security.keys import Existing, Keys, make_keys
from driftline.services.security.permissions import Role

PASSWORD = "hunter2-but-longer"


def password(keys: Keys, role: Role, account: str = "") -> str:
    value: str = json.loads(keys.credentials(role, account).read_text())["password"]
    return value


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_files_and_folders_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        keys = make_keys(tmp_path / "keys", "r")
        keys.rotate(Role.LEARNER)
    finally:
        os.umask(before)
    for path in (keys.folder, *keys.folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_passwords_are_long_different_and_in_their_own_file_only(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", "r")
    passwords = [password(keys, role) for role in Role]
    assert len(set(passwords)) == len(passwords)
    assert all(len(found) >= 43 for found in passwords)  # 32 bytes in base64
    holders = {found: [name for name, data in contents(keys.folder).items() if found.encode() in data] for found in passwords}
    assert sorted(holders.values()) == sorted([f"r/{role}/credentials.json"] for role in Role)


def test_what_exists_is_not_overwritten_unless_asked(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", "r")
    before = contents(keys.folder)
    with pytest.raises(ConfigError, match="--force"):
        make_keys(keys.folder, "r")
    make_keys(keys.folder, "r", existing=Existing(leave=True))
    assert contents(keys.folder) == before
    with pytest.raises(ConfigError, match="for the run r"):
        make_keys(keys.folder, "another", account="r", existing=Existing(leave=True))
    again = make_keys(keys.folder, "r", existing=Existing(replace=True))
    assert password(again, Role.ADMIN).encode() not in before["r/admin/credentials.json"]
    assert set(contents(keys.folder)) == set(before)


def test_a_folder_of_somebody_else_s_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="something is there"):
        make_keys(tmp_path, "r")
    make_keys(tmp_path, "r", existing=Existing(replace=True))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_keys_cut_off_while_they_were_made_are_made_whole(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", "r")
    (keys.folder / "authority" / "authority.json").unlink()  # which is written last
    make_keys(keys.folder, "r", existing=Existing(leave=True))
    load_credentials(Keys.load(keys.folder).credentials(Role.LEARNER))


def test_rotation_changes_one_password_and_one_hash(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", "r")
    before = contents(keys.folder)
    Keys.load(keys.folder).rotate(Role.ROLLOUT)
    changed = {name for name, data in contents(keys.folder).items() if before[name] != data}
    assert changed == {"r/rollout/credentials.json", "server/auth.conf", "authority/authority.json"}
    lines = list(zip(before["server/auth.conf"].splitlines(), contents(keys.folder)["server/auth.conf"].splitlines(), strict=True))
    assert len([1 for old, new in lines if old != new]) == 1


def test_the_server_s_certificate_is_for_the_hosts_asked_for(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", "r", hosts=["broker.example", "10.0.0.7"])
    certificate = x509.load_pem_x509_certificate((keys.folder / "server" / "server.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"broker.example", "localhost"} <= set(names.get_values_for_type(x509.DNSName))
    assert {"10.0.0.7", "127.0.0.1"} <= {str(address) for address in names.get_values_for_type(x509.IPAddress)}
    with pytest.raises(ConfigError, match="--host"):
        make_keys(tmp_path / "more", "r", hosts=["böse.example"])


@pytest.mark.parametrize("name", ["", "a b", "../up", "authority", "server", "x.y", "a" * 65])
def test_names_that_are_no_folder_or_no_account_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        make_keys(tmp_path / "keys", name)


def test_the_server_accepts_what_is_made_for_several_runs(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", "r")
    make_keys(keys.folder, "s", account="t", existing=Existing(add=True))
    config = tmp_path / "nats.conf"
    config.write_text(server_config(port=4222, store_dir=tmp_path / "js", log=tmp_path / "log", include="keys/server/auth.conf"))
    checked = subprocess.run([server_binary(), "-t", "-c", str(config)], capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0, checked.stderr


def test_show_lists_users_and_expiry_and_no_secret(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", "r")
    shown = CliRunner().invoke(app, ["keys", "show", str(keys.folder)])
    assert shown.exit_code == 0
    assert all(f"r.{role}" in shown.output for role in Role)
    assert shown.output.count("valid until 20") == 2
    secrets = [*(password(keys, role) for role in Role), *keys.account().hashes.values(), "BEGIN", "$2a$"]
    assert not [secret for secret in secrets if secret in shown.output]


def test_the_commands_make_and_rotate(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    made = CliRunner().invoke(app, ["keys", "make", "--out", str(folder), "--run", "r", "--days", "7"])
    assert made.exit_code == 0, made.output
    old = password(Keys.load(folder), Role.GRADER)
    assert CliRunner().invoke(app, ["keys", "rotate", str(folder), "grader"]).exit_code == 0
    assert password(Keys.load(folder), Role.GRADER) != old
    certificate = (folder / "server" / "server.crt").read_bytes()
    assert CliRunner().invoke(app, ["keys", "rotate", str(folder), "server"]).exit_code == 0
    assert (folder / "server" / "server.crt").read_bytes() != certificate
    wrong = CliRunner().invoke(app, ["keys", "rotate", str(folder), "king"])
    assert isinstance(wrong.exception, ConfigError)
    assert "learner" in wrong.exception.remedy


def test_credentials_say_no_secret(tmp_path: Path) -> None:
    credentials = Credentials(user="u", password=PASSWORD, token=PASSWORD)
    assert PASSWORD not in f"{credentials!r} {credentials!s} {[credentials]}"
    loaded = load_credentials(make_keys(tmp_path / "keys", "r").credentials(Role.LEARNER))
    assert loaded.password
    assert loaded.password not in repr(loaded)


def test_a_file_others_can_read_is_used_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_keys(tmp_path / "keys", "r").credentials(Role.LEARNER)
    load_credentials(path)
    assert "read by others" not in capsys.readouterr().out
    path.chmod(0o640)
    load_credentials(path)
    assert "read by others" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1, "user": "u"}', f'{{"format": 9, "password": "{PASSWORD}"}}', f'"{PASSWORD}'])
def test_a_damaged_file_is_named_and_not_quoted(tmp_path: Path, content: str) -> None:
    path = tmp_path / "credentials.json"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError) as wrong:
        load_credentials(path)
    assert wrong.value.field == "broker.credentials"
    assert str(path) in str(wrong.value)
    assert PASSWORD not in str(wrong.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"nats://u:{PASSWORD}@host:4222", "nats://***@host:4222"),
        (f"tls://{PASSWORD}@host", "tls://***@host"),
        (f"nats://u:{PASSWORD}@x@host", "nats://***@host"),
        ("nats://host:4222", "nats://host:4222"),
    ],
)
def test_an_address_is_shown_without_its_secret(url: str, shown: str) -> None:
    assert redacted(url) == shown


def test_a_run_file_with_a_password_is_refused_without_quoting_it(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'[broker]\nurl = "nats://u:{PASSWORD}@host:4222"\n')
    for wrong in (lambda: load(file), lambda: resolve({"broker": {"url": f"http://u:{PASSWORD}@host"}})):
        with pytest.raises(ConfigError, match=r"broker\.credentials") as refused:
            wrong()
        assert PASSWORD not in str(refused.value)
    dry = CliRunner().invoke(app, ["run", str(file), "--dry-run"])
    assert PASSWORD not in dry.output + str(dry.exception)


def test_the_stored_run_file_names_the_credentials_and_holds_none(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", "r")
    file = tmp_path / "run.toml"
    file.write_text('[broker]\nurl = "nats://host:4222"\ncredentials = "keys/r"\n')
    config = load(file)
    assert config.broker.credentials == str(tmp_path / "keys" / "r")
    assert not [role for role in Role if password(keys, role) in to_toml(config)]
