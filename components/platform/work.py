"""Work for many machines: on a cluster's pods, on Ray workers of this machine, or in this process.

It is described by plain values (`Work`), because it may begin in one pod and be done in others:

    a step of the pipeline      writes STORE/work/JOB.json, has KubeRay make a cluster, follows it (`ray_job`)
    the head of that cluster    `python -m components.platform.job STORE/work/JOB.json`: leads workers (`run_locally`)
    the workers                 train together, the first sends the result (`_train`); or work on chunks of text

On a laptop the step itself is the second of these, and all share a directory. The result is found in the store.
"""

import contextlib
import functools
import json
import logging
import shutil
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from components.adapters import storage
from components.adapters.ray import train as ray_train
from components.platform import runtime, stores, transfer
from infoxlm_core import manifests
from infoxlm_core.errors import ConfigError, InfoXLMError

logger = logging.getLogger(__name__)
_HEARTBEAT_SECONDS = 60.0


@dataclass(frozen=True)
class Work:
    """What is to be made, as plain values."""

    stage: str
    """prepare_corpus, tokenize_corpus, pretrain or finetune."""
    store: str
    kind: str
    name: str
    """The artifact to be made is `kind/name` of the store."""
    config: dict[str, Any]
    num_workers: int
    artifacts: dict[str, str]
    """Places in the store, by the names of the core's arguments: corpus, shards_path, encoder."""
    run: str = ""
    """Of a training: its checkpoints are in `STORE/runs/RUN`."""
    sources: dict[str, str] | None = None
    """Likewise places of models outside the store; see `sources`."""
    mlflow_run: str = ""
    """Where the curves go; empty: nowhere yet."""
    pipeline_run: str = ""
    job: str = ""
    """Name of the RayJob, if it is one."""


def run(work: Work, cluster: dict[str, Any] | None = None, task: Any = None) -> Path:
    """Return the artifact on this machine, made if nobody has made it before.

    Args:
        work: the artifact and all that it is made of.
        cluster: a `ClusterConfig` as a mapping: a RayJob does the work, if it has workers; empty: it is done here.
        task: `dsl.TaskConfig` of the step, whose resources, node selector and tolerations are those of the workers.

    Raises:
        TryAgain: of some kind; the same again goes on from the last checkpoint.
        and what the core's stage raises.
    """
    if found := stores.lookup(work.store, work.kind, work.name):
        return found
    if cluster and (work.num_workers or work.stage in _TOGETHER):
        _on_cluster(work, cluster, task)
    else:
        run_locally(work)
    found = stores.lookup(work.store, work.kind, work.name)
    if not found:
        raise RuntimeError(f"{work.kind}/{work.name} was made and is not there")
    return found


def run_locally(work: Work) -> None:
    """Do it on Ray workers: of this machine, or of the cluster that this process is the driver of."""
    if work.stage in _TOGETHER:
        run = stores.local(work.store) / "runs" / work.run
        ray_train.run(_train, work.num_workers, run=run, work=work)
    else:
        stores.get_or_build(work.store, work.kind, work.name, functools.partial(_LED[work.stage], work))


def delete_checkpoints(work: Work) -> None:
    """Remove the checkpoints of a training that is done."""
    shutil.rmtree(stores.local(work.store) / "runs" / work.run, ignore_errors=True)
    if storage.is_remote(work.store):
        transfer.drop(f"{work.store}/runs/{work.run}")


def _on_cluster(work: Work, cluster: dict[str, Any], task: Any) -> None:
    """Hand it to a RayJob and follow that to its end."""
    from components.adapters.kuberay import job as ray_job
    from components.platform import lease
    from components.settings.cluster import ClusterConfig

    checked = ClusterConfig.parse(cluster, "cluster")
    if not storage.is_remote(work.store):
        raise ConfigError(f"store: workers of a cluster share no directory {work.store}: give s3://bucket/prefix")
    if not work.num_workers:
        raise ConfigError("num_workers: a cluster trains on Ray workers, one a GPU: set it to 1 or more")
    run = runtime.pipeline_run()
    job = ray_job.job_name(work.stage, run, f"{work.kind}/{work.name}")
    place = f"work/{job}.json"
    described = asdict(work) | {"pipeline_run": run, "job": job}
    stores.write(work.store, place, json.dumps(described, indent=1, sort_keys=True))
    outcome = runtime.outcome_name(job)
    if work.run:
        lease.check(f"{work.store}/runs/{work.run}/lease.json", job)  # another pipeline run may train the same
    with _heartbeat(work.store, job):
        ray_job.run(
            job,
            f"{work.store}/{place}",
            checked,
            work.num_workers,
            task,
            ask_to_stop=lambda: stores.write(work.store, f"runs/{work.run}/stop", job) if work.run else None,
            ended=lambda: json.loads(stores.read(work.store, outcome) or b"null"),
        )


