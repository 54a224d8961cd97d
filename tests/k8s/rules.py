"""What manifests must not have, as functions that name it: Kubernetes' standard "restricted", then our own rules."""

import re

_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
_HOST = ("hostNetwork", "hostPID", "hostIPC")
_BY_DIGEST = re.compile(r"[^@:]+(:\d+/[^@:]+)?@sha256:[0-9a-f]{64}")
_KEYS = {
    "AWS key": r"\b(AKIA|ASIA)[0-9A-Z]{16}\b",
    "value of a secret variable": r"\b[A-Z_]*(SECRET|PASSWORD|TOKEN)[A-Z_]*[\"']?\s*[=:]\s*[\"']?[\w/+.-]{8,}",
    "password": r"(?i)\bpassword[\"']?\s*[=:]\s*[\"']?[\w/+.-]{8,}",
    "value beside its name": r"(?i)name: \w*(SECRET|PASSWORD|TOKEN|ACCESS_KEY)\w*[\"']?,?\s*value:",
    "private key": r"BEGIN [A-Z ]*PRIVATE KEY",
    "password in a URL": r"://[^/\s:@]+:[^/\s@]+@",
}


def restricted(pod_spec: dict) -> list[str]:
    """Violations, each with the place and the rule; empty when the pod would be admitted."""
    pod = pod_spec.get("securityContext") or {}
    found = [f"{field}: is set" for field in _HOST if pod_spec.get(field)]
    for volume in pod_spec.get("volumes") or []:
        if kinds := set(volume) - {"name"} - _VOLUMES:
            found.append(f"volume {volume['name']}: {', '.join(sorted(kinds))} is not allowed")
    for container in [*(pod_spec.get("initContainers") or []), *pod_spec["containers"]]:
        found += [f"{container['name']}: {rule}" for rule in _broken(container, pod)]
    return found


def _broken(container: dict, pod: dict) -> list[str]:
    """Rules that a container breaks; it inherits from its pod what it does not say itself."""
    own = container.get("securityContext") or {}
    inherited = {**pod, **own}
    capabilities = own.get("capabilities") or {}
    user = inherited.get("runAsUser")
    rules = {
        "runAsNonRoot must be true": inherited.get("runAsNonRoot") is True,
        "runAsUser must not be 0": user != 0,
        "allowPrivilegeEscalation must be false": own.get("allowPrivilegeEscalation") is False,
        "privileged must not be set": not own.get("privileged"),
        "capabilities must drop ALL": "ALL" in (capabilities.get("drop") or []),
        "capabilities may add NET_BIND_SERVICE only": set(capabilities.get("add") or []) <= {"NET_BIND_SERVICE"},
        "seccompProfile must be RuntimeDefault or Localhost": (inherited.get("seccompProfile") or {}).get("type")
        in ("RuntimeDefault", "Localhost"),
        "hostPort must not be set": not any(port.get("hostPort") for port in container.get("ports") or []),
    }
    return [rule for rule, kept in rules.items() if not kept]


def confined(pod_spec: dict, with_token: bool = False) -> list[str]:
    """Violations of what we ask beyond the standard: a user of its own, a read-only root, limits, no token.

    Args:
        with_token: the pod talks to Kubernetes, as only the steps of a pipeline do.
    """
    pod = pod_spec.get("securityContext") or {}
    found = []
    if not with_token and pod_spec.get("automountServiceAccountToken") is not False:
        found.append("automountServiceAccountToken must be false")
    for container in [*(pod_spec.get("initContainers") or []), *pod_spec["containers"]]:
        inherited = {**pod, **(container.get("securityContext") or {})}
        resources = container.get("resources") or {}
        rules = {
            "runAsUser must be 10000 or more": (inherited.get("runAsUser") or 0) >= 10_000,
            "readOnlyRootFilesystem must be true": inherited.get("readOnlyRootFilesystem") is True,
            "a writable /tmp is needed": "/tmp"
            in [mount["mountPath"] for mount in container.get("volumeMounts") or []],
            "requests and limits of cpu and memory are needed": all(
                {"cpu", "memory"} <= set(resources.get(kind) or {}) for kind in ("requests", "limits")
            ),
            "the image must be named by digest": bool(_BY_DIGEST.fullmatch(container["image"])),
        }
        found += [f"{container['name']}: {rule}" for rule, kept in rules.items() if not kept]
    return found


def too_much(role: dict) -> list[str]:
    """What a role gives that none of ours may: rights everywhere, rights to everything, secrets, a shell in a pod."""
    found = [] if role["kind"] in ("Role", "RoleBinding") else [f"{role['kind']}: rights in every namespace"]
    for rule in role.get("rules") or []:
        for name in ("apiGroups", "resources", "verbs"):
            found += [f"{name}: *" for value in rule[name] if value == "*"]
        found += [value for value in rule["resources"] if value in ("secrets", "pods/exec", "pods/attach")]
    return found


def static_keys(text: str) -> list[str]:
    """What looks like a key or a password in a text, without its value."""
    return [name for name, pattern in _KEYS.items() if re.search(pattern, text)]
