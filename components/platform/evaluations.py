"""Evaluate the models of a pipeline run, or measure the trials of a suite."""

import contextlib
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from components.platform import artifacts, builds, costs, launchers, runtime, sources
from components.platform.stage_run import StageRun, stage_run
from infoxlm_core import manifests
from infoxlm_core.config import EvaluationConfig
from infoxlm_core.errors import Preempted, WorkerLost
from infoxlm_core.results import evidence, trials
from infoxlm_core.tasks import task_of
from infoxlm_core.training import fingerprint, workers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluatedModel:
    """Store locations of an encoder and its fine-tuned classifier."""

    name: str
    encoder_location: str
    classifier_location: str
    digests: tuple[str, str]
    """Digests of the encoder and the classifier."""


def read_model(name: str, encoder: Any, classifier: Any) -> EvaluatedModel:
    """Return the model with the encoder and the classifier of two KFP inputs. The report uses `name`."""
    encoder_location, encoder_digest = artifacts.read_pointer(encoder)
    classifier_location, classifier_digest = artifacts.read_pointer(classifier)
    return EvaluatedModel(name, encoder_location, classifier_location, (encoder_digest, classifier_digest))


def read_start(encoder: Any, classifier: Any) -> EvaluatedModel:
    """Return the model before its training, named after its origin: a public model or random weights."""
    location, _ = artifacts.read_pointer(encoder)
    inputs = artifacts.read_manifest(location)["inputs"]
    name = evidence.PUBLIC_START if "model.start" in inputs else evidence.UNTRAINED
    return read_model(name, encoder, classifier)


def build_scores(step: StageRun, config: EvaluationConfig, corpus: Any, models: Sequence[EvaluatedModel]) -> Path:
    """Evaluate models on a corpus's held-out text, unless their scores exist. Return the directory with the scores.

    Args:
        step: the running component.
        config: evaluation settings, optionally with a guard set (sentences of general language).
        corpus: KFP input with the corpus.
        models: the trained model, optionally followed by the model before its training.
    """
    corpus_location, corpus_digest = artifacts.read_pointer(corpus)
    local_config = sources.fetch_guard_set(config, step.local_store)
    names = [model.name for model in models]  # part of the key, because the report contains them
    digests = [digest for model in models for digest in model.digests]
    key = sources.compute_key_with_guard("scores", local_config, corpus_digest, *names, *digests)
    # The report on an adapted public model shows the cost of all earlier steps.
    is_adaptation = evidence.PUBLIC_START in names  # the training started from a public model
    hours_before = costs.add_up(step.run.read_metrics()) if is_adaptation else {}

    def build(output: Path) -> dict[str, float]:
        from infoxlm_core.stages.evaluation import evaluate

        # In an ablation, the model keeps its name, which contains the variant and the seed.
        encoders, classifiers = _locate_models(models, names_adapted_model=is_adaptation and not step.trial)
        corpus_path = artifacts.locate(corpus_location)
        with costs.record_process_duration(step.store, "scores", key):
            return evaluate(local_config, corpus_path, encoders, classifiers, output, hours_before)

    return artifacts.get_or_build(step.store, "scores", key, build)


def _locate_models(
    models: Sequence[EvaluatedModel], names_adapted_model: bool
) -> tuple[dict[str, Path], dict[str, Path]]:
    """Return the local directories of encoders and of trained classifiers, each by model name.

    Args:
        models: the trained model, optionally followed by the model before its training.
        names_adapted_model: whether to name the trained model after the public model it was adapted from.
    """
    from infoxlm_core.model.huggingface import origin

    encoders = {}
    classifiers = {}
    trained_model = models[0]
    for model in models:
        encoder = artifacts.locate(model.encoder_location)
        name = origin.name_adapted(encoder) if names_adapted_model and model is trained_model else model.name
        encoders[name] = encoder
        classifier = artifacts.locate(model.classifier_location)
        if manifests.load(classifier)["facts"]["steps"] > 0:  # without labelled text, `finetune` trains nothing
            classifiers[name] = classifier
    return encoders, classifiers


class MeasuredTrial(NamedTuple):
    """Scores of a finished trial."""

    location: str
    """Location of the scores in the store."""
    digest: str
    metrics: dict[str, float]


def measure(planned_trial: Mapping[str, Any], store: str, num_workers: int) -> MeasuredTrial:
    """Measure an encoder on a task, after fine-tuning it if the task requires training.

    Args:
        planned_trial: a trial ("point") planned by `plan_suite`, with its model's "source" and its "settings".
        store: directory, or s3://bucket/prefix, for artifacts and checkpoints.
        num_workers: number of Ray workers for fine-tuning, one per GPU; 0: fine-tune inside this process.

    Raises:
        SystemExit: the trial failed; the store has the error.
    """
    trial = planned_trial["point"]
    source = planned_trial["source"]
    with stage_run("measure", store, trial) as step:
        settings = trials.read_settings(planned_trial["settings"])
        step.report(model=trial["model"], source=source, task=trial["task"], settings=settings)
        local_settings = sources.fetch_task_data(settings, step.local_store)
        task = task_of(local_settings)
        encoder = sources.fetch_model(source, step.local_store)
        if task.is_finetuned:
            model = _fine_tune(step, settings, local_settings, source, encoder, num_workers)
            training_facts = manifests.load(model)["facts"] | {"tuned": f"tuned/{model.name}"}
        else:
            model = encoder
            training_facts = {}
        model_digests = fingerprint.digest_inputs(str(model))
        data_digest = fingerprint.digest_inputs_by_role(task.list_data(local_settings))
        # The key contains the data's digest instead of its paths, so equal data at another path gives the same key.
        key = artifacts.compute_key("points", task.without_data(local_settings), *model_digests, data_digest)

        def build(output: Path) -> None:
            trials.measure_model(local_settings, encoder, model, training_facts, output)

        scores = artifacts.get_or_build(store, "points", key, build)
        metrics = task.name_metrics(trials.read_scores(scores / trials.SCORES), settings, trial["task"])
        step.report(metrics)
        step.run.log_artifacts(scores / trials.SCORES)
        step.run.end()
    return MeasuredTrial(artifacts.find_uri(scores), manifests.load(scores)["digest"], metrics)


