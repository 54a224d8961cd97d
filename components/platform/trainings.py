"""Which run a training goes on with: the one of its own name, and never silently another than it was begun with.

A run is named by all that decides its result, so with other data or settings it is another run, and would begin at
step 0. What a pipeline has begun is therefore written down, in STORE/begun/PIPELINE.json, and compared.
"""

import json
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from components.platform import artifacts, runtime
from infoxlm_core import manifests
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.errors import ConfigError, InputError
from infoxlm_core.training import fingerprint

logger = logging.getLogger(__name__)


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
    before = json.loads(artifacts.read(store, place) or b"null")
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


def _pipeline(trial: Mapping[str, Any] | None) -> str:
    """A name that a pipeline keeps when it is started again, and that its trials do not share."""
    name = os.environ.get("RUN_NAME") or runtime.pipeline_run()
    return re.sub(r"[^\w.-]+", "-", f"{name} {trial['variant']} {trial['seed']}" if trial else name)


def _has_saved(store: str, run: str) -> bool:
    return artifacts.read(store, f"runs/{run}/saved.json") is not None


def _is_unfinished(store: str, kind: str, begun: Mapping[str, Any]) -> bool:
    return _has_saved(store, begun["run"]) and not artifacts.is_made(store, kind, begun["artifact"])
