"""The compose stack as files: what can be known without an engine. `tests/compose/run.sh` brings it up for real."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer.main
import yaml
from packaging.requirements import Requirement

from driftline.cli import app
from driftline.messages.credentials import CREDENTIALS_FILE
from driftline.messages.server import MAX_PAYLOAD, MAX_PENDING, server_binary, server_config
from driftline.services.config import Config, load
from driftline.services.security.keys import make_keys
from driftline.services.security.permissions import Role
from driftline.services.telemetry import http_port
from driftline.services.wiring import SERVICES

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose"
STACK: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
ALL: dict[str, Any] = STACK["services"]
OURS = sorted(SERVICES)
ONCE = ["keys", "provision", "observer"]
LASTING = sorted(set(ALL) - set(ONCE))
KEYS = "/var/lib/driftline/keys"
CREDENTIALS = "/var/lib/driftline/credentials"
DEFAULT = re.compile(r"\$\{(\w+):?-([^}]*)\}")


def expanded(text: str) -> str:
    """Compose's own substitution, with nothing set."""
    return DEFAULT.sub(lambda match: match[2], text).replace("$$", "$")


def arguments(service: str) -> list[str]:
    """What follows `driftline` in a service's command, also where a shell starts it."""
    command = [expanded(word) for word in ALL[service]["command"]]
    words = command[2].replace('"', "").split()[1:] if command[:2] == ["sh", "-c"] else command
    assert words[0] == "driftline", words
    return words[1:]


def parsed(service: str) -> dict[str, Any]:
    """The service's command as the command line reads it; an option it does not know raises."""
    name, *options = arguments(service)
    commands: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
    parameters: dict[str, Any] = commands[name].make_context(name, options).params
    return parameters


def parsed_keys() -> dict[str, Any]:
    """The options of the service that makes the keys, as the command line reads them."""
    group, name, *options = arguments("keys")
    commands: dict[str, Any] = vars(vars(typer.main.get_command(app))["commands"][group])["commands"]
    parameters: dict[str, Any] = commands[name].make_context(name, options).params
    return parameters


def configured() -> Config:
    return load(ROOT / "examples" / "compose.toml", ALL["learner"]["environment"]["DRIFTLINE_SET"].split())


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def dockerfile_defaults() -> dict[str, str]:
    return dict(re.findall(r"^ARG (\w+)=(\S+)$", (COMPOSE / "Dockerfile").read_text(), re.MULTILINE))


