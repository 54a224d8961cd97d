"""The work of a stage: a description of the artifact to build, and the functions that build it in each process.

A launcher may send the description to other pods as JSON (`launchers`). The result goes to the store.
"""

import contextlib
import functools
import os
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
    """Description of the artifact to build, in values that can be written as JSON."""

    stage: str
    """prepare_corpus, tokenize_corpus, pretrain, finetune or translate."""
    store: str
    kind: str
    name: str
    """The artifact to build is `kind/name` of the store."""
    config: dict[str, Any]
    num_workers: int
    artifacts: dict[str, str]
    """Locations of the input artifacts by argument name of the core's stage: corpus, shards_path, encoder."""
    run: str = ""
    """Folder of STORE/runs for the checkpoints of a training run."""
    sources: dict[str, str] | None = None
    """Sources of models outside of the store by the same argument names; see `sources`."""
    tracker_run: str = ""
    """Id of the tracker's run that receives the curves during the training; empty: the curves are not sent."""
    pipeline_run: str = ""
    """Id of the pipeline run, for the processes of a RayJob."""
    min_workers: int = 0
    """Smallest number of workers with which a training run continues after the loss of nodes; 0: it waits for all."""
    job: str = ""
    """Name of the RayJob, if there is one."""


def delete_checkpoints(work: Work) -> None:
    """Delete the checkpoints of a finished training."""
    _delete(work.store, f"runs/{work.run}")


def delete_intermediate_files(work: Work) -> None:
    """Delete the files that the tasks of a finished preparation wrote for each other.

    The records of finished tasks are deleted first, because a record without the files of its task would make the next
    preparation fail.
    """
    folder = _intermediate_folder(work)
    for subfolder in (f"{folder}/done", folder):
        _delete(work.store, subfolder)


def _intermediate_folder(work: Work) -> str:
    """Return the folder of the store that the tasks of a preparation share."""
    return f"preparing/{work.name}"


def _delete(store: str, folder: str) -> None:
    """Delete a folder of a store and its copy on this machine."""
    shutil.rmtree(artifacts.local_directory(store) / folder, ignore_errors=True)
    if storage.is_remote(store):
        artifact_files.drop(f"{store}/{folder}")


def train(work: Work, run: Path) -> dict[str, Any]:
    """Train in this worker of a process group. Only the first worker builds the artifact and returns its facts."""
    from components.platform.training_runs import RemoteRun
    from infoxlm_core.training import distributed

    arguments: dict[str, Any] = {"run": run}
    if work.tracker_run:
        arguments["track"] = tracking.tracker().find_run(work.tracker_run).follow
    if storage.is_remote(work.store):
        holder = work.job or f"{socket.gethostname()} {run}"
        arguments["remote"] = RemoteRun(f"{work.store}/runs/{work.run}", holder)
    run_stage = functools.partial(TRAININGS[work.stage](work), **arguments)
    # An earlier attempt may have built the artifact without uploading it. All workers need the same answer, because a
    # worker that trains alone would wait for the others forever.
    is_built = distributed.from_first(artifacts.exists(work.store, work.kind, work.name))
    if distributed.rank() > 0:
        return {} if is_built else run_stage(output=run / "unused")
    with contextlib.ExitStack() as stack:
        if not is_built:
            # The cost includes the upload, because the GPUs are occupied until its end.
            device = costs.GPU if distributed.device().type == "cuda" else costs.CPU
            cost = costs.measured(work.store, work.kind, work.name, distributed.world_size(), device)
            stack.enter_context(cost)
        artifact = artifacts.get_or_build(work.store, work.kind, work.name, lambda output: run_stage(output=output))
    return manifests.load(artifact)["facts"]


