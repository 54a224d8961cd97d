"""Build specs describe artifacts to build. The functions of this module build an artifact in each process of a stage.

A launcher may send a build spec to other pods as JSON (`launchers`). The finished artifact goes to the store.
"""

import contextlib
import functools
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.adapters import storage
from components.platform import artifact_files, artifacts, costs, tracking
from infoxlm_core import manifests

if TYPE_CHECKING:
    from infoxlm_core.corpora.parallel import ParallelMap


@dataclass(frozen=True)
class BuildSpec:
    """Description of an artifact to build. A RayJob reads it from a JSON file, so all values must be valid JSON."""

    stage: str
    """prepare_corpus, tokenize_corpus, pretrain, finetune or translate."""
    store: str
    kind: str
    name: str
    """Name of the artifact `kind/name` in the store."""
    config: dict[str, Any]
    num_workers: int
    artifacts: dict[str, str]
    """Mapping from the core's argument name (corpus, shards_path or encoder) to the location of an input artifact."""
    run: str = ""
    """Checkpoint directory in STORE/runs; empty for stages that do not train."""
    sources: dict[str, str] | None = None
    """Mapping from the core's argument name to the source of a model outside the store; see the module `sources`."""
    tracker_run: str = ""
    """Id of the tracker's run that receives the curves during the training; empty: do not send curves."""
    pipeline_run: str = ""
    """Id of the pipeline run, for the processes of a RayJob."""
    min_workers: int = 0
    """Smallest number of workers for continuing a training run after nodes are lost; 0: wait for all workers."""
    job: str = ""
    """Name of the RayJob, if any."""

    @property
    def is_training(self) -> bool:
        """Whether all workers train together. Otherwise, the stage processes text."""
        return self.stage in TRAINING_INPUTS


def delete_checkpoints(spec: BuildSpec) -> None:
    """Delete the checkpoints of a finished training run. With the optimizer's state, they are larger than the model."""
    _delete_directory(spec.store, f"runs/{spec.run}")


def delete_intermediate_files(spec: BuildSpec) -> None:
    """Delete the files that the tasks of a finished preparation exchanged."""
    directory = _intermediate_directory(spec)
    # Delete the records of finished tasks first: a record without its task's files would break the next preparation.
    _delete_directory(spec.store, f"{directory}/done")
    _delete_directory(spec.store, directory)


def _intermediate_directory(spec: BuildSpec) -> str:
    """Return the store directory through which the tasks of a preparation exchange files."""
    return f"preparing/{spec.name}"


def _delete_directory(store: str, directory: str) -> None:
    """Delete a directory in a store and the directory's local copy."""
    shutil.rmtree(artifacts.local_directory(store) / directory, ignore_errors=True)
    if storage.is_remote(store):
        artifact_files.delete(f"{store}/{directory}")


# ---------------------------------------------------------------- training runs


def train(spec: BuildSpec, run: Path) -> dict[str, Any]:
    """Run one worker of a training run. Every worker of the process group calls this function.

    Args:
        spec: the artifact to build.
        run: local directory for the checkpoints of the training run.

    Returns:
        In the first worker, which builds the artifact, the facts for its manifest. In other workers, unused figures.
    """
    from infoxlm_core.training import distributed

    with distributed.sharing_errors():  # a single machine may be unable to fetch the inputs
        arguments = _make_training_arguments(spec, run)
        exists = artifacts.exists(spec.store, spec.kind, spec.name)
    # An earlier attempt may have built the artifact without uploading it. All workers use the first worker's answer,
    # because a worker that trains alone would wait forever.
    is_built = distributed.from_first(exists)
    if distributed.rank() == 0:
        return _build_trained_artifact(spec, arguments, is_built)
    if is_built:
        return {}
    with distributed.sharing_errors():
        pass  # wait until the first worker starts the training, or fails before it
    # Only the first worker exports the model, so nothing is written to the output of this worker.
    return _run_training_stage(spec.stage, output=run / "unused", **arguments)


def _build_trained_artifact(spec: BuildSpec, arguments: dict[str, Any], is_built: bool) -> dict[str, Any]:
    """Train and upload the artifact in the first worker. If the artifact is built, only upload it. Return its facts."""
    from infoxlm_core.training import distributed

    before_training = contextlib.ExitStack()

    def build(output: Path) -> dict[str, Any]:
        before_training.close()  # from here on, the training itself shares errors
        return _run_training_stage(spec.stage, output=output, **arguments)

    if is_built:  # the attempt that built the artifact has recorded its cost
        artifact = artifacts.get_or_build(spec.store, spec.kind, spec.name, build)
    else:
        with before_training:
            before_training.enter_context(distributed.sharing_errors())  # the other workers already wait
            device = costs.GPU if distributed.device().type == "cuda" else costs.CPU
            # The cost includes the upload, because the GPUs stay occupied during the upload.
            with costs.record_duration(spec.store, spec.kind, spec.name, distributed.world_size(), device):
                artifact = artifacts.get_or_build(spec.store, spec.kind, spec.name, build)
    return manifests.load(artifact)["facts"]


def _make_training_arguments(spec: BuildSpec, run: Path) -> dict[str, Any]:
    """Fetch the inputs, and return the arguments for the core's training function, except `output`."""
    from components.platform.training_runs import RemoteRun

    arguments = TRAINING_INPUTS[spec.stage](spec)
    arguments["run"] = run
    if spec.tracker_run:
        arguments["track"] = tracking.get_tracker().find_run(spec.tracker_run).follow
    if storage.is_remote(spec.store):
        # This name of the lease holder survives a restart, so the restarted worker need not wait for the old lease.
        holder = spec.job or f"{socket.gethostname()} {run}"
        arguments["remote"] = RemoteRun(f"{spec.store}/runs/{spec.run}", holder)
    return arguments


