#!/usr/bin/env bash
# Print the manifests of an overlay with the image of a release in them.
#
#     k8s/render.sh OVERLAY IMAGE@sha256:DIGEST | kubectl apply --server-side --force-conflicts -f -
#
# OVERLAY is a folder of k8s/overlays, or any other folder with a kustomization.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
overlay=${1:?which overlay: small or production} image=${2:?which image: name@sha256:digest}
[[ $image =~ ^[^@]+@sha256:[0-9a-f]{64}$ ]] || { echo "$image: no digest; take what pushing the image printed" >&2; exit 2; }
[[ -d $overlay ]] || overlay=$here/overlays/$overlay
[[ -f $overlay/kustomization.yaml ]] || { echo "$overlay: no such overlay" >&2; exit 2; }

# kustomize wants a folder with relative paths in it.
work=$(mktemp -d "$here/.render-XXXXXX")
trap 'rm -r "$work"' EXIT
cat > "$work/kustomization.yaml" <<END
resources: [$(realpath --relative-to="$work" "$overlay")]
images: [{name: registry.example/infoxlm, newName: ${image%@*}, digest: ${image#*@}}]
END
"${KUBECTL:-kubectl}" kustomize "$work" > "$work/rendered"
if grep -n 'image: .*@sha256:0\{64\}' "$work/rendered" >&2; then
  echo "these are placeholders: set their digests under images: in $overlay/kustomization.yaml" >&2
  exit 2
fi
cat "$work/rendered"
