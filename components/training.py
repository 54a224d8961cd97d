"""Train: on a cluster's GPUs, on Ray workers of this machine, or in this process. The result is found in the store.

A training is described by plain values (`Work`), because it may begin in one pod and compute in others:

    a step of the pipeline      writes STORE/work/JOB.json, has KubeRay make a cluster, follows it (`ray_job`)
    the head of that cluster    `python -m components.job STORE/work/JOB.json`: starts Ray Train (`here`)
    every worker                fetches what it needs from the store, trains; the first sends the result (`_perform`)

On a laptop the step itself is the second of these, and all share a directory.
"""

import functools
import json
import logging
import shutil
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from components import runtime
from components.adapters import object_store, ray_train
from infoxlm_core import manifests
from infoxlm_core.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """A training, as plain values."""

    stage: str
    """pretrain or finetune."""
    store: str
    kind: str
    name: str
    """The artifact to be made is `kind/name` of the store."""
    run: str
    """Its checkpoints are in `STORE/runs/RUN`."""
    config: dict
    artifacts: dict[str, str]
    """Places in the store, by the names of the core's arguments: shards_path, encoder, corpus."""
    num_workers: int
    sources: dict[str, str] | None = None
    """Likewise places of models outside the store; see `model_source`."""
    mlflow_run: str = ""
    """Where the curves go; empty: nowhere yet."""
    pipeline_run: str = ""
    job: str = ""
    """Name of the RayJob, if it is one."""


def train(work: Work, cluster: dict | None = None, task: Any = None) -> Path:
    """Return the artifact of a training on this machine, trained if nobody has done so before.

    Args:
        cluster: a `ClusterConfig` as a mapping: train there; empty: train here.
        task: `dsl.TaskConfig` of the step, whose resources, node selector and tolerations are those of the workers.

    Raises:
        TryAgain: of some kind; the same again goes on from the last checkpoint.
        and what the core's stage raises.
    """
    if found := runtime.made(work.store, work.kind, work.name):
        return found
    if cluster:
        _on_cluster(work, cluster, task)
    else:
        here(work)
    found = runtime.made(work.store, work.kind, work.name)
    assert found, "a training that is done has left its result"
    return found


def here(work: Work) -> None:
    """Train on Ray workers: of this machine, or of the cluster that this process is the driver of."""
    run = runtime.local(work.store) / "runs" / work.run
    ray_train.run(_perform, work.num_workers, run=run, work=work)


def forget(work: Work) -> None:
    """Remove the checkpoints of a training that is done."""
    shutil.rmtree(runtime.local(work.store) / "runs" / work.run, ignore_errors=True)
    if object_store.is_url(work.store):
        object_store.drop(f"{work.store}/runs/{work.run}")


def _on_cluster(work: Work, cluster: dict, task: Any) -> None:
    """Hand the training to a RayJob and follow it to its end."""
    from components.adapters import lease, ray_job
    from components.cluster import ClusterConfig

    checked = ClusterConfig.parse(cluster, "cluster")
    if not object_store.is_url(work.store):
        raise ConfigError(f"store: workers of a cluster share no directory {work.store}: give s3://bucket/prefix")
    if not work.num_workers:
        raise ConfigError("num_workers: a cluster trains on Ray workers, one a GPU: set it to 1 or more")
    run = runtime.pipeline_run()
    job = ray_job.job_name(work.stage, run, f"{work.kind}/{work.name}")
    place = f"work/{job}.json"
    described = asdict(work) | {"pipeline_run": run, "job": job}
    runtime.write(work.store, place, json.dumps(described, indent=1, sort_keys=True))
    outcome = runtime.outcome_name(job)
    lease.check(f"{work.store}/runs/{work.run}/lease.json", job)  # another pipeline run may train the same
    ray_job.run(
        job,
        f"{work.store}/{place}",
        checked,
        work.num_workers,
        task,
        ask_to_stop=lambda: runtime.write(work.store, f"runs/{work.run}/stop", ""),
        ended=lambda: json.loads(runtime.read(work.store, outcome) or b"null"),
    )


def _perform(work: Work, run: Path) -> dict:
    """The body of every worker: fetch, train together; the first one makes the artifact and returns its facts."""
    from components.adapters.remote_run import RemoteRun
    from infoxlm_core.training import distributed

    more: dict[str, Any] = {"run": run}
    if work.mlflow_run:
        from components.adapters import mlflow_tracker

        more["track"] = functools.partial(mlflow_tracker.MlflowTracker, run_id=work.mlflow_run)
    if object_store.is_url(work.store):
        more["elsewhere"] = RemoteRun(f"{work.store}/runs/{work.run}", work.job or f"{socket.gethostname()} {run}")
    train = functools.partial(_STAGES[work.stage](work), **more)
    ready = distributed.from_first(runtime.is_made(work.store, work.kind, work.name))  # before a crash, but not sent
    if distributed.rank():
        return {} if ready else train(output=run / "nowhere")
    return manifests.load(runtime.make(work.store, work.kind, work.name, lambda output: train(output=output)))["facts"]


def _pretrain(work: Work) -> Callable[..., dict]:
    from components.adapters import model_source
    from infoxlm_core import pretraining
    from infoxlm_core.config import PretrainingConfig

    config = PretrainingConfig.parse(work.config, "pretraining")
    if config.model.start:
        found = str(model_source.fetch(config.model.start, runtime.local(work.store)))
        config = config.model_copy(update={"model": config.model.model_copy(update={"start": found})})
    return functools.partial(
        pretraining.pretrain, config=config, shards_path=runtime.locate(work.artifacts["shards_path"])
    )


def _finetune(work: Work) -> Callable[..., dict]:
    from components.adapters import data_source, model_source
    from infoxlm_core import finetuning, suite
    from infoxlm_core.config import AnsweringConfig, FinetuningConfig

    kind = AnsweringConfig if work.config.get("task") == "question_answering" else FinetuningConfig
    store = runtime.local(work.store)
    config = suite.localise(kind.parse(work.config, "finetuning"), lambda source: str(data_source.fetch(source, store)))
    assert isinstance(config, kind)
    places = {name: runtime.locate(place) for name, place in work.artifacts.items()}
    places |= {name: model_source.fetch(source, store) for name, source in (work.sources or {}).items()}
    return functools.partial(finetuning.finetune, config, places["encoder"], places.get("corpus"))


_STAGES = {"pretrain": _pretrain, "finetune": _finetune}
