"""Launchers start the processes of a stage, follow them, and restart them after a failure.

    process     this process does all work
    ray         Ray workers on this machine, or in the cluster that RAY_ADDRESS names
    torchrun    processes on this machine, without Ray
    kuberay     a RayJob: the step writes STORE/work/JOB.json and follows the job, whose head builds the artifact

A step with `cluster` set uses kuberay, a step with `num_workers` 0 uses process, and any other step uses the launcher
that INFOXLM_LAUNCHER names (ray or torchrun). To add a launcher, write an adapter and a function, and add the function
to `LAUNCHERS`.
"""

import contextlib
import functools
import json
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from components.adapters import storage
from components.platform import artifacts, builds, costs, runtime
from components.platform.builds import BuildSpec
from infoxlm_core import manifests
from infoxlm_core.errors import ConfigError, InfoXLMError
from infoxlm_core.training import workers

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from components.settings.cluster import ClusterConfig
    from infoxlm_core.corpora.parallel import ParallelMap

Environment = Sequence[Mapping[str, Any]]
"""Environment variables of a Kubernetes container: mappings {"name", "value"} or {"name", "valueFrom"}."""

VARIABLE = "INFOXLM_LAUNCHER"
"""Environment variable with the name of the local launcher, which starts workers on this machine."""
_HEARTBEAT_SECONDS = 60.0  # between heartbeats; without them, a job ends itself after 15 minutes (`platform.job`)


class Launcher(Protocol):
    """A function that builds an artifact in processes that it starts or that an earlier attempt left running.

    A launcher follows the processes to their end, and restarts all processes when one process dies. On SIGTERM or
    Ctrl-C, a training run saves and stops.
    """

    def __call__(self, spec: BuildSpec, cluster: dict[str, Any], step_environment: Environment, /) -> None:
        """Build an artifact. Return when the artifact is in the store.

        Args:
            spec: description of the artifact.
            cluster: a `ClusterConfig` as a mapping; empty for a launcher that needs no cluster.
            step_environment: environment variables of the step's pod.

        Raises:
            TryAgain: a temporary failure. A repeated call continues from the last checkpoint.
            InfoXLMError: any error of the core's stage.
        """


def run(spec: BuildSpec, cluster: dict[str, Any] | None = None, step_environment: Environment = ()) -> Path:
    """Return a local directory with an artifact's small files. Let a launcher build the artifact if it does not exist.

    The directory is that of `artifacts.fetch_summary`, because this step does not read the other files.

    Args:
        spec: description of the artifact.
        cluster: a `ClusterConfig` as a mapping, to start a RayJob. Without it, this step itself builds the artifact.
            None: this step's pod has GPUs; {}: it has none.
        step_environment: environment variables of the step's pod.

    Raises:
        ConfigError: a training run needs GPUs, but the step's pod has no GPUs and `cluster` is {}.
        InfoXLMError: any error of a `Launcher`.
    """
    existing = artifacts.fetch_summary(spec.store, spec.kind, spec.name)
    if existing:
        logger.info("reusing %s/%s/%s, which was built from the same inputs", spec.store, spec.kind, spec.name)
        return existing
    # A step that starts RayJobs has a small pod without GPUs, where a training run would practically never end.
    if cluster == {} and spec.num_workers and spec.is_training and os.environ.get("KFP_POD_NAME"):
        raise ConfigError(
            "cluster is empty, and this step's pod has no GPUs: start the run by `infoxlm submit`, or set `cluster` to "
            "at least {image: name@sha256:…}, or set num_workers to 0 to train on this pod's CPU"
        )
    # A training run without workers (0) also goes to the cluster, where it is refused with a message about the pool.
    if cluster and (spec.num_workers or spec.is_training):
        LAUNCHERS["kuberay"](spec, cluster, step_environment)
    else:
        run_locally(spec)
    artifact = artifacts.fetch_summary(spec.store, spec.kind, spec.name)
    if not artifact:
        raise RuntimeError(f"the launcher succeeded, but {spec.store} has no {spec.kind}/{spec.name}")
    return artifact


