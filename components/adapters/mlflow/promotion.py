"""Promotion: move the alias `champion` of a registered model, by the gate, by hand or by a rollback.

Callers hold `LOCK`, so only one promotion runs at a time. The decision is recorded before the alias moves. After a
crash, the old champion remains, and a repeated command finishes the promotion.
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
"""Arguments of `artifacts.exclusive` for the lock of all promotions, rollbacks and registrations."""
ROLLED_BACK_TO = "champion again"
"""Action in the decision on a version that became champion by a rollback."""
REFUSED = "refused"
"""Action in the decision on a version that the gate refused."""
_MODEL_ON_SERVER = re.compile(r"(?P<uri>\w+://.*[^/])/(?P<name>[^/:]+)")


class Decision(TypedDict, total=False):
    """Fields of the tag `DECISION` that this module reads."""

    what: str
    """Action: promoted, refused, rolled back, or champion again."""
    reason: str
    figures: dict[str, Any]
    gate: dict[str, float]
    """The limits of a refusal. Earlier releases did not record them."""


@dataclass(frozen=True)
class Promotion:
    """Result of comparing a version with the champion."""

    name: str
    """Name of the registered model."""
    version: int
    verdict: Verdict


def promote_model(
    model: str, gate: Mapping[str, float], store: Path, target: str = "", manual_reason: str = ""
) -> Promotion:
    """Make a registered model the champion if it passes the gate. A second call changes nothing.

    Args:
        model: models:/NAME@ALIAS or models:/NAME/VERSION.
        gate: mapping from metric name to required gain over the champion.
        store: directory with MLflow's database if MLFLOW_TRACKING_URI is not set.
        target: registered model to copy the version to before the promotion, as NAME on the same server or URI/NAME on
            another server; empty: promote the version in its own registered model.
        manual_reason: reason for a promotion by hand, without the gate.

    Raises:
        NotPromoted: the gate refuses the version. The message has the figures, and the alias does not move.
        InputError: `model` or `target` is malformed, or MLflow refuses.
        DataCorrupt, SignatureInvalid: the files differ from the registered files. The alias does not move.
        LeaseHeld: the champion changed during the comparison.
        StorageUnavailable: MLflow does not answer.
    """
    client = connection.connect_existing(store)
    version = model_versions.find_version(client, model)
    model_on_server = _MODEL_ON_SERVER.fullmatch(target)
    if model_on_server:
        version_copy = copies.VersionCopy(
            name=model_on_server["name"],
            digest=model_versions.read_digest(version),
            tags=dict(version.tags),
            origin=f"{connection.public_uri(store)} {model_versions.make_uri(version)}",
            store=store,
        )
        with translate_errors(model), model_versions.checked_download(client, version) as files:
            server = model_on_server["uri"]
            promotion = copies.run_on_server(server, _promote_copy, version_copy, files, gate, manual_reason)
    else:
        if ":" in target or "/" in target:
            raise InputError(f"{target!r}: give the NAME of a registered model, or https://HOST/NAME on another server")
        if target:
            version = copies.copy_within_server(client, version, target)
        verdict = promote(client, version, gate, manual_reason)
        promotion = Promotion(version.name, int(version.version), verdict)
    if not promotion.verdict.passed:  # the reason begins with "candidate" and continues the message
        raise NotPromoted(f"models:/{promotion.name}/{promotion.version} stays {promotion.verdict.reason}")
    return promotion


def _promote_copy(
    version_copy: copies.VersionCopy, files: Path, gate: Mapping[str, float], manual_reason: str
) -> Promotion:
    """Register a copy on this process's server, and promote the copy."""
    client = connection.connect(version_copy.store)
    version = copies.register(client, version_copy, files)
    verdict = promote(client, version, gate, manual_reason)
    return Promotion(version.name, int(version.version), verdict)


def find_champion(client: "MlflowClient", name: str) -> str | None:
    """Return the champion's version number, or None if the model has no champion."""
    number = client.get_registered_model(name).aliases.get(CHAMPION)
    return None if number is None else str(number)  # a database returns an int, a server a str


