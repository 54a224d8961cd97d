#!/usr/bin/env bash
# Print the manifests of an overlay with the image of a release.
#
#     k8s/render.sh OVERLAY IMAGE@sha256:DIGEST [WITH ...] | kubectl apply --server-side --force-conflicts -f -
#
# OVERLAY   name of a directory in k8s/overlays, or path of any directory with a kustomization.yaml
# WITH      one of: a component in k8s/components, such as downloads
#                   the digest of a third-party image, such as postgres@sha256:…
#                   the same with the address of a mirror, such as postgres=registry.example/postgres@sha256:…
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
overlay=${1:?name an overlay: small, single-user or production}
image=${2:?name the image with its digest: name@sha256:digest}
# A digest names one image. With a tag, a pod that starts later could get a different image.
image_with_digest='^[^@]+@sha256:[0-9a-f]{64}$'
[[ $image =~ $image_with_digest ]] || { echo "$image has no digest: use the name that docker push printed, NAME@sha256:…" >&2; exit 2; }
[[ -d $overlay ]] || overlay=$here/overlays/$overlay
[[ -f $overlay/kustomization.yaml ]] || { echo "$overlay: no such overlay: name a directory of k8s/overlays" >&2; exit 2; }

components='' images="{name: registry.example/infoxlm, newName: ${image%@*}, digest: ${image#*@}}"
for with in "${@:3}"; do
  if [[ $with =~ $image_with_digest ]]; then
    original=${with%%=*} replacement=${with#*=}  # both are the whole argument if it names no mirror
    images+=", {name: ${original%@*}, newName: ${replacement%@*}, digest: ${replacement#*@}}"
  elif [[ -f $here/components/$with/kustomization.yaml ]]; then
    components+="../components/$with, "
  else
    echo "$with: neither a component ($(cd "$here/components" && echo *)) nor an image by digest" >&2
    exit 2
  fi
done

# kustomize accepts resources only as relative paths inside a directory, so the directory is created beside the overlays.
work=$(mktemp -d "$here/.render-XXXXXX")
trap 'rm -r "$work"' EXIT
cat > "$work/kustomization.yaml" <<END
resources: [$(realpath --relative-to="$work" "$overlay")]
components: [$components]
images: [$images]
END
"${KUBECTL:-kubectl}" kustomize "$work" > "$work/rendered"
# A digest of zeros is a placeholder in the overlays for an image that the user must choose.
if grep -n 'image: .*@sha256:0\{64\}' "$work/rendered" >&2; then
  echo "these images have placeholders: give their digests (WITH=\"postgres@sha256:… …\"), or set them under images: in" \
    "$overlay/kustomization.yaml" >&2
  exit 2
fi
cat "$work/rendered"
