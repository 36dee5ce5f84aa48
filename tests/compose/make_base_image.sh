#!/usr/bin/env bash
# Makes a base image for compose/Dockerfile where no image registry can be reached: a minimal Debian with Python, from the
# mirror this machine's apt uses. Safe to run again: an image that exists is kept (--force replaces it).
#
#   tests/compose/make_base_image.sh [--force] [IMAGE]      IMAGE defaults to driftline-base:bookworm
#
# Needs root, debootstrap and a Docker engine.
set -euo pipefail

force=no
if [ "${1:-}" = --force ]; then force=yes; shift; fi
image=${1:-driftline-base:bookworm}
suite=${SUITE:-bookworm}
docker=${DOCKER:-docker}

if [ "$force" = no ] && "$docker" image inspect "$image" >/dev/null 2>&1; then
  echo "$image exists"
  exit 0
fi

command -v debootstrap >/dev/null || { echo "debootstrap is missing: apt-get install debootstrap" >&2; exit 2; }
[ "$(id -u)" = 0 ] || { echo "debootstrap needs root" >&2; exit 2; }

# The first archive in apt's configuration that carries the suite's main component.
mirror=${MIRROR:-$(apt-get indextargets --format '$(SITE) $(RELEASE) $(COMPONENT)' "Created-By: Packages" |
  awk -v suite="$suite" '$2 == suite && $3 == "main" { print $1; exit }')}
[ -n "$mirror" ] || { echo "apt knows no archive of $suite: set MIRROR" >&2; exit 2; }

root=$(mktemp -d)
trap 'rm -rf --one-file-system "$root"' EXIT

# gcc and the headers: one of the requirements has no wheel, and the image's build then needs no archive of its own.
debootstrap --variant=minbase \
  --include=ca-certificates,python3,python3-venv,python3-pip,python3-dev,gcc,libc6-dev \
  "$suite" "$root" "$mirror" >"$root.log" 2>&1 || { tail -20 "$root.log" >&2; exit 1; }
rm -f "$root.log"
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/usr/share/doc "$root"/usr/share/man

tar -C "$root" --one-file-system --exclude=./proc/* --exclude=./sys/* --exclude=./dev/* -c . |
  "$docker" import --change 'CMD ["bash"]' - "$image" >/dev/null
echo "$image made from $suite"