def _bind_pretraining(work: Work) -> Callable[..., dict[str, Any]]:
    """Return the core's function that pre-trains, with its config and local input paths bound."""
    from components.platform import sources
    from infoxlm_core.config import PretrainingConfig
    from infoxlm_core.stages import pretraining

    config = PretrainingConfig.parse(work.config, "pretraining")
    if config.model.start:
        start = str(sources.fetch_model(config.model.start, artifacts.local_directory(work.store)))
        model_config = config.model.model_copy(update={"start": start})
        config = config.model_copy(update={"model": model_config})
    shards_path, shards_source = artifacts.open_shards(work.artifacts["shards_path"])
    return functools.partial(pretraining.pretrain, config=config, shards_path=shards_path, shards_source=shards_source)


def _bind_finetuning(work: Work) -> Callable[..., dict[str, Any]]:
    """Return the core's function that fine-tunes, with its config and local input paths bound."""
    from components.platform import sources
    from infoxlm_core import tasks
    from infoxlm_core.stages import finetuning

    store = artifacts.local_directory(work.store)
    config = sources.localise(tasks.parse(work.config, "finetuning"), store)
    paths = {name: artifacts.locate(location) for name, location in work.artifacts.items()}
    if work.sources:
        for name, source in work.sources.items():
            paths[name] = sources.fetch_model(source, store)
    return functools.partial(finetuning.finetune, config, paths["encoder"], paths.get("corpus"))


def _bind_translation(work: Work) -> Callable[..., dict[str, Any]]:
    """Return the core's function that trains a translator, with its config and local input paths bound."""
    from infoxlm_core.systems.translation import stage
    from infoxlm_core.systems.translation.config import TranslationConfig

    config = TranslationConfig.parse(work.config, "translation")
    paths: dict[str, Any] = {name: artifacts.locate(location) for name, location in work.artifacts.items()}
    return functools.partial(stage.train, config, **paths)


def _prepare(work: Work, parallel_map: "ParallelMap | None", output: Path) -> dict[str, Any]:
    """Prepare a corpus in `output`, and return the facts for its manifest."""
    from components.platform import sources
    from infoxlm_core.config import PreparationConfig
    from infoxlm_core.corpora.parallel import in_process
    from infoxlm_core.stages import preparation

    config = sources.make_paths_absolute(PreparationConfig.parse(work.config, "preparation"))
    store = artifacts.local_directory(work.store).absolute()  # workers may run in another folder
    localise = functools.partial(sources.localise_corpora, store=store)
    folder = _intermediate_folder(work)
    run_tasks = parallel_map or in_process
    if os.environ.get("RAY_ADDRESS") and storage.is_remote(work.store):
        # The workers share no disk, so each fetches the corpora that it reads. Only this process reads the test sets.
        test_sets = localise(config.model_copy(update={"corpora": ()})).evaluation_sets
        config_with_local_tests = config.model_copy(update={"evaluation_sets": test_sets})
        files = storage.open(f"{work.store}/{folder}")
        report = preparation.prepare(config_with_local_tests, output, files, run_tasks, localise)
    else:
        report = preparation.prepare(localise(config), output, storage.open(f"{store}/{folder}"), run_tasks)
    preparation.check_labels(config, output)
    return preparation.facts(report)


def _tokenize(work: Work, parallel_map: "ParallelMap | None", output: Path) -> dict[str, Any]:
    """Tokenize a corpus into `output`, and return the facts for its manifest."""
    from components.platform import sources
    from infoxlm_core.config import TokenizationConfig
    from infoxlm_core.stages import tokenization

    config = TokenizationConfig.parse(work.config, "tokenization")
    if config.model:
        tokenizer, _ = sources.fetch_tokenizer(config.model, artifacts.local_directory(work.store))
        config = config.model_copy(update={"model": tokenizer})
    corpus = artifacts.locate(work.artifacts["corpus"])
    return tokenization.tokenize(config, corpus, output, parallel_map)


TRAININGS = {"pretrain": _bind_pretraining, "finetune": _bind_finetuning, "translate": _bind_translation}
"""By stage, the functions that return a training run of the core, which all workers run together."""
TEXT_STAGES = {"prepare_corpus": _prepare, "tokenize_corpus": _tokenize}
"""By stage, the functions that process text in one process, which may send chunks of the text to others."""
