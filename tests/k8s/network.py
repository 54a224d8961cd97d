"""What network policies let through, as Kubernetes reads them: what rules a pod allows all that the pod may."""

import ipaddress
from dataclasses import dataclass, field

from components.adapters.kuberay.manifest import _make_labels

OURS = {"kubernetes.io/metadata.name": "infoxlm"}


@dataclass(frozen=True)
class Pod:
    labels: dict[str, str]
    namespace: dict[str, str] = field(default_factory=lambda: OURS)


STEP = Pod({"workflows.argoproj.io/workflow": "infoxlm-x7k2p"})
RAY = Pod({"ray.io/is-ray-node": "yes", **_make_labels("training")})
SUBMITTER = Pod(_make_labels("submitter"))
MLFLOW, SERVING = (Pod({"app.kubernetes.io/name": name}) for name in ("mlflow", "infoxlm-serving"))
INFERENCE = Pod({"serving.kserve.io/inferenceservice": "infoxlm", "app": "isvc.infoxlm-predictor"})
STRAY = Pod({"app": "notebook"})
"""A pod in our namespace that is none of ours."""


def policies(items: list[dict]) -> list[dict]:
    """Return the network policies among objects."""
    return [item for item in items if item["kind"] == "NetworkPolicy"]


def may(policies: list[dict], source: Pod | str, target: Pod | str, port: int, protocol: str = "TCP") -> bool:
    """Whether a connection is let through at both ends; an address stands for what is outside of the cluster."""
    ways = (("Egress", source, target), ("Ingress", target, source))
    return all(_allowed(policies, way, own, other, port, protocol) for way, own, other in ways)


def _allowed(policies: list[dict], way: str, own: Pod | str, other: Pod | str, port: int, protocol: str) -> bool:
    if isinstance(own, str) or own.namespace != OURS:
        return True  # our policies rule our pods only
    ruling = [
        policy["spec"]
        for policy in policies
        if way in policy["spec"]["policyTypes"] and selects(policy["spec"]["podSelector"], own.labels)
    ]
    side = {"Egress": "to", "Ingress": "from"}[way]
    rules = [rule for spec in ruling for rule in spec.get(way.lower(), [])]
    return not ruling or any(
        (side not in rule or any(_is(peer, other) for peer in rule[side]))
        and (
            "ports" not in rule or any((p["port"], p.get("protocol", "TCP")) == (port, protocol) for p in rule["ports"])
        )
        for rule in rules
    )


def _is(peer: dict, other: Pod | str) -> bool:
    if "ipBlock" in peer:
        block = peer["ipBlock"]
        address = isinstance(other, str) and ipaddress.ip_address(other)
        inside = [ipaddress.ip_network(net) for net in (block["cidr"], *block.get("except", []))]
        return bool(address) and address in inside[0] and not any(address in net for net in inside[1:])
    if isinstance(other, str):
        return False
    there = "namespaceSelector" in peer
    namespace = selects(peer["namespaceSelector"], other.namespace) if there else other.namespace == OURS
    return namespace and selects(peer.get("podSelector", {}), other.labels)


def selects(selector: dict, labels: dict[str, str]) -> bool:
    """Whether a label selector matches."""
    verdicts = [labels.get(name) == value for name, value in selector.get("matchLabels", {}).items()]
    for term in selector.get("matchExpressions", []):
        has, known = labels.get(term["key"]), term["key"] in labels
        values = term.get("values", [])
        verdicts.append({"Exists": known, "In": has in values, "NotIn": has not in values}[term["operator"]])
    return all(verdicts)
