"""Evaluate the models of a pipeline run, or the trials of a suite one after the other."""

import contextlib
import logging
import multiprocessing
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

from components.platform import artifacts, costs, launchers, runtime, sources, stage_work
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
    """An encoder and its classifier in the store."""

    name: str
    encoder_location: str
    classifier_location: str
    digests: tuple[str, str]
    """Digests of the encoder and of the classifier."""


def read_model(name: str, encoder: Any, classifier: Any) -> EvaluatedModel:
    """Return the model whose encoder and classifier are these KFP inputs."""
    encoder_location, encoder_digest = artifacts.read_pointer(encoder)
    classifier_location, classifier_digest = artifacts.read_pointer(classifier)
    return EvaluatedModel(name, encoder_location, classifier_location, (encoder_digest, classifier_digest))


def read_start(encoder: Any, classifier: Any) -> EvaluatedModel:
    """Return the model before its training. Its name says whether it is a public model or has random weights."""
    location, _ = artifacts.read_pointer(encoder)
    inputs = manifests.load(artifacts.locate(location, hashed=False))["inputs"]
    name = evidence.PUBLIC_START if "model.start" in inputs else evidence.UNTRAINED
    return read_model(name, encoder, classifier)


def build_scores(step: StageRun, config: EvaluationConfig, corpus: Any, models: Sequence[EvaluatedModel]) -> Path:
    """Evaluate models on the held-out text of a corpus, unless it is done. Return the directory of their scores.

    Args:
        step: the running component.
        config: settings of the evaluation.
        corpus: KFP input with the corpus.
        models: the trained model, and perhaps the model before its training.
    """
    corpus_location, corpus_digest = artifacts.read_pointer(corpus)
    local_config = sources.localise_guard(config, step.local_store)
    names = [model.name for model in models]
    digests = [digest for model in models for digest in model.digests]
    key = sources.key_with_guard("scores", local_config, corpus_digest, *names, *digests)
    # The report of an adaptation shows the hours of all steps before this one.
    is_adaptation = evidence.PUBLIC_START in names
    hours_before = costs.sum_up(step.run.read_metrics()) if is_adaptation else {}

    def build(output: Path) -> dict[str, float]:
        from infoxlm_core.model.huggingface import origin
        from infoxlm_core.stages.evaluation import evaluate

        encoders = {}
        classifiers = {}
        for model in models:
            encoder = artifacts.locate(model.encoder_location)
            is_adapted_model = is_adaptation and model is models[0] and not step.trial
            name = origin.name_adapted(encoder) if is_adapted_model else model.name
            encoders[name] = encoder
            classifier = artifacts.locate(model.classifier_location)
            is_trained = manifests.load(classifier)["facts"]["steps"] > 0
            if is_trained:  # without labelled text, `finetune` trains nothing
                classifiers[name] = classifier
        corpus_path = artifacts.locate(corpus_location)
        with costs.measured_alone(step.store, "scores", key):
            return evaluate(local_config, corpus_path, encoders, classifiers, output, hours_before)

    return artifacts.get_or_build(step.store, "scores", key, build)


class Measured(NamedTuple):
    """A finished trial."""

    location: str
    """Location of its scores in the store."""
    digest: str
    figures: dict[str, float]
    """Its scores as metrics."""


def measure(planned: Mapping[str, Any], store: str, num_workers: int) -> Measured:
    """Fine-tune an encoder on a task, if the task requires training, and measure it. A failure ends the process.

    Args:
        planned: a trial of `plan_suite` with the source of its model and its settings.
        store: directory, or s3://bucket/prefix, with artifacts and checkpoints.
        num_workers: Ray workers of a fine-tuning, one per GPU; 0 trains inside this process.
    """
    trial = planned["point"]
    source = planned["source"]
    with stage_run("measure", store, trial) as step:
        settings = trials.read_settings(planned["settings"])
        step.report(model=trial["model"], source=source, task=trial["task"], settings=settings)
        local_settings = sources.localise(settings, step.local_store)
        task = task_of(local_settings)
        encoder = sources.fetch_model(source, step.local_store)
        model = encoder
        training: dict[str, Any] = {}  # facts of the training
        if task.trained:
            model = _fine_tune(step, settings, local_settings, source, encoder, num_workers)
            training = manifests.load(model)["facts"] | {"tuned": f"tuned/{model.name}"}
        inputs = [
            *fingerprint.digest_inputs(str(model)),
            fingerprint.digest_inputs_by_role(task.list_data(local_settings)),
        ]
        key = artifacts.key_of("points", task.without_data(local_settings), *inputs)

        def build(output: Path) -> None:
            trials.measure(local_settings, encoder, model, training, output)

        scores = artifacts.get_or_build(store, "points", key, build)
        figures = task.name_metrics(trials.read_scores(scores / trials.SCORES), settings, trial["task"])
        step.report(figures)
        step.run.log_artifacts(scores / trials.SCORES)
        step.run.end()
    return Measured(artifacts.url_of(scores), manifests.load(scores)["digest"], figures)


