#!/usr/bin/env bash
# Builds the image of compose/Dockerfile on any machine. Where the image registry answers this is a plain build. Where none
# does, the base is made here (make_base_image.sh) and pip in the build is given this machine's own pip settings: as build
# secrets, so that neither the image nor the repository holds them, with its local wheel folders served on 127.0.0.1.
#
#   tests/compose/build_image.sh [IMAGE]       IMAGE defaults to driftline:0.1.0; BASE_IMAGE chooses the base
set -euo pipefail
cd "$(dirname "$0")/../.."

image=${1:-driftline:0.1.0}
docker=${DOCKER:-docker}
export DOCKER_BUILDKIT=1

default_base=$(sed -n 's/^ARG BASE_IMAGE=//p' compose/Dockerfile)
base=${BASE_IMAGE:-$default_base}
if "$docker" image inspect "$base" >/dev/null 2>&1 || timeout 120 "$docker" pull -q "$base" >/dev/null 2>&1; then
  "$docker" build -f compose/Dockerfile -t "$image" --build-arg BASE_IMAGE="$base" .
  exit 0
fi

echo "cannot pull $base: making a base here"
base=driftline-base:bookworm
tests/compose/make_base_image.sh "$base"

secrets=$(mktemp -d)
server=
cleanup() { rm -rf "$secrets"; [ -z "$server" ] || kill "$server" 2>/dev/null || true; }
trap cleanup EXIT

python=${PYTHON:-python3}
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
# The settings of this machine's pip that still mean something inside a build; local wheel folders become one address.
"$python" - "$secrets" "$port" <<'PY'
import pathlib, subprocess, sys, urllib.parse

secrets, port = pathlib.Path(sys.argv[1]), sys.argv[2]
listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
lines, folders = ["[global]"], secrets / "wheels"
folders.mkdir()
for line in listed.splitlines():
    key, _, value = line.partition("=")
    name, value = key.rsplit(".", 1)[-1], value.strip("'\"")
    if name in ("index-url", "trusted-host", "proxy", "timeout", "default-timeout", "retries"):
        lines.append(f"{name} = {value}")
    elif name == "cert":
        (secrets / "ca.crt").write_bytes(pathlib.Path(value).read_bytes())
        lines.append("cert = /run/secrets/pip_ca")
    elif name == "find-links":
        for folder in value.split():
            path = pathlib.Path(urllib.parse.urlparse(folder).path)
            for wheel in path.glob("*.whl") if path.is_dir() else ():
                if not (folders / wheel.name).exists():
                    (folders / wheel.name).symlink_to(wheel)
lines = list(dict.fromkeys(lines))
if any(folders.iterdir()):
    lines.append(f"find-links = http://127.0.0.1:{port}/")
(secrets / "pip.conf").write_text("\n".join(lines) + "\n")
PY
"$python" -m http.server "$port" --bind 127.0.0.1 --directory "$secrets/wheels" >/dev/null 2>&1 &
server=$!

ca=()
[ ! -f "$secrets/ca.crt" ] || ca=(--secret "id=pip_ca,src=$secrets/ca.crt")
"$docker" build -f compose/Dockerfile -t "$image" --network host \
  --build-arg BASE_IMAGE="$base" --build-arg TORCH_INDEX= \
  --secret "id=pip_conf,src=$secrets/pip.conf" "${ca[@]}" .
