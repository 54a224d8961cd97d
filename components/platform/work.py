"""Work for many processes: what is to be made, as plain values, and what the processes do for it.

It may begin in one pod and be done in others (`launchers`); then it travels as JSON. The result is found in the store.
"""

import contextlib
import functools
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.adapters import storage
from components.platform import artifact_files, artifacts, costs, tracking
from infoxlm_core import manifests

if TYPE_CHECKING:
    from infoxlm_core.corpora.parallel import ParallelMap


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
    tracker_run: str = ""
    """Id of the run that gets the curves; empty: nowhere yet."""
    pipeline_run: str = ""
    min_workers: int = 0
    """Of a training on a cluster that has lost nodes: with how few it goes on; 0: it waits for all."""
    job: str = ""
    """Name of the RayJob, if it is one."""


def delete_checkpoints(work: Work) -> None:
    """Remove the checkpoints of a training that is done."""
    shutil.rmtree(artifacts.local(work.store) / "runs" / work.run, ignore_errors=True)
    if storage.is_remote(work.store):
        artifact_files.drop(f"{work.store}/runs/{work.run}")


def train(work: Work, run: Path) -> dict[str, Any]:
    """The body of every worker: fetch, train together; the first one makes the artifact and returns its facts."""
    from components.platform.training_runs import RemoteRun
    from infoxlm_core.training import distributed

    more: dict[str, Any] = {"run": run}
    if work.tracker_run:
        more["track"] = tracking.tracker().find_run(work.tracker_run).follow
    if storage.is_remote(work.store):
        more["remote"] = RemoteRun(f"{work.store}/runs/{work.run}", work.job or f"{socket.gethostname()} {run}")
    core = functools.partial(TOGETHER[work.stage](work), **more)
    ready = distributed.from_first(artifacts.is_made(work.store, work.kind, work.name))  # before a crash, but not sent
    if distributed.rank():
        return {} if ready else core(output=run / "nowhere")
    device = costs.GPU if distributed.device().type == "cuda" else costs.CPU
    price = costs.measured(work.store, work.kind, work.name, distributed.world_size(), device)
    with contextlib.nullcontext() if ready else price:
        made = artifacts.get_or_build(work.store, work.kind, work.name, lambda output: core(output=output))
    return manifests.load(made)["facts"]


def _pretrain(work: Work) -> Callable[..., dict[str, Any]]:
    from components.platform import sources
    from infoxlm_core.config import PretrainingConfig
    from infoxlm_core.stages import pretraining

    config = PretrainingConfig.parse(work.config, "pretraining")
    if config.model.start:
        found = str(sources.fetch_model(config.model.start, artifacts.local(work.store)))
        config = config.model_copy(update={"model": config.model.model_copy(update={"start": found})})
    return functools.partial(
        pretraining.pretrain, config=config, shards_path=artifacts.locate(work.artifacts["shards_path"])
    )


def _finetune(work: Work) -> Callable[..., dict[str, Any]]:
    from components.platform import sources
    from infoxlm_core import tasks
    from infoxlm_core.stages import finetuning

    store = artifacts.local(work.store)
    config = sources.localise(tasks.parse(work.config, "finetuning"), store)
    places = {name: artifacts.locate(place) for name, place in work.artifacts.items()}
    places |= {name: sources.fetch_model(source, store) for name, source in (work.sources or {}).items()}
    return functools.partial(finetuning.finetune, config, places["encoder"], places.get("corpus"))


def _prepare(work: Work, parallel_map: "ParallelMap | None", output: Path) -> dict[str, Any]:
    from components.platform import sources
    from infoxlm_core.config import PreparationConfig
    from infoxlm_core.stages import preparation

    config = PreparationConfig.parse(work.config, "preparation")
    local = sources.localise_corpora(config, artifacts.local(work.store))
    return preparation.facts(preparation.prepare(local, output, parallel_map))


def _tokenize(work: Work, parallel_map: "ParallelMap | None", output: Path) -> dict[str, Any]:
    from components.platform import sources
    from infoxlm_core.config import TokenizationConfig
    from infoxlm_core.stages import tokenization

    config = TokenizationConfig.parse(work.config, "tokenization")
    if config.model:
        config = config.model_copy(update={"model": sources.fetch_tokenizer(config.model, artifacts.local(work.store))})
    return tokenization.tokenize(config, artifacts.locate(work.artifacts["corpus"]), output, parallel_map)


TOGETHER = {"pretrain": _pretrain, "finetune": _finetune}
"""Every worker runs them, joined in a process group."""
LED = {"prepare_corpus": _prepare, "tokenize_corpus": _tokenize}
"""One process runs them; it may give chunks of text to others."""
