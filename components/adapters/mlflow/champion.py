"""What moves the alias `champion`: a promotion that the gate lets through, a person, a rollback.

Everything is written down before the alias moves, so that a crash leaves the old champion, and the same command again
finishes what it began.
"""

import getpass
import json
import logging
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from components.adapters.mlflow import runs as mlflow_runs
from components.adapters.mlflow import versions as registered
from infoxlm_core import outside
from infoxlm_core.errors import DataCorrupt, InputError, LeaseHeld
from infoxlm_core.results.gate import Contender, Verdict, decide

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger(__name__)

CHAMPION, CANDIDATE = "champion", "candidate"
GATE = "gate"
"""Tag with the verdict in words; written after the alias, so a version that has it is through."""
DECISION = "decision"
"""Tag with the last decision on a version, as JSON: verdict, intervals, who, when, by which run."""
PREVIOUS = "previous_champion"
"""Tag of a champion: the version that it replaced."""
ROLLED_BACK_TO = "champion again"
ATTEMPTS = 5  # when others promote at the same time


class Decision(TypedDict, total=False):
    """What the tag `DECISION` says, as far as it is read again."""

    what: str
    reason: str
    figures: dict[str, Any]


def _decision(version: "ModelVersion") -> dict[str, Any]:
    tag, where = version.tags.get(DECISION, "{}"), f"tag {DECISION} of {version.name} version {version.version}"
    return outside.parse_json(tag, Decision, where, "delete the tag, then run again", DataCorrupt)


def champion_of(client: "MlflowClient", name: str) -> str | None:
    """The number of the version that users get."""
    number = client.get_registered_model(name).aliases.get(CHAMPION)
    return None if number is None else str(number)  # a database gives an int, a server a text


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
    """
    name, number = version.name, version.version
    with mlflow_runs.translate_errors(f"champion of {name}"):
        for _ in range(ATTEMPTS):
            champion = champion_of(client, name)
            if champion and int(champion) == int(number):  # by a call that died before its end, or by another one
                said = _decision(client.get_model_version(name, number))
                verdict = Verdict(True, said.get("reason", "champion already"), said.get("figures", {}))
                break
            if code := version.tags.get(mlflow_runs.LOCAL_CODE):  # by hand neither: nobody can build it from a commit
                reason = f"candidate: made with local code {code}, commit it and train with an image that has it"
                verdict = Verdict(False, reason)
            elif by_hand:
                verdict = Verdict(True, f"champion by hand: {by_hand}")
            else:
                verdict = compare_with_champion(client, version, gate)
            if not verdict.passed:
                record(client, version, "refused", verdict, champion)
                break
            with registered.fetched(client, version):
                pass  # complete, unchanged, and signed if it must be
            record(client, version, "promoted", verdict, champion)
            if champion_of(client, name) == champion:  # else it was compared with one that is none any more
                client.set_registered_model_alias(name, CHAMPION, number)
                break
        else:
            raise LeaseHeld(f"{name}: its champion changed {ATTEMPTS} times while it was compared: try again")
        client.set_model_version_tag(name, number, GATE, verdict.reason)
    logger.info("%s version %s: %s", name, number, verdict.reason)
    return verdict


def compare_with_champion(client: "MlflowClient", version: "ModelVersion", gate: Mapping[str, float]) -> Verdict:
    """What the gate says of a candidate beside the present champion."""
    champion = champion_of(client, version.name)
    holder = _present(client, client.get_model_version(version.name, champion)) if champion else None
    return decide(_present(client, version), holder, gate)


def _present(client: "MlflowClient", version: "ModelVersion") -> Contender:
    return Contender(str(version.version), version.tags, lambda: registered.read_outcomes(client, version))


def roll_back(client: "MlflowClient", name: str, reason: str) -> int:
    """Make the version champion again that the present one replaced; return its number.

    Called again it changes nothing: a champion that a rollback has made stays.

    Raises:
        InputError: no champion, or none before it.
        DataCorrupt, SignatureInvalid: its files are not those that were registered; the alias stays.
    """
    with mlflow_runs.translate_errors(f"champion of {name}"):
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
        with registered.fetched(client, version):
            pass
        for one, what, said in (
            (present, "rolled back", f"rolled back to version {before}: {reason}"),
            (version, ROLLED_BACK_TO, f"champion again after version {champion}: {reason}"),
        ):
            record(client, one, what, Verdict(one is version, said), None)
            client.set_model_version_tag(name, one.version, GATE, said)
        client.set_registered_model_alias(name, CHAMPION, before)
    logger.info("%s: champion is version %s again", name, before)
    return int(before)


def record(client: "MlflowClient", version: "ModelVersion", what: str, verdict: Verdict, previous: str | None) -> None:
    """Write a decision down, as a tag of the version and as a file of its MLflow run."""
    decision: dict[str, Any] = {
        "what": what, "model": version.name, "version": int(version.version), "reason": verdict.reason,
        "figures": verdict.figures, "previous_champion": int(previous) if previous else None,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "by": who(),
    }  # fmt: skip
    if version.run_id:
        origin = {key: value for key, value in version.tags.items() if key not in (DECISION, GATE)}
        stem = f"{decision['at'].replace(':', '')}-{what.replace(' ', '-')}-version-{version.version}"
        client.log_dict(version.run_id, decision | {"registered": origin}, f"promotion/{stem}.json")
    if what == "promoted" and previous:
        client.set_model_version_tag(version.name, version.version, PREVIOUS, previous)
    client.set_model_version_tag(version.name, version.version, DECISION, json.dumps(decision, ensure_ascii=False))


def who() -> dict[str, str]:
    """Who decides: a person, or a step of a pipeline run with its service account and image."""
    if pod := os.environ.get("KFP_POD_NAME"):
        known = {"run": "RUN_ID", "service_account": "SERVICE_ACCOUNT", "image": "INFOXLM_IMAGE"}
        return {"pod": pod} | {key: os.environ[name] for key, name in known.items() if os.environ.get(name)}
    person = os.environ.get("MLFLOW_TRACKING_USERNAME") or getpass.getuser()
    return {"user": person} | ({"run": os.environ["RUN_ID"]} if os.environ.get("RUN_ID") else {})
