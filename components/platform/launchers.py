"""Launchers start the processes of a stage, follow them, and restart them when a process dies.

    process     this process does all work
    ray         Ray workers of this machine, or of the cluster that RAY_ADDRESS names
    torchrun    processes of this machine, without Ray
    kuberay     a RayJob: the step writes STORE/work/JOB.json and follows the job, whose head does the work (`job`)

A step with `cluster` set uses kuberay, a step with `num_workers` 0 uses process, and any other step uses the launcher
that INFOXLM_LAUNCHER names (ray or torchrun). To add a launcher, write an adapter, a function and a line in the table.
"""

import contextlib
import functools
import itertools
import json
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from components.adapters import storage
from components.platform import artifacts, builds, costs, runtime
from components.platform.builds import Work
from infoxlm_core import manifests
from infoxlm_core.errors import ConfigError, InfoXLMError
from infoxlm_core.training import workers

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from infoxlm_core.corpora.parallel import ParallelMap

Environment = Sequence[Mapping[str, Any]]
"""Environment variables of a Kubernetes container, each {"name", "value"} or {"name", "valueFrom"}."""

VARIABLE = "INFOXLM_LAUNCHER"
"""Environment variable that names the launcher for workers of this machine."""
_HEARTBEAT_SECONDS = 60.0


class Launcher(Protocol):
    """Runs work in processes that it starts, or that an earlier attempt of the step left running.

    It follows the processes to their end and restarts them when one dies. SIGTERM and Ctrl-C let a training save and
    stop.
    """

    def __call__(self, work: Work, cluster: dict[str, Any], step_environment: Environment, /) -> None:
        """Run `work`, and return when its artifact is in the store.

        Args:
            work: description of the artifact to build.
            cluster: a `ClusterConfig` as a mapping, for a launcher that needs one.
            step_environment: environment variables of the step's pod, as Kubernetes describes them.

        Raises:
            TryAgain: the same call continues from the last checkpoint.
            InfoXLMError: any error of the core's stage.
        """


def run(work: Work, cluster: dict[str, Any] | None = None, step_environment: Environment = ()) -> Path:
    """Return the local directory of an artifact, and build it first if it does not exist. Arguments: see `Launcher`."""
    existing = artifacts.lookup(work.store, work.kind, work.name)
    if existing:
        logger.info("reusing %s/%s/%s, which was built from the same inputs", work.store, work.kind, work.name)
        return existing
    is_training = work.stage in builds.TRAININGS
    # A step of a suite passes no cluster at all, because its own pod has GPUs.
    if cluster == {} and work.num_workers and is_training and os.environ.get("KFP_POD_NAME"):
        raise ConfigError(
            "cluster is empty, and this step's pod has no GPUs: start the run by `infoxlm submit`, or set `cluster` to "
            "at least {image: name@sha256:…}; set num_workers to 0 to train on the CPU of this pod"
        )
    if cluster and (work.num_workers or is_training):
        LAUNCHERS["kuberay"](work, cluster, step_environment)
    else:
        run_locally(work)
    artifact = artifacts.lookup(work.store, work.kind, work.name)
    if not artifact:
        raise RuntimeError(f"the launcher succeeded, but {work.store} has no {work.kind}/{work.name}")
    return artifact


def run_locally(work: Work) -> None:
    """Run work with processes of this machine, or with Ray workers if this process is the driver of a cluster."""
    launch = choose_local_launcher() if work.num_workers else LAUNCHERS["process"]
    launch(work, {}, ())


def choose_local_launcher() -> Launcher:
    """Return the launcher that INFOXLM_LAUNCHER names, for workers of this machine.

    Raises:
        ConfigError: INFOXLM_LAUNCHER does not name such a launcher.
    """
    name = os.environ.get(VARIABLE) or LOCAL[0]
    if name not in LOCAL:
        raise ConfigError(f"{VARIABLE}: {name!r} cannot start workers on this machine: set it to {' or '.join(LOCAL)}")
    return LAUNCHERS[name]


def run_in_process(work: Work, *_: Any) -> None:
    """Run work in this process."""

    def train(body: Callable[..., dict[str, Any]], num_workers: int, **arguments: Any) -> None:  # noqa: ARG001
        body(**arguments)

    _run_with_workers(work, train, contextlib.nullcontext())


def run_on_ray(work: Work, *_: Any) -> None:
    """Run work on Ray workers: Ray Train for a training run, Ray tasks for text."""
    from components.adapters.ray import tasks, train

    run_training = functools.partial(train.run, min_workers=work.min_workers)
    _run_with_workers(work, run_training, tasks.workers(work.num_workers))


def run_with_torchrun(work: Work, *_: Any) -> None:
    """Run work on processes of this machine: torch's elastic agent for a training run, a process pool for text."""
    from components.adapters.torchrun import train
    from infoxlm_core.corpora import parallel

    _run_with_workers(work, train.run, contextlib.nullcontext(parallel.in_processes(work.num_workers)))