def _fine_tune(
    step: StageRun, settings: Any, local_settings: Any, source: str, encoder: Path, num_workers: int
) -> Path:
    """Fine-tune the encoder of a trial, and return the local directory of the fine-tuned model.

    The model's key depends only on inputs that determine its weights. Trials that differ in their test sets therefore
    share the model.

    Args:
        step: the running step, whose tracker run receives the curves.
        settings: task settings.
        local_settings: task settings with local paths for all data.
        source: source of the encoder, as `sources.fetch_model` accepts it.
        encoder: local directory of the encoder.
        num_workers: number of Ray workers, one per GPU; 0: fine-tune inside this process.
    """
    task = task_of(local_settings)
    training_settings, data = task.select_training_inputs(local_settings)
    inputs = [*fingerprint.digest_inputs(str(encoder)), fingerprint.digest_inputs_by_role(data)]
    if task.depends_on_workers(training_settings, encoder):
        inputs.append(f"workers={max(1, num_workers)}")  # this process (0) counts as one worker
    name = artifacts.compute_key("tuned", task.without_data(training_settings), *inputs)
    training = builds.BuildSpec(
        stage="finetune",
        store=step.store,
        kind="tuned",
        name=name,
        run=f"tuned-{name}",
        config=settings.model_dump(mode="json"),  # without local paths, because each worker fetches the data itself
        artifacts={},
        sources={"encoder": source},
        num_workers=num_workers,
        tracker_run=step.run.id,
    )
    with artifacts.exclusive(step.store, "tuned", name):  # another trial may need the same model at the same time
        location = artifacts.find_uri(launchers.run(training))
        model = artifacts.locate(location)  # verifies every file before the checkpoints are deleted
        builds.delete_checkpoints(training)
    step.run.log_curves(model / "metrics.jsonl")
    return model


def measure_all(planned_trials: Sequence[Mapping[str, Any]], store: str, num_workers: int) -> dict[str, MeasuredTrial]:
    """Measure trials one after another, and return their results by name. Exit if any trial fails.

    If there are several trials, each trial runs in its own process, so that its memory and GPUs are released. After a
    failed trial, the remaining trials still run. After a signal to stop, no further trial is measured.

    Raises:
        SystemExit: at least one trial failed; the exit code is that of the last failure.
    """
    if len(planned_trials) == 1:  # no other trial needs the memory
        only_trial = planned_trials[0]
        return {only_trial["point"]["name"]: measure(only_trial, store, num_workers)}
    finished_trials: dict[str, MeasuredTrial] = {}
    exit_codes: list[int] = []
    stop_requested = threading.Event()

    def stop(*_: object) -> None:
        stop_requested.set()
        _terminate_children()

    with workers.handle_signals(stop):
        for number, planned_trial in enumerate(planned_trials, 1):
            name = planned_trial["point"]["name"]
            logger.info("Trial %d of %d: %s.", number, len(planned_trials), name)
            try:
                finished_trials[name] = _measure_in_child(planned_trial, store, num_workers, stop_requested)
            except SystemExit as failure:  # `report_failure` has stored the error
                exit_codes.append(int(failure.code or 0))
            # If the signal arrived when a trial had just finished, let the next trial fail at once. Otherwise, the step
            # would succeed although trials are missing.
            if stop_requested.is_set() and exit_codes:
                break
    if exit_codes:
        logger.error("%d of %d trials finished, %d failed.", len(finished_trials), len(planned_trials), len(exit_codes))
        # `runtime.read_failure` reports the newest error in the store, so exit with the code of the same trial.
        sys.exit(exit_codes[-1])
    return finished_trials


def _measure_in_child(
    planned_trial: Mapping[str, Any], store: str, num_workers: int, stop_requested: threading.Event
) -> MeasuredTrial:
    """Measure a trial in a new child process.

    Raises:
        SystemExit: the trial failed; the store has the error.
    """
    # A forked child would inherit the locks of this process, but not the threads that release them.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        future = executor.submit(_measure_for_parent, planned_trial, store, num_workers)
        if stop_requested.is_set():  # the signal may have arrived before the child process started
            _terminate_children()
        with contextlib.suppress(BrokenProcessPool, KeyboardInterrupt):  # the child was killed, or stopped by Ctrl-C
            return future.result()
    # Report the failure on behalf of the child.
    with runtime.report_failure(store, "measure", planned_trial["point"]):
        if stop_requested.is_set():
            raise Preempted("Stopped by a signal. Run again to measure the remaining trials.")
        raise WorkerLost("The process of the trial was killed (out of memory?).")
    raise AssertionError("unreachable, because `report_failure` exits")


def _measure_for_parent(planned_trial: Mapping[str, Any], store: str, num_workers: int) -> MeasuredTrial:
    """Measure a trial in this child process. If the parent was killed meanwhile, end the process afterwards."""
    try:
        return measure(planned_trial, store, num_workers)
    finally:
        parent = multiprocessing.parent_process()
        if parent and not parent.is_alive():
            # Otherwise, the executor's loop in this process would wait for work forever and keep the GPU.
            os._exit(Preempted.exit_code)


def _terminate_children() -> None:
    """Ask the child process, if it is running, to save and stop."""
    for child in multiprocessing.active_children():
        child.terminate()
