"""Points of a suite, one after the other: found by content; one that fails sinks no other."""

import logging
import multiprocessing
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from components.platform import artifacts, launchers, runtime, sources, tracking, work
from components.platform.stage_run import stage_run
from infoxlm_core import manifests
from infoxlm_core.errors import Preempted, WorkerLost
from infoxlm_core.results import trials
from infoxlm_core.tasks import task_of
from infoxlm_core.training import fingerprint

logger = logging.getLogger(__name__)


class Measured(NamedTuple):
    """A point that is finished."""

    location: str
    """Of its scores, in the store."""
    digest: str
    figures: dict[str, float]
    """Its main scores."""


def measure(point: Mapping[str, Any], store: str, num_workers: int) -> Measured:
    """Fine-tune an encoder on a task, if it needs that, and measure it; what goes wrong ends the process.

    Args:
        point: of `plan_suite`: which model, task, place in the grid and seed, with all settings.
        store: directory, or s3://bucket/prefix, where artifacts are found by content and checkpoints are kept.
        num_workers: Ray workers of a fine-tuning, one per GPU; 0 trains inside this process.
    """
    named, source = point["point"], point["source"]
    with stage_run("measure", store, named) as step:
        settings = trials.read_settings(point["settings"])
        step.report(model=named["model"], source=source, task=named["task"], settings=settings)
        local = sources.localise(settings, step.here)
        task = task_of(local)
        encoder = sources.fetch_model(source, step.here)
        model, learned_from = _fine_tune(settings, local, source, encoder, num_workers, store, step.run)
        inputs = [*fingerprint.digest_inputs(str(model)), fingerprint.digest_inputs_by_role(task.data(local))]
        key = artifacts.key_of("points", task.without_data(local), *inputs)

        def build(output: Path) -> None:
            trials.measure(local, encoder, model, learned_from, output)

        made = artifacts.get_or_build(store, "points", key, build)
        figures = task.name_metrics(trials.read_scores(made / trials.SCORES), settings, named["task"])
        step.report(figures)
        step.run.log_artifacts(made / trials.SCORES)
        step.run.end()
    return Measured(artifacts.url_of(made), manifests.load(made)["digest"], figures)


def _fine_tune(
    settings: Any, local: Any, source: str, encoder: Path, num_workers: int, store: str, run: tracking.Run
) -> tuple[Path, dict[str, Any]]:
    """Return the model that a point measures, fine-tuned if its task needs that, and the facts of its training.

    Its name is a digest of what decides its weights alone, so points that differ only in how they test share it.

    Args:
        settings: settings of the task.
        local: the same settings with all data on this machine.
        source: source of the encoder.
        encoder: the encoder on this machine.
        num_workers: workers of the training.
        store: directory, or s3://bucket/prefix.
        run: the tracker's run, which gets the curves.
    """
    task = task_of(local)
    if not task.trained:
        return encoder, {}
    part, data = task.training_part(local)
    inputs = [*fingerprint.digest_inputs(str(encoder)), fingerprint.digest_inputs_by_role(data)]
    if task.depends_on_workers(part, encoder):
        inputs.append(f"workers={max(1, num_workers)}")
    name = artifacts.key_of("tuned", task.without_data(part), *inputs)
    training = work.Work(
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
    with artifacts.exclusive(store, "tuned", name):  # another point may need the same model
        model = artifacts.locate(artifacts.url_of(launchers.run(training)))  # compares every byte before it is read
        work.delete_checkpoints(training)
    run.log_curves(model / "metrics.jsonl")
    return model, manifests.load(model)["facts"] | {"tuned": f"tuned/{name}"}


def measure_all(points: Sequence[Mapping[str, Any]], store: str, num_workers: int) -> dict[str, Measured]:
    """Measure points, by name. Several have a process each, as if they were steps: memory and GPUs are free again.

    When all have been tried, a point that failed ends this process as it would have ended its own. A signal to stop is
    handed to the point that is being measured, and no other begins.
    """
    if len(points) == 1:
        return {points[0]["point"]["name"]: measure(points[0], store, num_workers)}
    stopped: list[int] = []
    found: dict[str, Measured] = {}
    codes: list[int] = []
    for number, point in enumerate(points, 1):
        logger.info("point %d of %d: %s", number, len(points), point["point"]["name"])
        made, code = _apart(stopped, point, store, num_workers)
        if made:
            found[point["point"]["name"]] = made
        else:
            codes.append(code)
        if stopped:
            break
    if codes:
        logger.error("%d points: %d finished, %d failed", len(points), len(found), len(codes))
        sys.exit(codes[-1])  # whose outcome is the newest
    return found


def _apart(stopped: list[int], point: Mapping[str, Any], store: str, num_workers: int) -> tuple[Measured | None, int]:
    """`measure` in a process of its own -> what it returned, if it did, and its exit code."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_send, args=(there, point, store, num_workers))

    def hand_on(number: int, _: object) -> None:
        stopped.append(number)
        if child.pid:
            child.terminate()

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        child.start()
        there.close()
        if stopped:
            child.terminate()
        made = here.recv()
    except EOFError:
        made = None
    finally:
        child.join()
        for number, handler in before.items():
            signal.signal(number, handler)
    code = child.exitcode or 0
    if made is None and code < 0:  # it could not say why
        try:
            with runtime.report_failure(store, "measure", point["point"]):
                if stopped:
                    raise Preempted("asked to stop: what is finished is found when it is tried again")
                raise WorkerLost(f"ended by signal {-code}" + (" (out of memory?)" if code == -signal.SIGKILL else ""))
        except SystemExit as ended:
            code = int(ended.code or 0)
    return made, code


def _send(there: Connection, point: Mapping[str, Any], store: str, num_workers: int) -> None:
    there.send(measure(point, store, num_workers))
