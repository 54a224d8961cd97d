#!/usr/bin/env bash
# Build the image with docker, podman or buildah.
#
#     docker/build.sh [OPTION ...]      the options are passed to the builder
#
# Environment variables:
#
# BASE               base image with its digest: python:3.11-slim-bookworm@sha256:…
# VARIANT            cpu (default) or cuda
# TAG                name of the image; default: infoxlm:VARIANT
# PACKAGES           Debian packages of the cuda variant; default: the list in the Dockerfile
# BUILDER            docker, podman or buildah; default: the first of these that works
# SOURCE_DATE_EPOCH  time of the image and its files; default: time of the commit
set -euo pipefail
cd "$(dirname "$0")/.."

variant=${VARIANT:-cpu}
[[ $variant == cpu || $variant == cuda ]] || { echo "VARIANT=$variant: take cpu or cuda" >&2; exit 2; }

# Check the processor first: pip would find the missing wheels only after minutes, with a less clear message.
machine=$(uname -m)
case "$*" in *linux/amd64*) machine=x86_64 ;; *linux/arm64*) machine=aarch64 ;; esac
case "$machine $variant" in
  x86_64\ *) ;;
  aarch64\ cuda | arm64\ cuda) ;;
  *)
    echo "$machine: there is no lock for VARIANT=$variant: x86-64 has both (--platform linux/amd64), arm64 has cuda" >&2
    exit 2
    ;;
esac

base=${BASE:-}
[[ $base =~ ^[^@]+@sha256:[0-9a-f]{64}$ ]] || {
  echo "BASE=$base: name it by digest, python:3.11-slim-bookworm@sha256:…; docker pull prints it" >&2
  exit 2
}

builder=${BUILDER:-}
for candidate in docker podman buildah; do
  [[ -z $builder ]] && "$candidate" version >/dev/null 2>&1 && builder=$candidate
done
[[ -n $builder ]] || { echo "no docker, podman or buildah that answers: install one" >&2; exit 2; }

version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 315532800)}
# Address of the repository, without the login that the address of a clone may contain.
source=$(git config --get remote.origin.url | sed -n -E 's#^(https?|ssh)://([^/@]*@)?#\1://#p' || true)
options=(--file Dockerfile --tag "${TAG:-infoxlm:$variant}" --build-arg "BASE=$base" --build-arg "VARIANT=$variant"
  --build-arg "VERSION=$version" --build-arg "REVISION=$revision"
  --label "org.opencontainers.image.created=$(date -u -d "@$epoch" +%FT%TZ)"
  --label "org.opencontainers.image.base.name=${base%@*}" --label "org.opencontainers.image.base.digest=${base#*@}")
[[ -z $source ]] || options+=(--label "org.opencontainers.image.source=$source")
[[ -z ${PACKAGES:-} ]] || options+=(--build-arg "PACKAGES=$PACKAGES")
# BuildKit reads the time from a build argument. podman and buildah set it on the image and on every file with --timestamp,
# and refuse this option if the variable is set, too.
unset SOURCE_DATE_EPOCH
if [[ $builder == docker ]]; then options+=(--build-arg "SOURCE_DATE_EPOCH=$epoch"); else options+=(--timestamp "$epoch"); fi
# buildah is the only one that does not cache layers by default.
[[ $builder != buildah ]] || options+=(--layers)
exec "$builder" build "${options[@]}" "$@" .