def run_locally(spec: BuildSpec) -> None:
    """Build an artifact in processes on this machine, or in Ray workers if this process drives a Ray cluster."""
    launch = choose_local_launcher() if spec.num_workers else LAUNCHERS["process"]
    launch(spec, {}, ())  # only a RayJob needs a cluster and the environment of the step's pod


def choose_local_launcher() -> Launcher:
    """Return the local launcher that INFOXLM_LAUNCHER names.

    Raises:
        ConfigError: INFOXLM_LAUNCHER does not name a local launcher.
    """
    name = os.environ.get(VARIABLE) or "ray"
    if name not in LOCAL:
        raise ConfigError(f"{VARIABLE}: {name!r} cannot start workers on this machine: set it to {' or '.join(LOCAL)}")
    return LAUNCHERS[name]


def run_in_process(spec: BuildSpec, *_: Any) -> None:
    """Build an artifact in this process."""
    if spec.is_training:
        _run_training(spec, _call_in_this_process)
    else:
        _process_text(spec, parallel_map=None)


def _call_in_this_process(train: Callable[..., dict[str, Any]], num_workers: int, **arguments: Any) -> None:  # noqa: ARG001
    """Call `train` in this process. Other launchers call it in each of `num_workers` workers."""
    train(**arguments)


def run_on_ray(spec: BuildSpec, *_: Any) -> None:
    """Build an artifact in Ray workers. Training uses Ray Train, and text processing uses Ray tasks."""
    from components.adapters.ray import tasks, train

    if spec.is_training:
        _run_training(spec, functools.partial(train.launch_training, min_workers=spec.min_workers))
    else:
        with tasks.start_workers(spec.num_workers) as parallel_map:
            _process_text(spec, parallel_map)


def run_with_torchrun(spec: BuildSpec, *_: Any) -> None:
    """Build an artifact on this machine. Training uses torch's elastic agent, and text processing a process pool."""
    if spec.is_training:
        from components.adapters.torchrun import train

        _run_training(spec, train.launch_training)
    else:
        from infoxlm_core.corpora import parallel

        _process_text(spec, parallel.ProcessPoolMap(spec.num_workers))


def run_as_rayjob(spec: BuildSpec, cluster: dict[str, Any], step_environment: Environment) -> None:
    """Build an artifact in a RayJob (see `components.platform.job`), and follow the job to its end.

    The name of the job is derived from the artifact. A repeated step therefore follows a job that is still running.

    Raises:
        ConfigError: the store is a directory, which a cluster's machines do not share.
    """
    from components.adapters.kuberay import job, manifest
    from components.settings.cluster import ClusterConfig

    config = _adapt_cluster(ClusterConfig.parse(cluster, "cluster"), spec)
    if not storage.is_remote(spec.store):
        raise ConfigError(f"store: workers of a cluster cannot share {spec.store}: give s3://bucket/prefix")
    # Not after `spec.run`, because a run that is resumed with other settings (`checkpoints.resume`) builds another
    # artifact. A job with the earlier settings may still be running.
    name = manifest.make_job_name(spec.stage, spec.store, f"{spec.kind}-{spec.name}")
    job_spec = replace(spec, pipeline_run=runtime.read_run_id(), job=name, min_workers=config.min_workers)
    # The job's head pod shares neither memory nor disk with this pod, so it reads the spec from the store.
    artifacts.write(spec.store, f"work/{name}.json", json.dumps(asdict(job_spec), indent=1, sort_keys=True))
    outcome_path = runtime.outcome_path(name, "jobs")
    _delete_outdated_outcome(job_spec, outcome_path)
    with _heartbeats(spec.store, name):  # without heartbeats, the job ends itself
        job.run(
            name,
            f"{spec.store}/work/{name}.json",
            config,
            spec.num_workers,
            step_environment,
            ask_to_stop=functools.partial(_ask_to_stop, job_spec),
            read_outcome=functools.partial(runtime.read_outcome, spec.store, outcome_path),
        )