def promote(
    client: "MlflowClient", version: "ModelVersion", gate: Mapping[str, float], manual_reason: str = ""
) -> Verdict:
    """Make a version the champion if it passes the gate. Record the decision in either case.

    Raises the errors of `promote_model`, except NotPromoted.

    Args:
        client: registry client.
        version: the candidate.
        gate: mapping from metric name to required gain. The whole confidence interval must lie above this gain.
        manual_reason: reason for a promotion by hand, without the gate. The files are still checked.
    """
    name = version.name
    number = str(version.version)
    with translate_errors(f"champion of {name}"):
        champion = find_champion(client, name)
        if champion == number:  # an earlier call may have moved the alias and died before setting the tag
            decision = _read_decision(client.get_model_version(name, number))
            verdict = Verdict(True, decision.get("reason", "champion already"), decision.get("figures", {}))
        elif manual_reason:
            verdict = Verdict(True, f"champion by hand: {manual_reason}")
            _make_champion(client, version, verdict, champion)
        else:
            verdict = compare(client, version, champion, gate)
            if verdict.passed:
                _make_champion(client, version, verdict, champion)
            else:
                record_decision(client, version, REFUSED, verdict, champion, gate)
        client.set_model_version_tag(name, number, GATE, verdict.reason)  # last: `register` skips versions with it
    logger.info("%s version %s: %s", name, number, verdict.reason)
    return verdict


def was_refused(version: "ModelVersion") -> bool:
    """Return whether the last decision on a version is a refusal."""
    return _read_decision(version).get("what") == REFUSED


def was_refused_by_other_gate(version: "ModelVersion", gate: Mapping[str, float], against: str) -> bool:
    """Return whether the last decision on a version is a refusal by another gate.

    Args:
        version: the version.
        gate: mapping from metric name to required gain.
        against: the model to compare with, as in `read_against`.
    """
    other_gate = _read_decision(version).get("gate", gate) != dict(gate)
    return was_refused(version) and (other_gate or read_against(version.tags) != against)


def read_against(tags: Mapping[str, str]) -> str:
    """Return the model with which the gate first compares a version, by its tags: `champion` or `start`."""
    return tags.get(AGAINST, "champion")


def _make_champion(client: "MlflowClient", version: "ModelVersion", verdict: Verdict, champion: str | None) -> None:
    """Check a version's files, record the promotion, and move the champion's alias to the version."""
    _check_files(client, version)
    record_decision(client, version, "promoted", verdict, champion)
    if find_champion(client, version.name) != champion:  # a process with another store has its own lock
        raise LeaseHeld(f"The champion of {version.name} changed during the comparison. Run the command again.")
    client.set_registered_model_alias(version.name, CHAMPION, str(version.version))


def compare(
    client: "MlflowClient", version: "ModelVersion", champion: str | None, gate: Mapping[str, float]
) -> Verdict:
    """Compare a candidate with the champion. Return the gate's verdict.

    Args:
        client: registry client.
        version: the candidate. If its tag `against` is `start`, it must also be better than the model from which its
            training started.
        champion: version number of the champion, if any.
        gate: mapping from metric name to required gain.
    """
    current_champion = None
    if champion:
        current_champion = _make_contender(client, client.get_model_version(version.name, champion))
    start = None
    if read_against(version.tags) == "start":
        read_outcomes = functools.partial(model_versions.read_outcomes, client, version, of_start_model=True)
        # The evaluation of the candidate has also tested its start, on the same questions.
        start = Contender("its start", {"test_set": version.tags.get("test_set", "")}, read_outcomes)
    return decide(_make_contender(client, version), current_champion, gate, start)


def _make_contender(client: "MlflowClient", version: "ModelVersion") -> Contender:
    """Return a version as a contender for the gate, which downloads the version's outcomes only if needed."""
    read_outcomes = functools.partial(model_versions.read_outcomes, client, version)
    return Contender(f"version {version.version}", version.tags, read_outcomes)


