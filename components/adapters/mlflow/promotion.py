"""Promotion: move the alias `champion` of a registered model, by the gate, by hand or by a rollback.

Callers hold `LOCK`, so only one promotion runs at a time. The decision is recorded before the alias moves, so a crash
leaves the old champion, and the same command finishes the promotion.
"""

import functools
import getpass
import json
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from components.adapters.mlflow import connection, copies, model_versions
from components.adapters.mlflow.errors import translate_errors
from components.adapters.mlflow.model_versions import AGAINST, CHAMPION, DECISION, GATE, PREVIOUS
from infoxlm_core import user_files
from infoxlm_core.errors import DataCorrupt, InputError, LeaseHeld, NotPromoted
from infoxlm_core.results.gate import Contender, Verdict, decide

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger(__name__)

LOCK = ("registry", "champions")
"""Arguments of `artifacts.exclusive` for the lock that every promotion, rollback and registration holds."""
ROLLED_BACK_TO = "champion again"
"""Decision on the version that became champion by a rollback."""
_MODEL_ON_SERVER = re.compile(r"(?P<uri>\w+://.*[^/])/(?P<name>[^/:]+)")


class Decision(TypedDict, total=False):
    """The fields of the tag `DECISION` that are read back."""

    what: str
    """The action: promoted, refused, rolled back, or champion again."""
    reason: str
    figures: dict[str, Any]


@dataclass(frozen=True)
class Promoted:
    """A new champion."""

    name: str
    version: int
    verdict: Verdict


def promote_model(model: str, gate: Mapping[str, float], store: Path, to: str = "", by_hand: str = "") -> Promoted:
    """Make a registered model champion if it passes the gate, or by hand. A second call changes nothing.

    Args:
        model: models:/NAME@ALIAS or models:/NAME/VERSION.
        gate: metric -> least gain.
        store: directory with MLflow's database if MLFLOW_TRACKING_URI names no server.
        to: NAME, another registered model of the same server, or URI/NAME of another server. The model is copied
            there first, and compared with the champion there.
        by_hand: the reason for a promotion without the gate.

    Raises:
        NotPromoted: the gate refuses; the message has the figures, and the alias stays.
        InputError: `model` or `to` is malformed, or MLflow refuses.
        DataCorrupt, SignatureInvalid: the files are not those that were registered; the alias stays.
        LeaseHeld: the champion changed during the comparison.
        StorageUnavailable: MLflow does not answer.
    """
    client = connection.connect_existing(store)
    version = model_versions.find(client, model)
    target = _MODEL_ON_SERVER.fullmatch(to)
    if target:
        origin = f"{connection.public_uri(store)} {model_versions.uri_of(version)}"
        model_versions.digest_of(version)  # raises if the version has no digest, by which a second call finds the copy
        with translate_errors(model), model_versions.fetched(client, version) as files:
            copied = copies.Copy(target["name"], files, dict(version.tags), origin, store)
            name, number, verdict = copies.run_on_server(target["uri"], _promote_copy, copied, gate, by_hand)
    else:
        if ":" in to or "/" in to:
            raise InputError(f"{to!r}: give the NAME of a registered model, or https://HOST/NAME for another server")
        if to:
            version = copies.copy_within_server(client, version, to)
        name = version.name
        number = int(version.version)
        verdict = promote(client, version, gate, by_hand)
    if not verdict.passed:
        raise NotPromoted(f"models:/{name}/{number} stays {verdict.reason}")
    return Promoted(name, number, verdict)


def _promote_copy(copied: copies.Copy, gate: Mapping[str, float], by_hand: str) -> tuple[str, int, Verdict]:
    """Register a copy on the server of this process, and promote it there. Return its name, number and verdict."""
    client = connection.connect(copied.store)
    version = copies.register(client, copied)
    return version.name, int(version.version), promote(client, version, gate, by_hand)


def champion_of(client: "MlflowClient", name: str) -> str | None:
    """Return the number of the champion, or None if the model has no champion."""
    number = client.get_registered_model(name).aliases.get(CHAMPION)
    return None if number is None else str(number)  # MLflow returns an int from a database, a str from a server


def promote(client: "MlflowClient", version: "ModelVersion", gate: Mapping[str, float], by_hand: str = "") -> Verdict:
    """Make a version champion if it passes the gate. Record the decision in either case.

    Args:
        client: client of the registry.
        version: the candidate.
        gate: metric -> least gain; the whole interval must lie above it.
        by_hand: the reason for a promotion without the gate. The files are still checked.

    Raises:
        As `promote_model`, except NotPromoted.
    """
    name = version.name
    number = str(version.version)
    with translate_errors(f"champion of {name}"):
        champion = champion_of(client, name)
        is_champion = champion == number
        if is_champion:  # an earlier call moved the alias, and may have died before it set the tag
            decision = _read_decision(client.get_model_version(name, number))
            verdict = Verdict(True, decision.get("reason", "champion already"), decision.get("figures", {}))
        elif by_hand:
            verdict = Verdict(True, f"champion by hand: {by_hand}")
        else:
            verdict = compare(client, version, champion, gate)
        if not verdict.passed:
            record(client, version, "refused", verdict, champion)
        elif not is_champion:
            _check_files(client, version)
            record(client, version, "promoted", verdict, champion)
            if champion_of(client, name) != champion:  # moved by a process of another store, which has its own lock
                raise LeaseHeld(f"The champion of {name} changed during the comparison. Run the command again.")
            client.set_registered_model_alias(name, CHAMPION, number)
        client.set_model_version_tag(name, number, GATE, verdict.reason)
    logger.info("%s version %s: %s", name, number, verdict.reason)
    return verdict