def _adapt_cluster(config: "ClusterConfig", spec: BuildSpec) -> "ClusterConfig":
    """Adapt the cluster settings to the stage of a build spec."""
    if not spec.is_training:
        return config.for_text()
    if spec.stage != "pretrain":  # only pre-training has the same result with any number of workers
        return config.model_copy(update={"min_workers": 0})
    return config


def _delete_outdated_outcome(job_spec: BuildSpec, outcome_path: str) -> None:
    """Delete a job's stored failure if it is from an earlier pipeline run.

    `job.run` would raise the failure again instead of starting the job, but its cause may have been removed since then.
    """
    outcome = runtime.read_outcome(job_spec.store, outcome_path)
    # An outcome from an older version does not name its pipeline run, and is kept.
    if outcome and outcome.get("run", job_spec.pipeline_run) != job_spec.pipeline_run:
        storage.open(job_spec.store).delete(outcome_path)


def _ask_to_stop(job_spec: BuildSpec) -> None:
    """Ask a job's training run to save and stop. Do nothing for a job that processes text and saves no checkpoints."""
    if job_spec.run:
        artifacts.write(job_spec.store, f"runs/{job_spec.run}/stop", job_spec.job)


LAUNCHERS: dict[str, Launcher] = {
    "process": run_in_process,
    "ray": run_on_ray,
    "torchrun": run_with_torchrun,
    "kuberay": run_as_rayjob,
}
LOCAL = ("ray", "torchrun")
"""Names of the launchers that start workers on this machine."""


def _run_training(spec: BuildSpec, launch_workers: Callable[..., Any]) -> None:
    """Train in the workers that `launch_workers` starts. On a signal to this process, the workers save and stop.

    Args:
        spec: the artifact to build.
        launch_workers: function that takes the worker function, the number of workers, and the worker function's
            arguments.
    """
    run_directory = artifacts.local_directory(spec.store) / "runs" / spec.run
    manifests.make_directory(run_directory)
    (run_directory / "stop").unlink(missing_ok=True)  # an old request to stop was meant for an earlier process
    with workers.stop_training_on_signals(run_directory):
        launch_workers(builds.train, spec.num_workers, run=run_directory, spec=spec)


def _process_text(spec: BuildSpec, parallel_map: "ParallelMap | None") -> None:
    """Build a text artifact in this process. `parallel_map` sends chunks of the text to worker processes."""
    build_text = builds.TEXT_STAGES[spec.stage]
    process_count = spec.num_workers or spec.config.get("processes", 1)  # only some stages have this setting

    def build(output: Path) -> dict[str, Any]:
        with costs.record_duration(spec.store, spec.kind, spec.name, process_count, costs.CPU):
            return build_text(spec, parallel_map, output)

    # Two concurrent builds of the same artifact would write to the same intermediate files.
    with artifacts.exclusive(spec.store, spec.kind, spec.name):
        artifacts.get_or_build(spec.store, spec.kind, spec.name, build)
        if spec.stage == "prepare_corpus":
            # Only after the upload, because another machine continues from the files if the upload fails.
            builds.delete_intermediate_files(spec)


def heartbeat_path(job: str) -> str:
    """Return the store path of the heartbeat that a step writes while it follows a RayJob."""
    return f"work/{job}.followed"


@contextlib.contextmanager
def _heartbeats(store: str, job: str) -> Iterator[None]:
    """Write regular heartbeats for a RayJob inside the block. A job without heartbeats ends itself."""
    finished = threading.Event()
    threading.Thread(target=_write_heartbeats, args=(store, job, finished), name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        finished.set()


def _write_heartbeats(store: str, job: str, finished: threading.Event) -> None:
    """Write a numbered heartbeat every `_HEARTBEAT_SECONDS` until `finished` is set."""
    step_id = uuid.uuid4().hex  # each attempt of a step counts from 1, but the job must notice every heartbeat
    heartbeat_count = 0
    while not finished.is_set():
        heartbeat_count += 1
        with contextlib.suppress(InfoXLMError):  # the job tolerates several missing heartbeats
            artifacts.write(store, heartbeat_path(job), f"{step_id} {heartbeat_count}")
        finished.wait(_HEARTBEAT_SECONDS)  # unlike `sleep`, this ends as soon as the job has ended