def env_file() -> dict[str, str]:
    lines = (COMPOSE / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_every_service_of_driftline_is_in_the_stack() -> None:
    assert set(ALL) == {*OURS, *ONCE, "nats", "prometheus", "grafana"}


@pytest.mark.parametrize("service", LASTING)
def test_every_service_has_a_health_check_a_restart_policy_and_time_to_stop(service: str) -> None:
    body = ALL[service]
    assert body["healthcheck"]["test"][0] == "CMD"
    assert {"interval", "timeout", "retries", "start_period"} <= set(body["healthcheck"])
    assert body["restart"] == ("on-failure" if service in OURS else "unless-stopped")
    assert body["stop_grace_period"].endswith("s")


@pytest.mark.parametrize("service", OURS)
def test_commands_are_what_the_command_line_knows(service: str) -> None:
    assert arguments(service)[0] == service
    assert parsed(service)["config"] == Path("/etc/driftline/compose.toml")


@pytest.mark.parametrize("service", OURS)
def test_settings_reach_every_service_through_the_environment(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = ALL[service]["environment"]
    monkeypatch.setenv("DRIFTLINE_SET", environment["DRIFTLINE_SET"])
    config = load(ROOT / "examples" / "compose.toml", parsed(service)["set_"])
    assert config.broker.url == environment["DRIFTLINE_BROKER_URL"] == "nats://nats:4222"
    assert config.run.dir == "/var/lib/driftline/runs"
    assert config.telemetry.http_host == "0.0.0.0"


@pytest.mark.parametrize("service", OURS)
def test_health_checks_and_prometheus_ask_the_port_the_service_listens_on(service: str) -> None:
    port = http_port(configured().telemetry.http_port, service)
    assert ALL[service]["healthcheck"]["test"] == ["CMD", "healthy", f"http://127.0.0.1:{port}/healthz"]
    (scrape,) = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())["scrape_configs"]
    ports = {name: target["port"] for target in scrape["dns_sd_configs"] for name in target["names"]}
    assert ports[service] == port


@pytest.mark.parametrize("service", OURS)
def test_a_service_may_drain_before_it_is_killed(service: str) -> None:
    assert seconds(ALL[service]["stop_grace_period"]) > 2 * configured().telemetry.drain_s


@pytest.mark.parametrize("service", OURS)
def test_nothing_starts_before_the_broker_answers(service: str) -> None:
    """Nor before its streams are there, the broker not before its users are, and the build is the first of all's."""
    assert ALL[service]["depends_on"] == {
        "nats": {"condition": "service_healthy"}, "provision": {"condition": "service_completed_successfully"},
    }
    assert ALL["nats"]["depends_on"] == {"keys": {"condition": "service_completed_successfully"}}
    assert ALL["provision"]["depends_on"] == {"nats": {"condition": "service_healthy"}}
    assert [name for name, body in ALL.items() if "build" in body] == ["keys"]


def test_rollout_can_be_scaled() -> None:
    assert not {"container_name", "ports", "hostname"} & set(ALL["rollout"])
    assert "--instance c-$HOSTNAME" in " ".join(arguments("rollout"))
    assert not any("container_name" in body for body in ALL.values())


def test_ports_are_published_on_this_machine_only() -> None:
    published = [port for body in ALL.values() for port in body.get("ports", ())]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_images_are_pinned_and_the_defaults_agree() -> None:
    images = {expanded(body["image"]) for body in ALL.values()}
    assert all(re.search(r":v?\d+\.\d+\.\d+$", image) for image in images), images
    assert {expanded(ALL[service]["image"]) for service in (*OURS, "nats")} == {env_file()["DRIFTLINE_IMAGE"]}
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert env_file()["DRIFTLINE_IMAGE"] == f"driftline:{version}"
    for name, value in ALL["keys"]["build"]["args"].items():
        assert expanded(value) == dockerfile_defaults()[name] == env_file()[name]


def test_every_default_is_in_the_env_file() -> None:
    used = dict(DEFAULT.findall((COMPOSE / "compose.yaml").read_text()))
    assert {name: value for name, value in env_file().items() if name != "COMPOSE_PROJECT_NAME"} == used


def test_the_image_starts_from_the_base_it_is_given() -> None:
    text = (COMPOSE / "Dockerfile").read_text()
    assert dockerfile_defaults()["BASE_IMAGE"] == "python:3.12-slim"
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE_IMAGE}"}
    assert "latest" not in text
    assert re.search(r"^USER driftline$", text, re.MULTILINE)


def test_volumes_exist_and_hold_the_state() -> None:
    mounted = {service: [expanded(mount).split(":") for mount in body.get("volumes", ())] for service, body in ALL.items()}
    named = {source for of_service in mounted.values() for source, *_ in of_service if not source.startswith(".")}
    assert named == set(STACK["volumes"])
    for source in {source for of_service in mounted.values() for source, *_ in of_service if source.startswith(".")}:
        assert (COMPOSE / source).exists(), source
    assert ["nats", "/var/lib/driftline/nats"] in mounted["nats"]
    assert ["runs", configured().run.dir] in mounted["learner"]
    assert ["runs", configured().run.dir] in mounted["policy-store"]


def test_the_broker_has_the_limits_of_the_embedded_one() -> None:
    def settings(text: str) -> dict[str, str]:
        return {key: value.strip('"') for key, value in re.findall(r"^\s*(\w+): (.+)$", text, re.MULTILINE)}

    ours = settings((COMPOSE / "nats.conf").read_text())
    embedded = settings(server_config(port=4222, store_dir=Path("/var/lib/driftline/nats/jetstream"), log=Path("x")))
    assert ours["http"].startswith("127.0.0.1:")
    for key in ("port", "max_payload", "max_pending", "ping_interval", "store_dir", "max_file_store", "sync_interval"):
        assert ours[key] == embedded[key], key
    assert (int(ours["max_payload"]), int(ours["max_pending"])) == (MAX_PAYLOAD, MAX_PENDING)