def _check_files(client: "MlflowClient", version: "ModelVersion") -> None:
    """Raise an error if a version's files are incomplete, changed or not signed."""
    with model_versions.checked_download(client, version):
        pass


def roll_back(client: "MlflowClient", name: str, reason: str) -> int:
    """Restore the previous champion. Return its version number.

    A second call changes nothing: a champion that a rollback has restored stays champion.

    Raises:
        InputError: the model has no champion, or the champion replaced no other version.
        DataCorrupt, SignatureInvalid: the files differ from the registered files. The alias does not move.
    """
    with translate_errors(f"champion of {name}"):
        champion = find_champion(client, name)
        if champion is None:
            raise InputError(f"{name} has no champion: promote a version instead")
        champion_version = client.get_model_version(name, champion)
        if _read_decision(champion_version).get("what") == ROLLED_BACK_TO:
            logger.info("%s: version %s became champion by a rollback: to change it, promote a version", name, champion)
            return int(champion)
        previous = champion_version.tags.get(PREVIOUS)
        if not previous:
            raise InputError(f"{name} version {champion} did not replace another version: promote a version instead")
        restored_version = client.get_model_version(name, previous)
        _check_files(client, restored_version)
        # Record the decisions before the alias moves, so that another call can finish an interrupted rollback.
        champion_verdict = Verdict(False, f"rolled back to version {previous}: {reason}")
        _record_rollback(client, champion_version, "rolled back", champion_verdict)
        restored_verdict = Verdict(True, f"champion again after version {champion}: {reason}")
        _record_rollback(client, restored_version, ROLLED_BACK_TO, restored_verdict)
        client.set_registered_model_alias(name, CHAMPION, previous)
    logger.info("%s: champion is version %s again", name, previous)
    return int(previous)


def _record_rollback(client: "MlflowClient", version: "ModelVersion", action: str, verdict: Verdict) -> None:
    """Record a rollback's decision on one of its two versions."""
    record_decision(client, version, action, verdict, None)
    client.set_model_version_tag(version.name, version.version, GATE, verdict.reason)


def record_decision(
    client: "MlflowClient",
    version: "ModelVersion",
    action: str,
    verdict: Verdict,
    previous: str | None,
    gate: Mapping[str, float] | None = None,
) -> None:
    """Record a decision in a tag of the version and in a file of its MLflow run.

    Args:
        client: registry client.
        version: the promoted, refused or rolled-back version.
        action: promoted, refused, rolled back, or champion again.
        verdict: reason and figures.
        previous: version number of the champion before the decision, if any.
        gate: required gain by metric, for a refusal.
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
    if gate is not None:
        decision["gate"] = dict(gate)
    if version.run_id:  # the tag has only the last decision on a version, but the run keeps a file for each
        registered_tags = {key: value for key, value in version.tags.items() if key not in (DECISION, GATE)}
        # Some file systems refuse colons.
        file_name = f"{timestamp.replace(':', '')}-{action.replace(' ', '-')}-version-{version.version}.json"
        client.log_dict(version.run_id, decision | {"registered": registered_tags}, f"promotion/{file_name}")
    if action == "promoted" and previous:  # `roll_back` restores this version
        client.set_model_version_tag(version.name, version.version, PREVIOUS, previous)
    tag_value = json.dumps(decision, ensure_ascii=False)
    client.set_model_version_tag(version.name, version.version, DECISION, tag_value)


def identify_decider() -> dict[str, str]:
    """Return a description of who decides: a person, or a pipeline step with its service account and image."""
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
    """Return the last decision on a version, or an empty mapping for a version without decisions."""
    tag_value = version.tags.get(DECISION, "{}")
    tag_name = f"tag {DECISION} of {version.name} version {version.version}"
    return user_files.parse_json(tag_value, Decision, tag_name, "delete the tag, then run again", DataCorrupt)
