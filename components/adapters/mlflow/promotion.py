"""What moves the alias `champion`: a promotion that the gate lets through, a person, a rollback.

Everything is written down before the alias moves, so that a crash leaves the old champion, and the same command again
finishes what it began.
"""

import getpass
import json
import logging
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from components.adapters.mlflow import connection, copies, model_versions
from components.adapters.mlflow.errors import translate_errors
from components.adapters.mlflow.model_versions import CHAMPION, DECISION, GATE, PREVIOUS
from infoxlm_core import outside
from infoxlm_core.errors import DataCorrupt, InputError, LeaseHeld, NotPromoted
from infoxlm_core.results.gate import Contender, Verdict, decide

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger(__name__)

PROMOTED, ROLLED_BACK_TO = "promoted", "champion again"
BY_HAND = "champion by hand"
ATTEMPTS = 5  # when others promote at the same time

_SERVER = re.compile(r"(?P<uri>\w+://.*[^/])/(?P<name>[^/:]+)")


class Decision(TypedDict, total=False):
    """What the tag `DECISION` says, as far as it is read again."""

    what: str
    reason: str
    figures: dict[str, Any]
    previous_champion: int | None
    better: int


def _decision(version: "ModelVersion") -> dict[str, Any]:
    tag, where = version.tags.get(DECISION, "{}"), f"tag {DECISION} of {version.name} version {version.version}"
    return outside.parse_json(tag, Decision, where, "delete the tag, then run again", DataCorrupt)


def champion_of(client: "MlflowClient", name: str) -> str | None:
    """The number of the version that users get."""
    number = client.get_registered_model(name).aliases.get(CHAMPION)
    return None if number is None else str(number)  # a database gives an int, a server a text


@dataclass(frozen=True)
class Promoted:
    """A new champion."""

    name: str
    version: int
    verdict: Verdict