def _fine_tune(
    step: StageRun, settings: Any, local_settings: Any, source: str, encoder: Path, num_workers: int
) -> Path:
    """Fine-tune the encoder of a trial, and return the directory of the model.

    The name of the model depends only on what decides its weights, so trials that differ only in their tests share it.

    Args:
        step: the running step; its run in the tracker receives the curves.
        settings: settings of the task.
        local_settings: the same settings with local paths for all data.
        source: source of the encoder.
        encoder: local directory of the encoder.
        num_workers: Ray workers, one per GPU; 0 trains inside this process.
    """
    task = task_of(local_settings)
    training_settings, data = task.select_training_inputs(local_settings)
    inputs = [*fingerprint.digest_inputs(str(encoder)), fingerprint.digest_inputs_by_role(data)]
    if task.depends_on_workers(training_settings, encoder):
        inputs.append(f"workers={max(1, num_workers)}")
    name = artifacts.key_of("tuned", task.without_data(training_settings), *inputs)
    training = stage_work.Work(
        stage="finetune",
        store=step.store,
        kind="tuned",
        name=name,
        run=f"tuned-{name}",
        config=settings.model_dump(mode="json"),
        artifacts={},
        sources={"encoder": source},
        num_workers=num_workers,
        tracker_run=step.run.id,
    )
    with artifacts.exclusive(step.store, "tuned", name):  # another trial may need the same model
        model = artifacts.locate(artifacts.url_of(launchers.run(training)))  # verifies every file before it is read
        stage_work.delete_checkpoints(training)
    step.run.log_curves(model / "metrics.jsonl")
    return model


def measure_all(planned: Sequence[Mapping[str, Any]], store: str, num_workers: int) -> dict[str, Measured]:
    """Measure trials one after the other, and return the finished trials by name.

    Each of several trials runs in its own process, so that its memory and GPUs are released. If a trial fails, the
    other trials still run, and then this process exits with the code of the last failure. After a signal to stop, the
    running trial is stopped and no other trial starts.
    """
    if len(planned) == 1:
        return {planned[0]["point"]["name"]: measure(planned[0], store, num_workers)}
    finished: dict[str, Measured] = {}
    exit_codes: list[int] = []
    processes = _TrialProcesses(store, num_workers)
    with workers.handling_signals(processes.stop):
        for number, trial in enumerate(planned, 1):
            name = trial["point"]["name"]
            logger.info("Trial %d of %d: %s.", number, len(planned), name)
            try:
                finished[name] = processes.measure(trial)
            except SystemExit as failure:
                exit_codes.append(int(failure.code or 0))
            if processes.is_stopped:
                break
    if exit_codes:
        logger.error("%d of %d trials are finished, %d failed.", len(finished), len(planned), len(exit_codes))
        sys.exit(exit_codes[-1])  # the store also has the error of the last failure
    return finished


class _TrialProcesses:
    """Measures each trial in a child process."""

    def __init__(self, store: str, num_workers: int) -> None:
        self.is_stopped = False
        self._store = store
        self._num_workers = num_workers
        self._child: SpawnProcess | None = None

    def stop(self, *_: object) -> None:
        """Handle a signal to stop: terminate the running child."""
        self.is_stopped = True
        if self._child and self._child.pid:
            self._child.terminate()

    def measure(self, planned: Mapping[str, Any]) -> Measured:
        """Measure a trial in a new child process.

        Raises:
            SystemExit: the trial failed; the store has the error.
        """
        spawn = multiprocessing.get_context("spawn")
        receiver, sender = spawn.Pipe(duplex=False)
        child = spawn.Process(target=_measure_and_send, args=(sender, planned, self._store, self._num_workers))
        self._child = child
        measured: Measured | None = None
        try:
            child.start()
            sender.close()  # otherwise `recv` would wait for this process to send something
            if self.is_stopped:  # the signal arrived before the child had a process id
                child.terminate()
            with contextlib.suppress(EOFError):  # the child ended without a result
                measured = receiver.recv()
        finally:
            child.join()
        if measured:
            return measured
        exit_code = child.exitcode or 0
        if exit_code >= 0:  # the child has reported its failure
            sys.exit(exit_code)
        with runtime.report_failure(self._store, "measure", planned["point"]):
            if self.is_stopped:
                raise Preempted("Stopped by a signal. Run again to measure the remaining trials.")
            cause = " (out of memory?)" if exit_code == -signal.SIGKILL else ""
            raise WorkerLost(f"The process of the trial was ended by signal {-exit_code}{cause}.")
        raise AssertionError("unreachable")


def _measure_and_send(sender: Connection, planned: Mapping[str, Any], store: str, num_workers: int) -> None:
    """Measure a trial in a child process, and send the result to the parent process."""
    sender.send(measure(planned, store, num_workers))
