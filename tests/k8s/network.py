"""Evaluate network policies as Kubernetes does: a connection needs a rule at each end that has policies."""

import ipaddress
from dataclasses import dataclass, field

from components.adapters.kuberay.manifest import _make_labels
from tests.k8s.manifests import select_kind

OUR_NAMESPACE = {"kubernetes.io/metadata.name": "infoxlm"}


@dataclass(frozen=True)
class Pod:
    """The labels of a pod and of its namespace."""

    labels: dict[str, str]
    namespace: dict[str, str] = field(default_factory=lambda: OUR_NAMESPACE)


STEP = Pod({"workflows.argoproj.io/workflow": "infoxlm-x7k2p"})
RAY = Pod({"ray.io/is-ray-node": "yes", **_make_labels("training")})
SUBMITTER = Pod(_make_labels("submitter"))
MLFLOW = Pod({"app.kubernetes.io/name": "mlflow"})
SERVING = Pod({"app.kubernetes.io/name": "infoxlm-serving"})
INFERENCE = Pod({"serving.kserve.io/inferenceservice": "infoxlm", "app": "isvc.infoxlm-predictor"})
STRAY = Pod({"app": "notebook"})
"""A pod of somebody else in our namespace."""


def pod_in(namespace: str, **labels: str) -> Pod:
    """Return a pod with these labels in another namespace."""
    return Pod(labels, {"kubernetes.io/metadata.name": namespace})


def policies(items: list[dict]) -> list[dict]:
    """Return the network policies among manifests."""
    return select_kind(items, "NetworkPolicy")


def can_connect(policies: list[dict], source: Pod | str, target: Pod | str, port: int, protocol: str = "TCP") -> bool:
    """Return whether the policies allow a connection. A string is an IP address outside the cluster."""
    can_leave = _is_allowed(policies, "Egress", source, target, port, protocol)
    can_enter = _is_allowed(policies, "Ingress", target, source, port, protocol)
    return can_leave and can_enter


def _is_allowed(
    policies: list[dict], direction: str, own: Pod | str, peer: Pod | str, port: int, protocol: str
) -> bool:
    """Return whether the policies that select `own` allow this direction of a connection with `peer`."""
    if isinstance(own, str) or own.namespace != OUR_NAMESPACE:
        return True  # our policies apply to our namespace only
    specs = []
    for policy in policies:
        spec = policy["spec"]
        if direction in spec["policyTypes"] and selects(spec["podSelector"], own.labels):
            specs.append(spec)
    if not specs:
        return True
    peer_field = {"Egress": "to", "Ingress": "from"}[direction]
    for spec in specs:
        for rule in spec.get(direction.lower(), []):
            allows_peer = peer_field not in rule or any(_matches(entry, peer) for entry in rule[peer_field])
            ports = [(entry["port"], entry.get("protocol", "TCP")) for entry in rule.get("ports", [])]
            if allows_peer and ("ports" not in rule or (port, protocol) in ports):
                return True
    return False


def _matches(entry: dict, peer: Pod | str) -> bool:
    """Return whether an entry of `to` or `from` matches a pod or an IP address."""
    if "ipBlock" in entry:
        if isinstance(peer, Pod):
            return False
        address = ipaddress.ip_address(peer)
        excluded = [ipaddress.ip_network(block) for block in entry["ipBlock"].get("except", [])]
        is_in_block = address in ipaddress.ip_network(entry["ipBlock"]["cidr"])
        return is_in_block and not any(address in block for block in excluded)
    if isinstance(peer, str):
        return False
    if "namespaceSelector" in entry:
        matches_namespace = selects(entry["namespaceSelector"], peer.namespace)
    else:
        matches_namespace = peer.namespace == OUR_NAMESPACE
    return matches_namespace and selects(entry.get("podSelector", {}), peer.labels)


def selects(selector: dict, labels: dict[str, str]) -> bool:
    """Return whether a label selector matches labels."""
    for name, value in selector.get("matchLabels", {}).items():
        if labels.get(name) != value:
            return False
    for term in selector.get("matchExpressions", []):
        value = labels.get(term["key"])
        values = term.get("values", [])
        results = {"Exists": term["key"] in labels, "In": value in values, "NotIn": value not in values}
        if not results[term["operator"]]:
            return False
    return True
