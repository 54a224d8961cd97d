#!/usr/bin/env bash
# Build the image with whichever builder is there: docker, podman or buildah.
#
#     docker/build.sh [OPTION ...]      options go to the builder, after ours
#
# VARIANT  cpu (default) or cuda          TAG   name of the image, infoxlm:VARIANT by default
# BASE     another base, in a release by digest: python:3.11-slim-bookworm@sha256:…
# BUILDER  one of the three, if several are there and the first is not to be taken
set -euo pipefail
cd "$(dirname "$0")/.."

variant=${VARIANT:-cpu}
[[ $variant == cpu || $variant == cuda ]] || { echo "VARIANT=$variant: take cpu or cuda" >&2; exit 2; }

# The locks have wheels of x86-64 only: elsewhere pip would say so after minutes, and less clearly.
if [[ $(uname -m) != x86_64 && "$*" != *linux/amd64* ]]; then
  echo "$(uname -m): the locks are for x86-64: build there, or with --platform linux/amd64" >&2
  exit 2
fi

builder=${BUILDER:-}
for candidate in docker podman buildah; do
  [[ -z $builder ]] && "$candidate" version >/dev/null 2>&1 && builder=$candidate
done
[[ -n $builder ]] || { echo "no docker, podman or buildah that answers: install one" >&2; exit 2; }

version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
options=(--file Dockerfile --tag "${TAG:-infoxlm:$variant}" --build-arg "VARIANT=$variant"
  --build-arg "VERSION=$version" --build-arg "REVISION=$revision")
[[ -z ${BASE:-} ]] || options+=(--build-arg "BASE=$BASE")
# Of these three only buildah keeps no layers unless told to.
[[ $builder != buildah ]] || options+=(--layers)
exec "$builder" build "${options[@]}" "$@" .
