"""Trainings: which run one goes on with, and the fine-tuning that a suite's trial needs.

It goes on with the run of its own name, and never silently with another than it was begun with. A run is named by all
that decides its result, so with other data or settings it is another run, and would begin at step 0. What a pipeline
has begun is therefore written down, in STORE/begun/PIPELINE.json, and compared.
"""

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from components.platform import artifacts, keys, launchers, runtime, sources, tracking, work
from infoxlm_core import manifests, outside
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.errors import ConfigError, InputError
from infoxlm_core.tasks import task_of
from infoxlm_core.training import fingerprint

logger = logging.getLogger(__name__)


class Begun(TypedDict):
    """What a pipeline has begun to train."""

    pipeline_run: str
    run: str
    artifact: str
    fingerprint: dict[str, Any]


def choose_run(
    store: str,
    kind: str,
    name: str,
    config: PretrainingConfig,
    inputs: Mapping[str, str],
    trial: Mapping[str, Any] | None = None,
) -> str:
    """The folder of STORE/runs that has the checkpoints of a training.

    If the same pipeline run began with something else, and did not finish it, that is an error; if another run of the
    pipeline did, a person has started something new, and reads which training stays unfinished.

    Args:
        store: directory, or s3://bucket/prefix.
        kind: of the artifact that the training makes.
        name: of that artifact.
        config: of the training. If `checkpoints.resume` names a run, it is that.
        inputs: digests by name, to name what differs.
        trial: of an ablation.

    Raises:
        ConfigMismatch: this pipeline run has begun to train on other data, or by another version of the stage.
        InputError: `checkpoints.resume` names no run.
    """
    run, resume = f"{kind}-{name}", config.checkpoints.resume
    if artifacts.is_made(store, kind, name):
        return run
    if resume:
        if trial:
            raise ConfigError(
                "pretraining.checkpoints.resume: it names one run, and the trials of an ablation are many"
            )
        if not _has_saved(store, resume):
            raise InputError(f"pretraining.checkpoints.resume: {store}/runs has no run {resume} with a checkpoint")
        run = resume
    place = f"begun/{_pipeline(trial)}.json"
    decisive = fingerprint.decisive(config, manifests.VERSIONS[kind], inputs)
    begun = {"pipeline_run": runtime.pipeline_run(), "run": run, "artifact": name, "fingerprint": decisive}
    said = artifacts.read(store, place)
    before = outside.parse_json(said, Begun, f"{store}/{place}", "delete it, then run again") if said else None
    if before and before["run"] != run and _is_unfinished(store, kind, before):
        changed, path = fingerprint.differences(before["fingerprint"], decisive), f"{store}/runs/{before['run']}"
        if before["pipeline_run"] == begun["pipeline_run"]:
            raise fingerprint.mismatch(path, changed)
        logger.warning(
            "%s stays unfinished, this is another run: %s; to go on with it all the same: checkpoints.resume: %s",
            path, "; ".join(changed), before["run"],
        )  # fmt: skip
    if begun != before:
        artifacts.write(store, place, json.dumps(begun, indent=1, sort_keys=True))
    return run


def digest_data(settings: Any, store: Path) -> list[str]:
    """Digests of the data that a task is learned from, fetched into the store if they are elsewhere."""
    local = sources.localise(settings, store)
    _, data = task_of(local).training_part(local)
    return keys.digest_inputs([path for paths in data.values() for path in paths])


def tune(
    settings: Any, local: Any, source: str, encoder: Path, num_workers: int, store: str, run: tracking.Run
) -> tuple[Path, dict[str, Any]]:
    """The model that a trial of a suite measures, fine-tuned if its task needs that, and what its training said.

    It is named by what decides its weights alone, so that trials that only test otherwise share it.

    Args:
        settings: of the task.
        local: the same with all data on this machine.
        source: of the encoder.
        encoder: the same on this machine.
        num_workers: of the training.
        store: directory, or s3://bucket/prefix.
        run: gets the curves.
    """
    task = task_of(local)
    if not task.trained:
        return encoder, {}
    part, data = task.training_part(local)
    inputs = [*keys.digest_inputs(str(encoder)), keys.digest_inputs_by_role(data)]
    if task.depends_on_workers(part, encoder):
        inputs.append(f"workers={max(1, num_workers)}")
    name = keys.artifact_key("tuned", task.without_data(part), *inputs)
    wanted = work.Work(
        stage="finetune",
        store=store,
        kind="tuned",
        name=name,
        run=f"tuned-{name}",
        config=settings.model_dump(mode="json"),
        artifacts={},
        sources={"encoder": source},
        num_workers=num_workers,
        tracker_run=run.id,
    )
    with artifacts.exclusive(store, "tuned", name):  # another trial may need the same model
        model = artifacts.locate(artifacts.url_of(launchers.run(wanted)))  # every byte compared: it is read now
        work.delete_checkpoints(wanted)  # gigabytes of checkpoints that nobody needs any more
    run.log_curves(model / "metrics.jsonl")
    return model, manifests.load(model)["facts"] | {"tuned": f"tuned/{name}"}


def _pipeline(trial: Mapping[str, Any] | None) -> str:
    """A name that a pipeline keeps when it is started again, and that its trials do not share."""
    name = os.environ.get("RUN_NAME") or runtime.pipeline_run()
    return re.sub(r"[^\w.-]+", "-", f"{name} {trial['variant']} {trial['seed']}" if trial else name)


def _has_saved(store: str, run: str) -> bool:
    return artifacts.read(store, f"runs/{run}/saved.json") is not None


def _is_unfinished(store: str, kind: str, begun: Mapping[str, Any]) -> bool:
    return _has_saved(store, begun["run"]) and not artifacts.is_made(store, kind, begun["artifact"])