def compare(
    client: "MlflowClient", version: "ModelVersion", champion: str | None, gate: Mapping[str, float]
) -> Verdict:
    """Return the gate's verdict on a candidate.

    The candidate is compared with the version whose number is `champion`, if any, and with its start if its tag
    `AGAINST` demands it.
    """
    current_champion = None
    if champion:
        current_champion = _make_contender(client, client.get_model_version(version.name, champion))
    start = None
    if version.tags.get(AGAINST) == "start":
        read_outcomes = functools.partial(model_versions.read_outcomes, client, version, of_start=True)
        start = Contender("its start", {"test_set": version.tags.get("test_set", "")}, read_outcomes)
    return decide(_make_contender(client, version), current_champion, gate, start)


def _make_contender(client: "MlflowClient", version: "ModelVersion") -> Contender:
    """Return a version in the form that the gate compares. Its outcomes are only downloaded if they are needed."""
    read_outcomes = functools.partial(model_versions.read_outcomes, client, version)
    return Contender(f"version {version.version}", version.tags, read_outcomes)


def _check_files(client: "MlflowClient", version: "ModelVersion") -> None:
    """Raise an error if the files of a version are incomplete, changed or not signed."""
    with model_versions.fetched(client, version):
        pass


def roll_back(client: "MlflowClient", name: str, reason: str) -> int:
    """Make the previous champion the champion again. Return its version number.

    A second call changes nothing: a champion set by a rollback stays.

    Raises:
        InputError: there is no champion, or it replaced no other version.
        DataCorrupt, SignatureInvalid: the files are not those that were registered; the alias stays.
    """
    with translate_errors(f"champion of {name}"):
        champion = champion_of(client, name)
        if champion is None:
            raise InputError(f"{name} has no champion: promote a version instead")
        replaced_version = client.get_model_version(name, champion)
        if _read_decision(replaced_version).get("what") == ROLLED_BACK_TO:
            logger.info("%s: version %s became champion by a rollback: to change it, promote a version", name, champion)
            return int(champion)
        previous = replaced_version.tags.get(PREVIOUS)
        if not previous:
            raise InputError(f"{name} version {champion} did not replace another version: promote a version instead")
        restored_version = client.get_model_version(name, previous)
        _check_files(client, restored_version)
        replaced_verdict = Verdict(False, f"rolled back to version {previous}: {reason}")
        record(client, replaced_version, "rolled back", replaced_verdict, None)
        client.set_model_version_tag(name, replaced_version.version, GATE, replaced_verdict.reason)
        restored_verdict = Verdict(True, f"champion again after version {champion}: {reason}")
        record(client, restored_version, ROLLED_BACK_TO, restored_verdict, None)
        client.set_model_version_tag(name, restored_version.version, GATE, restored_verdict.reason)
        client.set_registered_model_alias(name, CHAMPION, previous)
    logger.info("%s: champion is version %s again", name, previous)
    return int(previous)


def record(
    client: "MlflowClient", version: "ModelVersion", action: str, verdict: Verdict, previous: str | None
) -> None:
    """Record a decision as a tag of the version and as a file of its MLflow run.

    Args:
        client: client of the registry.
        version: the version that the decision is about.
        action: promoted, refused, rolled back, or champion again.
        verdict: the reason and the figures.
        previous: number of the champion that the version was compared with.
    """
    timestamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    decision: dict[str, Any] = {
        "what": action,
        "model": version.name,
        "version": int(version.version),
        "reason": verdict.reason,
        "figures": verdict.figures,
        "previous_champion": int(previous) if previous else None,
        "at": timestamp,
        "by": identify_decider(),
    }
    if version.run_id:
        registered_tags = {key: value for key, value in version.tags.items() if key not in (DECISION, GATE)}
        file_name = f"{timestamp.replace(':', '')}-{action.replace(' ', '-')}-version-{version.version}.json"
        client.log_dict(version.run_id, decision | {"registered": registered_tags}, f"promotion/{file_name}")
    if action == "promoted" and previous:
        client.set_model_version_tag(version.name, version.version, PREVIOUS, previous)
    tag_value = json.dumps(decision, ensure_ascii=False)
    client.set_model_version_tag(version.name, version.version, DECISION, tag_value)


def identify_decider() -> dict[str, str]:
    """Return who makes the decision: a person, or a pipeline step with its service account and image."""
    pod = os.environ.get("KFP_POD_NAME")
    if pod:
        decider = {"pod": pod}
        variables = {"run": "RUN_ID", "service_account": "SERVICE_ACCOUNT", "image": "INFOXLM_IMAGE"}
    else:
        decider = {"user": os.environ.get("MLFLOW_TRACKING_USERNAME") or getpass.getuser()}
        variables = {"run": "RUN_ID"}
    for key, variable in variables.items():
        value = os.environ.get(variable)
        if value:
            decider[key] = value
    return decider


def _read_decision(version: "ModelVersion") -> dict[str, Any]:
    """Return the last decision on a version, or an empty mapping if there was none."""
    tag_value = version.tags.get(DECISION, "{}")
    tag_name = f"tag {DECISION} of {version.name} version {version.version}"
    return user_files.parse_json(tag_value, Decision, tag_name, "delete the tag, then run again", DataCorrupt)