def test_the_server_accepts_its_configuration_with_the_keys_of_the_stack(tmp_path: Path) -> None:
    make_keys(tmp_path / KEYS.removeprefix("/"), "compose", account="stack", hosts=["nats"])
    config = tmp_path / "etc" / "nats.conf"
    config.parent.mkdir()
    shutil.copy(COMPOSE / "nats.conf", config)
    checked = subprocess.run([server_binary(), "-t", "-c", str(config)], capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0, checked.stderr


def mounts(service: str) -> dict[str, list[str]]:
    """Target -> source and options, of a service's volumes."""
    parts = [expanded(mount).split(":") for mount in ALL[service].get("volumes", ())]
    return {target: [source, *options] for source, target, *options in parts}


def test_keys_are_made_for_the_name_the_services_use_and_only_once() -> None:
    made = parsed_keys()
    assert made["out"] == Path(KEYS)
    assert made["config"] == Path("/etc/driftline/compose.toml")
    assert made["host"] == [urlsplit(ALL["learner"]["environment"]["DRIFTLINE_BROKER_URL"]).hostname]
    assert made["if_absent"]
    assert ALL["keys"]["restart"] == "no"


def test_no_container_sees_credentials_that_are_not_its_own() -> None:
    own = {service: {source for source, *_ in mounts(service).values() if source.startswith("keys-")} for service in ALL}
    assert own.pop("keys") == {f"keys-{part}" for part in ("authority", "server", *Role)}
    assert own.pop("nats") == {"keys-server"}
    assert own.pop("provision") == {"keys-admin"}
    assert own.pop("observer") == {"keys-observer"}
    assert own == {service: {f"keys-{service}"} if service in OURS else set() for service in own}
    readers = [service for service in ALL if service != "keys"]
    assert all(options == ["ro"] for service in readers for source, *options in mounts(service).values() if source.startswith("keys-"))


def test_each_role_s_volume_is_where_keys_writes_it_and_where_its_service_reads_it() -> None:
    written = mounts("keys")
    for role in Role:
        assert written[f"{KEYS}/{parsed_keys()['account']}/{role}"] == [f"keys-{role}"]
    assert written[f"{KEYS}/server"] == [mounts("nats")[f"{KEYS}/server"][0]]
    for service in (*OURS, "provision", "observer"):
        assert CREDENTIALS in mounts(service)
        assert ALL[service]["environment"]["DRIFTLINE_CREDENTIALS"] == f"{CREDENTIALS}/{CREDENTIALS_FILE}"
    assert configured().broker.credentials == f"{CREDENTIALS}/{CREDENTIALS_FILE}"
    assert not configured().broker.provision
    prepared = (COMPOSE / "Dockerfile").read_text()
    assert all(f"stack/{role}" in prepared for role in Role)  # a new volume takes its owner from the image


def test_pinned_versions_are_within_the_ranges_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = (COMPOSE / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().replace("_", "-").split("==") for line in lines if not line.startswith("#"))
    torch = Requirement(dockerfile_defaults()["TORCH"])
    pins["torch"] = next(iter(torch.specifier)).version
    for text in project["project"]["dependencies"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[requirement.name.lower()]), text


def test_the_build_context_has_every_package_and_little_else() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    packages = {os.readlink(link).removeprefix("../../") for link in (ROOT / "src" / "driftline").iterdir() if link.is_symlink()}
    copied = {"pyproject.toml", "README.md", "LICENSE", "src", "compose/constraints.txt", "compose/healthy.py"}
    assert kept == packages | copied


def test_the_dashboard_reads_the_provisioned_data_source() -> None:
    dashboard = json.loads((COMPOSE / "grafana/dashboards/run.json").read_text())
    provisioned = yaml.safe_load((COMPOSE / "grafana/provisioning/datasources/prometheus.yml").read_text())
    uids = {source["uid"] for source in provisioned["datasources"]}
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == uids
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert all(re.search(r'driftline_\w+\{run=~"\$run"\}', expression) for expression in expressions)


@pytest.mark.parametrize("script", sorted(path.name for path in Path(__file__).parent.glob("*.sh")))
def test_scripts_parse_and_name_no_host(script: str) -> None:
    path = Path(__file__).parent / script
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=30)
    assert not re.findall(r"https?://(?!127\.0\.0\.1)", path.read_text())


@contextmanager
def answering(status: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"its own words")

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/healthz"
        finally:
            server.shutdown()
            thread.join()


def healthy(url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-IS", str(COMPOSE / "healthy.py"), url], capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_a_health_check_is_the_page_s_status_with_its_words(status: int, code: int) -> None:
    with answering(status) as url:
        probe = healthy(url)
    assert probe.returncode == code
    assert "its own words" in probe.stdout + probe.stderr


def test_a_health_check_fails_where_nothing_listens() -> None:
    with answering(200) as url:
        pass
    assert healthy(url).returncode == 1


def compose_command() -> list[str]:
    if shutil.which("docker") and not subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else []


@pytest.mark.skipif(not compose_command(), reason="Docker Compose is not installed")
@pytest.mark.parametrize("profile", [[], ["--profile", "monitoring"]])
def test_compose_accepts_the_file(profile: list[str]) -> None:
    command = [*compose_command(), "-f", str(COMPOSE / "compose.yaml"), *profile, "config", "-q"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
    assert "warn" not in checked.stderr.lower()
