"""Rules for manifests. Each function returns the violations: Kubernetes' standard "restricted", then our own rules."""

import re

from tests.k8s.manifests import containers_of

_ALLOWED_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
    *("persistentVolumeClaim", "projected", "secret"),
}
_HOST_FIELDS = ("hostNetwork", "hostPID", "hostIPC")
_IMAGE_WITH_DIGEST = re.compile(r"[^@:]+(:\d+/[^@:]+)?@sha256:[0-9a-f]{64}")
_SECRET_PATTERNS = {
    "AWS key": r"\b(AKIA|ASIA)[0-9A-Z]{16}\b",
    "value of a secret variable": r"\b[A-Z_]*(SECRET|PASSWORD|TOKEN)[A-Z_]*[\"']?\s*[=:]\s*[\"']?[\w/+.-]{8,}",
    "password": r"(?i)\bpassword[\"']?\s*[=:]\s*[\"']?[\w/+.-]{8,}",
    "value beside its name": r"(?i)name: \w*(SECRET|PASSWORD|TOKEN|ACCESS_KEY)\w*[\"']?,?\s*value:",
    "private key": r"BEGIN [A-Z ]*PRIVATE KEY",
    "password in a URL": r"://[^/\s:@]+:[^/\s@]+@",
}


def find_restricted_violations(pod_spec: dict) -> list[str]:
    """Return the violations of the Pod Security standard "restricted"."""
    violations = [f"{field}: is set" for field in _HOST_FIELDS if pod_spec.get(field)]
    for volume in pod_spec.get("volumes") or []:
        forbidden_kinds = set(volume) - {"name"} - _ALLOWED_VOLUMES
        if forbidden_kinds:
            violations.append(f"volume {volume['name']}: {', '.join(sorted(forbidden_kinds))} is not allowed")
    pod_context = pod_spec.get("securityContext") or {}
    for container in containers_of(pod_spec):
        context = container.get("securityContext") or {}
        inherited = {**pod_context, **context}
        capabilities = context.get("capabilities") or {}
        seccomp_type = (inherited.get("seccompProfile") or {}).get("type")
        violations += _list_broken(
            container,
            {
                "runAsNonRoot must be true": inherited.get("runAsNonRoot") is True,
                "runAsUser must not be 0": inherited.get("runAsUser") != 0,
                "allowPrivilegeEscalation must be false": context.get("allowPrivilegeEscalation") is False,
                "privileged must not be set": not context.get("privileged"),
                "capabilities must drop ALL": "ALL" in (capabilities.get("drop") or []),
                "capabilities may add NET_BIND_SERVICE only": set(capabilities.get("add") or [])
                <= {"NET_BIND_SERVICE"},
                "seccompProfile must be RuntimeDefault or Localhost": seccomp_type in ("RuntimeDefault", "Localhost"),
                "hostPort must not be set": not any(port.get("hostPort") for port in container.get("ports") or []),
            },
        )
    return violations


def find_own_violations(pod_spec: dict, needs_token: bool = False) -> list[str]:
    """Return the violations of our own rules: a numbered user, a read-only root, limits, a digest, no token.

    Args:
        needs_token: the pod calls Kubernetes, as only the steps of a pipeline do.
    """
    violations = []
    if not needs_token and pod_spec.get("automountServiceAccountToken") is not False:
        violations.append("automountServiceAccountToken must be false")
    pod_context = pod_spec.get("securityContext") or {}
    for container in containers_of(pod_spec):
        inherited = {**pod_context, **(container.get("securityContext") or {})}
        mount_paths = [mount["mountPath"] for mount in container.get("volumeMounts") or []]
        resources = container.get("resources") or {}
        has_resources = all({"cpu", "memory"} <= set(resources.get(kind) or {}) for kind in ("requests", "limits"))
        violations += _list_broken(
            container,
            {
                "runAsUser must be 10000 or more": (inherited.get("runAsUser") or 0) >= 10_000,
                "readOnlyRootFilesystem must be true": inherited.get("readOnlyRootFilesystem") is True,
                "a writable /tmp is needed": "/tmp" in mount_paths,
                "requests and limits of cpu and memory are needed": has_resources,
                "the image must have a digest": bool(_IMAGE_WITH_DIGEST.fullmatch(container["image"])),
            },
        )
    return violations


def find_violations(pod_spec: dict) -> list[str]:
    """Return the violations of "restricted" and of our own rules."""
    return find_restricted_violations(pod_spec) + find_own_violations(pod_spec)


def _list_broken(container: dict, rules: dict[str, bool]) -> list[str]:
    return [f"{container['name']}: {rule}" for rule, is_kept in rules.items() if not is_kept]


def find_excessive_rights(role: dict) -> list[str]:
    """Return the rights of a role that no role of ours may have: cluster-wide, wildcards, secrets, a shell in a pod."""
    is_namespaced = role["kind"] in ("Role", "RoleBinding")
    rights = [] if is_namespaced else [f"{role['kind']}: rights in every namespace"]
    for rule in role.get("rules") or []:
        for name in ("apiGroups", "resources", "verbs"):
            rights += [f"{name}: *" for value in rule[name] if value == "*"]
        rights += [value for value in rule["resources"] if value in ("secrets", "pods/exec", "pods/attach")]
    return rights


def find_secrets(text: str) -> list[str]:
    """Return the kinds of keys and passwords that a text seems to contain, without their values."""
    return [name for name, pattern in _SECRET_PATTERNS.items() if re.search(pattern, text)]