def run_as_rayjob(work: Work, cluster: dict[str, Any], step_environment: Environment) -> None:
    """Run work as a RayJob, whose head is the driver of Ray workers (`job`), and follow the job to its end.

    Raises:
        ConfigError: the store is a directory, which the machines of a cluster do not share.
    """
    from components.adapters.kuberay import job, manifest
    from components.settings.cluster import ClusterConfig

    config = ClusterConfig.parse(cluster, "cluster")
    if not storage.is_remote(work.store):
        raise ConfigError(f"store: workers of a cluster cannot share {work.store}: give s3://bucket/prefix")
    if work.stage not in builds.TRAININGS:
        config = config.for_text()
    elif work.stage != "pretrain":  # the number of workers changes the results of all other training runs
        config = config.model_copy(update={"min_workers": 0})
    pipeline_run = runtime.read_run_id()
    name = manifest.job_name(work.stage, work.store, work.run or f"{work.kind}/{work.name}")
    job_work = asdict(work) | {"pipeline_run": pipeline_run, "job": name, "min_workers": config.min_workers}
    artifacts.write(work.store, f"work/{name}.json", json.dumps(job_work, indent=1, sort_keys=True))
    outcome_path = runtime.outcome_path(name, "jobs")
    outcome = runtime.read_outcome(work.store, outcome_path)
    if outcome and outcome.get("run", pipeline_run) != pipeline_run:
        # The failure belongs to another pipeline run, and its cause may have been fixed since.
        storage.open(work.store).delete(outcome_path)
    with _heartbeat(work.store, name):
        job.run(
            name,
            f"{work.store}/work/{name}.json",
            config,
            work.num_workers,
            step_environment,
            ask_to_stop=functools.partial(_ask_to_stop, work, name),
            read_outcome=functools.partial(runtime.read_outcome, work.store, outcome_path),
        )


def _ask_to_stop(work: Work, job: str) -> None:
    """Ask the training of a job to save and stop. Do nothing for a job that prepares text, which saves no state."""
    if work.run:
        artifacts.write(work.store, f"runs/{work.run}/stop", job)


LAUNCHERS: dict[str, Launcher] = {
    "process": run_in_process,
    "ray": run_on_ray,
    "torchrun": run_with_torchrun,
    "kuberay": run_as_rayjob,
}
LOCAL = ("ray", "torchrun")
"""Launchers that start workers on this machine."""


def _run_with_workers(
    work: Work,
    train: Callable[..., Any],
    parallel_map: "AbstractContextManager[ParallelMap | None]",
) -> None:
    """Run a training run through `train`, or process text through `parallel_map`."""
    if work.stage in builds.TRAININGS:
        _run_training(work, train)
    else:
        _process_text(work, parallel_map)


def _run_training(work: Work, train: Callable[..., Any]) -> None:
    """Train in the processes that `train` starts. A signal to this process lets them save and stop."""
    folder = artifacts.local_directory(work.store) / "runs" / work.run
    manifests.make_folder(folder)
    (folder / "stop").unlink(missing_ok=True)  # this request was meant for an earlier process
    with workers.stopping_on_signals(folder):
        train(builds.train, work.num_workers, run=folder, work=work)


def _process_text(work: Work, parallel_map: "AbstractContextManager[ParallelMap | None]") -> None:
    """Build an artifact of text in this process, which may send chunks of the text to others."""
    process_count = work.num_workers or work.config.get("processes", 1)
    run_stage = builds.TEXT_STAGES[work.stage]
    # Two builds of one artifact would write the same intermediate files.
    with parallel_map as map_chunks, artifacts.exclusive(work.store, work.kind, work.name):

        def build(output: Path) -> dict[str, Any]:
            with costs.measured(work.store, work.kind, work.name, process_count, costs.CPU):
                return run_stage(work, map_chunks, output)

        artifacts.get_or_build(work.store, work.kind, work.name, build)
        if work.stage == "prepare_corpus":  # not earlier: after a failed upload, another machine continues from them
            builds.delete_intermediate_files(work)


def heartbeat_path(job: str) -> str:
    """Return the path in the store of the heartbeat that a step writes while it follows a RayJob."""
    return f"work/{job}.followed"


@contextlib.contextmanager
def _heartbeat(store: str, job: str) -> Iterator[None]:
    """Write a heartbeat once a minute inside the block. A job that receives no heartbeats ends itself."""
    finished = threading.Event()
    step_id = uuid.uuid4().hex

    def write_heartbeats() -> None:
        for count in itertools.count(1):
            with contextlib.suppress(InfoXLMError):  # the job ends only after many missing heartbeats
                artifacts.write(store, heartbeat_path(job), f"{step_id} {count}")
            if finished.wait(_HEARTBEAT_SECONDS):
                return

    threading.Thread(target=write_heartbeats, name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        finished.set()
