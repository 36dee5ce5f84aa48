#!/usr/bin/env bash
# Brings the compose stack up for real, with two rollout containers, kills the process in one of them in the middle of the run,
# and checks that the run completes by itself. The last line is PASS, or FAIL and why. Not part of `make test`: it needs a
# Docker engine with Compose, builds an image of 1.5 GB, and takes a few minutes.
#
#   tests/compose/run.sh              KEEP=1 leaves the stack up; IMAGE=name uses an image that exists instead of building
set -uo pipefail
cd "$(dirname "$0")/../.."
here=tests/compose

docker=${DOCKER:-docker}
export COMPOSE_PROJECT_NAME=driftline-test DRIFTLINE_FILES=../examples DRIFTLINE_RUN=compose.toml NATS_PORT=0
export DRIFTLINE_IMAGE=${IMAGE:-driftline:test}
steps=$(sed -n 's/^steps = //p' examples/compose.toml)
run=$(sed -n 's/^name = "\(.*\)"/\1/p' examples/compose.toml)
services=(dispatcher grader learner evaluator policy-store rollout)
started=no
scratch=$(mktemp -d)
trap teardown EXIT

compose() { "${compose_command[@]}" -f compose/compose.yaml "$@"; }
teardown() {
  rm -rf "$scratch"
  [ "$started" = yes ] || return 0
  if [ -n "${KEEP:-}" ]; then echo "left up: project $COMPOSE_PROJECT_NAME"; else compose down -v --timeout 40 >/dev/null 2>&1; fi
}
fail() {
  if [ "$started" = yes ]; then compose ps -a >&2; compose logs --no-color --tail 15 >&2; fi
  echo "FAIL: $*"
  exit 1
}
# Waits, within a deadline, for a line of a container's log. The log is followed: nothing is polled.
await_log() { # seconds container pattern since
  timeout "$1" bash -c '"$0" logs -f --since "$3" "$1" 2>&1 | grep -q -m1 "$2"' "$docker" "$2" "$3" "$4"
}
inspect() { "$docker" inspect --format "$2" "$1"; }
cli() { compose run --rm --no-deps -T observer "$@"; }

"$docker" info >/dev/null 2>&1 || fail "no Docker engine answers (start one: dockerd &)"
if "$docker" compose version >/dev/null 2>&1; then compose_command=("$docker" compose)
elif command -v docker-compose >/dev/null; then compose_command=(docker-compose)
else fail "neither 'docker compose' nor docker-compose is installed"; fi
[ -n "${IMAGE:-}" ] || "$here/build_image.sh" "$DRIFTLINE_IMAGE" || fail "the image was not built"

started=yes
compose down -v >/dev/null 2>&1
compose up -d --no-build --scale rollout=2 || fail "the stack did not come up"
learner=$(compose ps -q learner)
mapfile -t rollouts < <(compose ps -q rollout)
[ "${#rollouts[@]}" = 2 ] || fail "${#rollouts[@]} rollout containers instead of 2"

await_log 240 "$learner" '"version": 3,.*version published' 0 || fail "no third version within 240 s"
victim=${rollouts[0]}
# SIGKILL of the service itself, as memory pressure would do it. (`docker kill` counts as a wish and is not restarted.)
killed_at=$(date -u +%Y-%m-%dT%H:%M:%S.%NZ)
"$docker" exec "$victim" sh -c 'kill -9 $(cat /proc/1/task/1/children)' || fail "the rollout process could not be killed"
echo "killed the process of one rollout container after version 3"

for service in "${services[@]}"; do
  for container in $(compose ps -q "$service"); do
    [ "$(inspect "$container" '{{.State.Health.Status}}')" != unhealthy ] || fail "$service is unhealthy in mid-run"
  done
done
compose exec -T learner healthy http://127.0.0.1:9403/healthz || fail "the learner's health page does not answer 200"
for page in dispatcher:9401 grader:9402 learner:9403 evaluator:9404 policy-store:9405; do
  compose exec -T "${page%:*}" healthy "http://127.0.0.1:${page#*:}/metrics" || fail "${page%:*} has no metrics page"
done >"$scratch/metrics"
"$docker" exec "${rollouts[1]}" healthy http://127.0.0.1:9410/metrics >>"$scratch/metrics" || fail "rollout has no metrics page"
missing=$(grep -o 'driftline_[a-z0-9_]*' compose/grafana/dashboards/run.json | sort -u |
  while read -r name; do grep -q "^$name{" "$scratch/metrics" || echo "$name"; done)
[ -z "$missing" ] || fail "the dashboard shows what no service reports: $missing"

# Credentials: its own and nobody else's.
"$docker" exec "${rollouts[1]}" cat /var/lib/driftline/credentials/credentials.json | grep -q '"role": "rollout"' || fail "rollout has not its own credentials"
others=$("$docker" exec "${rollouts[1]}" find /var/lib/driftline/keys -type f)
[ -z "$others" ] || fail "a rollout container sees $others"

await_log 120 "$victim" 'engine ready\|run finished' "$killed_at" || fail "the killed rollout did not come back"
[ "$(inspect "$victim" '{{.RestartCount}}')" = 1 ] || fail "the killed rollout restarted $(inspect "$victim" '{{.RestartCount}}') times"

for service in "${services[@]}"; do
  for container in $(compose ps -a -q "$service" 2>/dev/null || compose ps -q "$service"); do
    code=$(timeout 300 "$docker" wait "$container") || fail "$service did not end within 300 s"
    [ "$code" = 0 ] || fail "$service exited with $code"
    restarts=$(inspect "$container" '{{.RestartCount}}')
    [ "$container" = "$victim" ] || [ "$restarts" = 0 ] || fail "$service restarted $restarts times"
  done
done

! compose logs --no-color 2>/dev/null | grep '"broker denied"' || fail "a role lacks a permission"

head=$(cli policy ls "$run" --limit 1 --json) || fail "the versions cannot be listed"
echo "$head"
grep -q "\"head\": $steps," <<<"$head" || fail "the head is not version $steps: $head"
cli policy verify "$run" "$steps" || fail "version $steps does not verify"
status=$(cli status "$run") || fail "no status"
echo "$status"
grep -q 'dead letters  0' <<<"$status" || fail "something was dead-lettered"
# The learner's state and the mirrored policy are on the volume.
"$docker" run --rm -v "${COMPOSE_PROJECT_NAME}_runs:/runs:ro" "$DRIFTLINE_IMAGE" \
  find "/runs/$run" -type f -printf '%P %s\n' | sort | tee "$scratch/files"
grep -q "$(printf 'checkpoint-%08d-[0-9a-f]*.safetensors' "$steps")" "$scratch/files" || fail "no optimizer state of version $steps on the volume"
[ "$(inspect "$(compose ps -q nats)" '{{.State.Status}}')" = running ] || fail "the broker did not stay up"
echo "PASS: $steps versions with two rollout containers, one killed and restarted; every service exited 0"
