"""The whole of a promotion: find the version, copy it if it must go elsewhere, compare it there, move the alias."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from components.adapters.mlflow import champion as promotion
from components.adapters.mlflow import copies as registry_copy
from components.adapters.mlflow import runs as mlflow_runs
from components.adapters.mlflow import versions as registered
from infoxlm_core.errors import InputError, NotPromoted
from infoxlm_core.results.gate import Verdict

_SERVER = re.compile(r"(?P<uri>\w+://.*[^/])/(?P<name>[^/:]+)")


@dataclass(frozen=True)
class Promoted:
    """A new champion."""

    name: str
    version: int
    verdict: Verdict


def run(model: str, gate: Mapping[str, float], store: Path, to: str = "", by_hand: str = "") -> Promoted:
    """Make a registered model champion if the gate, or a person, says so. Called again, it changes nothing.

    Args:
        model: models:/NAME@ALIAS or models:/NAME/VERSION.
        gate: metric -> least gain.
        store: where MLflow's database is if MLFLOW_TRACKING_URI names no server.
        to: NAME, another registered model of the same server, or URI/NAME of another server: the model is copied
            there, and compared with the champion that is there.
        by_hand: why the gate is not asked.

    Raises:
        NotPromoted: with the figures; the alias stays.
        and what `promotion.promote` raises.
    """
    client = mlflow_runs.connect_existing(store)
    version = registered.find(client, model)
    with registry_copy.coming_back(store):
        if server := _SERVER.fullmatch(to):
            version = registry_copy.copy_to_server(client, version, server["uri"], server["name"], store)
            client = mlflow_runs.connect(store)
        elif ":" in to or "/" in to:
            raise InputError(f"{to!r}: give the NAME of a registered model, or a server with it, https://HOST/NAME")
        elif to:
            version = registry_copy.copy(client, version, to)
        verdict = promotion.promote(client, version, gate, by_hand)
    if not verdict.passed:
        raise NotPromoted(f"models:/{version.name}/{version.version} stays {verdict.reason}")
    return Promoted(version.name, int(version.version), verdict)
