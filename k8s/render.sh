#!/usr/bin/env bash
# Print the manifests of an overlay, with the digest of the image filled in.
#
#     k8s/render.sh OVERLAY IMAGE@sha256:DIGEST [WITH ...] | kubectl apply --server-side --force-conflicts -f -
#
# OVERLAY   a folder of k8s/overlays, or the path of any folder with a kustomization.yaml
# WITH      a component of k8s/components, such as downloads; or the digest of an image that we do not build, such as
#           postgres@sha256:…; or its digest and its mirror, such as postgres=registry.example/postgres@sha256:…
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
overlay=${1:?which overlay: small, single-user or production} image=${2:?which image: name@sha256:digest}
by_digest='^[^@]+@sha256:[0-9a-f]{64}$'
[[ $image =~ $by_digest ]] || { echo "$image: no digest; take what pushing the image printed" >&2; exit 2; }
[[ -d $overlay ]] || overlay=$here/overlays/$overlay
[[ -f $overlay/kustomization.yaml ]] || { echo "$overlay: no such overlay" >&2; exit 2; }

components='' images="{name: registry.example/infoxlm, newName: ${image%@*}, digest: ${image#*@}}"
for with in "${@:3}"; do
  if [[ $with =~ $by_digest ]]; then
    new=${with#*=} name=${with%%=*}
    images+=", {name: ${name%@*}, newName: ${new%@*}, digest: ${new#*@}}"
  elif [[ -f $here/components/$with/kustomization.yaml ]]; then
    components+="../components/$with, "
  else
    echo "$with: neither a component ($(cd "$here/components" && echo *)) nor an image by digest" >&2
    exit 2
  fi
done

# kustomize accepts resources only as relative paths inside a folder, so the folder is created beside the overlays.
work=$(mktemp -d "$here/.render-XXXXXX")
trap 'rm -r "$work"' EXIT
cat > "$work/kustomization.yaml" <<END
resources: [$(realpath --relative-to="$work" "$overlay")]
components: [$components]
images: [$images]
END
"${KUBECTL:-kubectl}" kustomize "$work" > "$work/rendered"
if grep -n 'image: .*@sha256:0\{64\}' "$work/rendered" >&2; then
  echo "these are placeholders: give their digests (WITH=\"postgres@sha256:… …\"), or set them under images: in" \
    "$overlay/kustomization.yaml" >&2
  exit 2
fi
cat "$work/rendered"