def promote_model(model: str, gate: Mapping[str, float], store: Path, to: str = "", by_hand: str = "") -> Promoted:
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
        and what `promote` raises.
    """
    client = connection.connect_existing(store)
    version = model_versions.find(client, model)
    with copies.coming_back(store):
        if server := _SERVER.fullmatch(to):
            version = copies.copy_to_server(client, version, server["uri"], server["name"], store)
            client = connection.connect(store)
        elif ":" in to or "/" in to:
            raise InputError(f"{to!r}: give the NAME of a registered model, or a server with it, https://HOST/NAME")
        elif to:
            version = copies.copy(client, version, to)
        verdict = promote(client, version, gate, by_hand)
    if not verdict.passed:
        raise NotPromoted(f"models:/{version.name}/{version.version} stays {verdict.reason}")
    return Promoted(version.name, int(version.version), verdict)


def promote(client: "MlflowClient", version: "ModelVersion", gate: Mapping[str, float], by_hand: str = "") -> Verdict:
    """Make a version champion if the gate says so; write the decision down in any case.

    Args:
        client: of the registry's MLflow.
        version: the candidate.
        gate: metric -> least gain, above which the whole interval must lie.
        by_hand: why a person decides instead of the gate; its files are checked all the same, and so is whether local
            code made it.

    Raises:
        DataCorrupt, SignatureInvalid: its files are not those that were registered; the alias stays.
        LeaseHeld: others change the champion all the time.
        StorageUnavailable: MLflow does not answer.

    MLflow moves an alias without asking where it was, so two may replace the same champion at once. Each has written
    its decision down before it looked whether the champion is still the one that it was compared with; who then moves
    the alias therefore finds all others that may move it, too, and the best of them gets it, whoever is last.
    """
    name, number = version.name, version.version
    with translate_errors(f"champion of {name}"):
        for _ in range(ATTEMPTS):
            champion = champion_of(client, name)
            if champion and int(champion) == int(number):  # by a call that died before its end, or by another one
                said = _decision(client.get_model_version(name, number))
                verdict = Verdict(True, said.get("reason", "champion already"), said.get("figures", {}))
                break
            if by_hand:
                verdict = Verdict(True, f"{BY_HAND}: {by_hand}")
            else:
                verdict = compare_with_champion(client, version, gate)
            if not verdict.passed:
                record(client, version, "refused", verdict, champion)
                break
            with model_versions.fetched(client, version):
                pass  # complete, unchanged, and signed if it must be
            record(client, version, PROMOTED, verdict, champion)
            present = champion_of(client, name)
            if present == champion:
                model_versions.put(client.set_registered_model_alias, name, CHAMPION, number)
            # Else it was compared with one that is none any more: compare again, unless who took its place may find us.
            if present == champion or present in {str(one.version) for one in _promoted_now(client, version, champion)}:
                verdict = _settle(client, version, champion, gate, verdict)
                break
        else:
            raise LeaseHeld(f"{name}: its champion changed {ATTEMPTS} times while it was compared: try again")
        model_versions.put(client.set_model_version_tag, name, number, GATE, verdict.reason)
    logger.info("%s version %s: %s", name, number, verdict.reason)
    return verdict


def _settle(
    client: "MlflowClient", version: "ModelVersion", champion: str | None, gate: Mapping[str, float], verdict: Verdict
) -> Verdict:
    """After a version or a rival of it has got the alias: give it to the best of those that replace the same champion.

    Each of them comes to the same one if their gates are the same. Returns what then holds of the version.
    """
    name, number = version.name, version.version
    best, *others = _promoted_now(client, version, champion)
    said = _decision(client.get_model_version(name, number))  # now: who is through, and not among them, wrote it before
    if said.get("what") != PROMOTED:  # another one has found that it is better, perhaps before we had the alias
        model_versions.put(client.set_registered_model_alias, name, CHAMPION, str(said.get("better")))
        return Verdict(False, said.get("reason", ""))
    rivals = [best, *others]
    for other in others:
        by_hand = [_decision(one).get("reason", "").startswith(BY_HAND) for one in (best, other)]
        if by_hand[1] or (not by_hand[0] and decide(_present(client, other), _present(client, best), gate).passed):
            best = other
    lost = Verdict(False, f"candidate: version {best.version} became champion at the same time, and is not worse")
    if others:  # the alias first: a crash in between then leaves nobody champion who is called refused
        model_versions.put(client.set_registered_model_alias, name, CHAMPION, best.version)
    for one in rivals:
        if one.version != best.version:
            record(client, one, "refused", lost, champion, better=best.version)
    return verdict if best.version == number else lost


def _promoted_now(client: "MlflowClient", version: "ModelVersion", champion: str | None) -> "list[ModelVersion]":
    """This version and others that are to replace the same champion and are not through yet, the oldest first."""
    found = []
    for one in model_versions.all_versions(client, version.name):
        with suppress(DataCorrupt):
            said = _decision(one)
            replaces = said.get("what") == PROMOTED and str(said.get("previous_champion") or "") == (champion or "")
            if one.version == version.version or (replaces and one.tags.get(GATE) != said.get("reason")):
                found.append(one)
    return sorted(found, key=lambda one: int(one.version))


def compare_with_champion(client: "MlflowClient", version: "ModelVersion", gate: Mapping[str, float]) -> Verdict:
    """What the gate says of a candidate beside the present champion."""
    champion = champion_of(client, version.name)
    holder = _present(client, client.get_model_version(version.name, champion)) if champion else None
    return decide(_present(client, version), holder, gate)


def _present(client: "MlflowClient", version: "ModelVersion") -> Contender:
    return Contender(str(version.version), version.tags, lambda: model_versions.read_outcomes(client, version))


def roll_back(client: "MlflowClient", name: str, reason: str) -> int:
    """Make the version champion again that the present one replaced; return its number.

    Called again it changes nothing: a champion that a rollback has made stays.

    Raises:
        InputError: no champion, or none before it.
        DataCorrupt, SignatureInvalid: its files are not those that were registered; the alias stays.
    """
    with translate_errors(f"champion of {name}"):
        champion = champion_of(client, name)
        if champion is None:
            raise InputError(f"{name} has no champion: promote a version instead")
        present = client.get_model_version(name, champion)
        if _decision(present).get("what") == ROLLED_BACK_TO:
            logger.info("%s: version %s is champion by a rollback; promote another by hand instead", name, champion)
            return int(champion)
        if not (before := present.tags.get(PREVIOUS)):
            raise InputError(f"{name} version {champion} replaced no other: promote a version instead")
        version = client.get_model_version(name, before)
        with model_versions.fetched(client, version):
            pass
        for one, what, said in (
            (present, "rolled back", f"rolled back to version {before}: {reason}"),
            (version, ROLLED_BACK_TO, f"champion again after version {champion}: {reason}"),
        ):
            record(client, one, what, Verdict(one is version, said), None)
            model_versions.put(client.set_model_version_tag, name, one.version, GATE, said)
        model_versions.put(client.set_registered_model_alias, name, CHAMPION, before)
    logger.info("%s: champion is version %s again", name, before)
    return int(before)


def record(
    client: "MlflowClient",
    version: "ModelVersion",
    what: str,
    verdict: Verdict,
    previous: str | None,
    better: str | None = None,
) -> None:
    """Write a decision down, as a tag of the version and as a file of its MLflow run. `better` is the one that won."""
    decision: dict[str, Any] = {
        "what": what, "model": version.name, "version": int(version.version), "reason": verdict.reason,
        "figures": verdict.figures, "previous_champion": int(previous) if previous else None,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "by": who(),
    }  # fmt: skip
    decision |= {"better": int(better)} if better else {}
    if version.run_id:
        origin = {key: value for key, value in version.tags.items() if key not in (DECISION, GATE)}
        stem = f"{decision['at'].replace(':', '')}-{what.replace(' ', '-')}-version-{version.version}"
        client.log_dict(version.run_id, decision | {"registered": origin}, f"promotion/{stem}.json")
    if what == PROMOTED and previous:
        model_versions.put(client.set_model_version_tag, version.name, version.version, PREVIOUS, previous)
    model_versions.put(
        client.set_model_version_tag, version.name, version.version, DECISION, json.dumps(decision, ensure_ascii=False)
    )


def who() -> dict[str, str]:
    """Who decides: a person, or a step of a pipeline run with its service account and image."""
    if pod := os.environ.get("KFP_POD_NAME"):
        known = {"run": "RUN_ID", "service_account": "SERVICE_ACCOUNT", "image": "INFOXLM_IMAGE"}
        return {"pod": pod} | {key: os.environ[name] for key, name in known.items() if os.environ.get(name)}
    person = os.environ.get("MLFLOW_TRACKING_USERNAME") or getpass.getuser()
    return {"user": person} | ({"run": os.environ["RUN_ID"]} if os.environ.get("RUN_ID") else {})