def _run_training_stage(stage: str, **arguments: Any) -> dict[str, Any]:
    """Call the core's training function for a stage, and return the facts for the artifact's manifest."""
    if stage == "pretrain":
        from infoxlm_core.stages import pretraining

        return pretraining.pretrain(**arguments)
    if stage == "finetune":
        from infoxlm_core.stages import finetuning

        return finetuning.finetune(**arguments)
    from infoxlm_core.systems.translation import stage as translation

    return translation.train(**arguments)


def _fetch_pretraining_inputs(spec: BuildSpec) -> dict[str, Any]:
    """Fetch the inputs of a pre-training run, and return them as arguments for `pretrain`."""
    from components.platform import sources
    from infoxlm_core.config import PretrainingConfig

    config = PretrainingConfig.parse(spec.config, "pretraining")
    if config.model.start:
        start = str(sources.fetch_model(config.model.start, artifacts.local_directory(spec.store)))
        model_config = config.model.model_copy(update={"start": start})
        config = config.model_copy(update={"model": model_config})
    shards = artifacts.open_shards(spec.artifacts["shards_path"])
    return {"config": config, "shards_path": shards.directory, "shards_source": shards.source}


def _fetch_finetuning_inputs(spec: BuildSpec) -> dict[str, Any]:
    """Fetch the inputs of a fine-tuning run, and return them as arguments for `finetune`."""
    from components.platform import sources
    from infoxlm_core import tasks

    local_store = artifacts.local_directory(spec.store)
    # The spec has the sources of the data instead of local paths, because each pod has its own disk.
    config = sources.fetch_task_data(tasks.parse(spec.config, "finetuning"), local_store)
    paths = {name: artifacts.locate(location) for name, location in spec.artifacts.items()}
    for name, source in (spec.sources or {}).items():
        paths[name] = sources.fetch_model(source, local_store)
    return {"config": config, "encoder": paths["encoder"], "corpus": paths.get("corpus")}


def _fetch_translation_inputs(spec: BuildSpec) -> dict[str, Any]:
    """Fetch the inputs for training a translator, and return them as arguments for `translation.stage.train`."""
    from infoxlm_core.systems.translation.config import TranslationConfig

    config = TranslationConfig.parse(spec.config, "translation")
    paths = {name: artifacts.locate(location) for name, location in spec.artifacts.items()}
    return {"config": config, **paths}


TRAINING_INPUTS = {
    "pretrain": _fetch_pretraining_inputs,
    "finetune": _fetch_finetuning_inputs,
    "translate": _fetch_translation_inputs,
}
"""Functions that fetch the inputs of a training run, by stage. All workers of these stages train together."""


# ---------------------------------------------------------------- text


def _prepare_corpus(spec: BuildSpec, parallel_map: "ParallelMap | None", output: Path) -> dict[str, Any]:
    """Prepare a corpus in `output`, and return the facts for its manifest."""
    from components.platform import sources
    from infoxlm_core.config import PreparationConfig
    from infoxlm_core.corpora.parallel import map_in_process
    from infoxlm_core.stages import preparation

    # Make paths absolute, because the working directories of the workers may differ.
    config = sources.make_paths_absolute(PreparationConfig.parse(spec.config, "preparation"))
    local_store = artifacts.local_directory(spec.store).absolute()
    fetch_corpora = functools.partial(sources.fetch_corpora, store=local_store)
    run_tasks = parallel_map or map_in_process
    directory = _intermediate_directory(spec)
    if os.environ.get("RAY_ADDRESS") and storage.is_remote(spec.store):
        # The workers share no disk, so each worker fetches the corpora it reads. Only this process reads the test sets.
        test_sets = fetch_corpora(config.model_copy(update={"corpora": ()})).evaluation_sets
        config_with_local_tests = config.model_copy(update={"evaluation_sets": test_sets})
        shared_files = storage.open(f"{spec.store}/{directory}")
        report = preparation.prepare(config_with_local_tests, output, shared_files, run_tasks, fetch_corpora)
    else:
        local_files = storage.open(f"{local_store}/{directory}")
        report = preparation.prepare(fetch_corpora(config), output, local_files, run_tasks)
    preparation.check_labels(config, output)
    return preparation.build_facts(report)


def _tokenize_corpus(spec: BuildSpec, parallel_map: "ParallelMap | None", output: Path) -> dict[str, Any]:
    """Tokenize a corpus into `output`, and return the facts for its manifest."""
    from components.platform import sources
    from infoxlm_core.config import TokenizationConfig
    from infoxlm_core.stages import tokenization

    config = TokenizationConfig.parse(spec.config, "tokenization")
    if config.model:
        tokenizer, _ = sources.fetch_tokenizer(config.model, artifacts.local_directory(spec.store))
        config = config.model_copy(update={"model": tokenizer})
    corpus = artifacts.locate(spec.artifacts["corpus"])
    return tokenization.tokenize(config, corpus, output, parallel_map)


TEXT_STAGES = {"prepare_corpus": _prepare_corpus, "tokenize_corpus": _tokenize_corpus}
"""Functions that process text, by stage. One process calls the function and may send chunks of text to workers."""