def heartbeat_path(job: str) -> str:
    """Where in the store a step shows that it follows its job."""
    return f"work/{job}.followed"


@contextlib.contextmanager
def _heartbeat(store: str, job: str) -> Iterator[None]:
    """Show once a minute that this step follows its job, which ends itself when nobody does (`job`)."""
    over, me = threading.Event(), uuid.uuid4().hex

    def give() -> None:
        number = 0
        while not over.wait(_HEARTBEAT_SECONDS if number else 0):
            number += 1
            with contextlib.suppress(InfoXLMError):
                stores.write(store, heartbeat_path(job), f"{me} {number}")

    threading.Thread(target=give, name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _train(work: Work, run: Path) -> dict[str, Any]:
    """The body of every worker: fetch, train together; the first one makes the artifact and returns its facts."""
    from components.platform.remote_run import RemoteRun
    from infoxlm_core.training import distributed

    more: dict[str, Any] = {"run": run}
    if work.mlflow_run:
        from components.adapters.mlflow import tracker as mlflow_tracker

        more["track"] = functools.partial(mlflow_tracker.MlflowTracker, run_id=work.mlflow_run)
    if storage.is_remote(work.store):
        more["elsewhere"] = RemoteRun(f"{work.store}/runs/{work.run}", work.job or f"{socket.gethostname()} {run}")
    core = functools.partial(_TOGETHER[work.stage](work), **more)
    ready = distributed.from_first(stores.is_made(work.store, work.kind, work.name))  # before a crash, but not sent
    if distributed.rank():
        return {} if ready else core(output=run / "nowhere")
    return manifests.load(stores.get_or_build(work.store, work.kind, work.name, lambda output: core(output=output)))[
        "facts"
    ]


def _pretrain(work: Work) -> Callable[..., dict[str, Any]]:
    from components.platform import sources
    from infoxlm_core.config import PretrainingConfig
    from infoxlm_core.stages import pretraining

    config = PretrainingConfig.parse(work.config, "pretraining")
    if config.model.start:
        found = str(sources.fetch_model(config.model.start, stores.local(work.store)))
        config = config.model_copy(update={"model": config.model.model_copy(update={"start": found})})
    return functools.partial(
        pretraining.pretrain, config=config, shards_path=stores.locate(work.artifacts["shards_path"])
    )


def _finetune(work: Work) -> Callable[..., dict[str, Any]]:
    from components.platform import sources
    from infoxlm_core import tasks
    from infoxlm_core.stages import finetuning

    store = stores.local(work.store)
    config = sources.localise(tasks.parse(work.config, "finetuning"), store)
    places = {name: stores.locate(place) for name, place in work.artifacts.items()}
    places |= {name: sources.fetch_model(source, store) for name, source in (work.sources or {}).items()}
    return functools.partial(finetuning.finetune, config, places["encoder"], places.get("corpus"))


def _prepare(work: Work, output: Path) -> dict[str, Any]:
    from components.adapters.ray import data as ray_data
    from components.platform import sources
    from infoxlm_core.config import PreparationConfig
    from infoxlm_core.stages import preparation

    config = PreparationConfig.parse(work.config, "preparation")
    local = sources.localise_corpora(config, stores.local(work.store))
    with ray_data.workers(work.num_workers) as spread:
        return preparation.facts(preparation.prepare(local, output, spread))


def _tokenize(work: Work, output: Path) -> dict[str, Any]:
    from components.adapters.ray import data as ray_data
    from components.platform import sources
    from infoxlm_core.config import TokenizationConfig
    from infoxlm_core.model import tokenizers
    from infoxlm_core.stages import tokenization

    config = TokenizationConfig.parse(work.config, "tokenization")
    if config.model:
        found = sources.fetch_model(config.model, stores.local(work.store), only=tokenizers.MODEL)
        config = config.model_copy(update={"model": str(found)})
    with ray_data.workers(work.num_workers) as spread:
        return tokenization.tokenize(config, stores.locate(work.artifacts["corpus"]), output, spread)


_TOGETHER = {"pretrain": _pretrain, "finetune": _finetune}
"""Every worker runs them, joined in a process group."""
_LED = {"prepare_corpus": _prepare, "tokenize_corpus": _tokenize}
"""The driver runs them and gives chunks to workers."""
