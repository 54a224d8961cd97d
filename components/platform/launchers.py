"""Launchers: who starts the processes that do a piece of work, follows them, and starts them again when one dies.

    here        this process alone
    ray         Ray workers, of this machine or of the cluster that RAY_ADDRESS names
    torchrun    processes of this machine, by torch alone
    kuberay     a RayJob: the step writes STORE/work/JOB.json and follows the job, whose head does the rest (`job`)

The step's parameters choose: `cluster` a job, `num_workers` 0 this process; else INFOXLM_LAUNCHER says ray or torchrun.
A new launcher is an adapter, and here a function and a line in the table.
"""

import contextlib
import functools
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from components.adapters import lease, storage
from components.platform import artifacts, costs, runtime
from components.platform import work as works
from components.platform.work import Work
from infoxlm_core import manifests
from infoxlm_core.errors import ConfigError, InfoXLMError
from infoxlm_core.training import workers

if TYPE_CHECKING:
    from infoxlm_core.corpora.parallel import ParallelMap

Environment = Sequence[Mapping[str, Any]]
"""Environment variables as in a container of Kubernetes: {"name", "value"} or {"name", "valueFrom"} each."""

VARIABLE = "INFOXLM_LAUNCHER"
"""Environment variable: which launcher starts the workers of this machine."""
_HEARTBEAT_SECONDS = 60.0


class Launcher(Protocol):
    """Has work done, and returns when the artifact is in the store.

    It starts what does the work, or adopts what an earlier attempt of the step has left running, follows it to its end
    and starts it again when a worker dies. SIGTERM and Ctrl-C let a training save and stop.
    """

    def __call__(self, work: Work, cluster: dict[str, Any], step_environment: Environment, /) -> None:
        """Run `work`; return when its artifact is stored.

        Args:
            work: what is to be made.
            cluster: a `ClusterConfig` as a mapping, for a launcher that needs one.
            step_environment: environment variables of the step's pod, as Kubernetes describes them.

        Raises:
            TryAgain: of some kind; the same again goes on from the last checkpoint.
            and what the core's stage raises.
        """


def run(work: Work, cluster: dict[str, Any] | None = None, step_environment: Environment = ()) -> Path:
    """Return the artifact on this machine, made if nobody has made it before; arguments and errors as of `Launcher`."""
    if found := artifacts.lookup(work.store, work.kind, work.name):
        return found
    if cluster == {} and work.num_workers and work.stage in works.TOGETHER and os.environ.get("KFP_POD_NAME"):
        raise ConfigError(
            "cluster is empty, and this step's pod has no GPUs: start the run by `infoxlm submit`, or set `cluster` to "
            "at least {image: name@sha256:…}; set num_workers to 0 to train on the CPU of this pod"
        )
    if cluster and (work.num_workers or work.stage in works.TOGETHER):
        LAUNCHERS["kuberay"](work, cluster, step_environment)
    else:
        run_locally(work)
    found = artifacts.lookup(work.store, work.kind, work.name)
    if not found:
        raise RuntimeError(f"{work.kind}/{work.name} was made and is not there")
    return found


def run_locally(work: Work) -> None:
    """Do it with processes of this machine, or of the cluster whose driver this process is."""
    launch = local_launcher() if work.num_workers else LAUNCHERS["here"]
    launch(work, {}, ())


def local_launcher() -> Launcher:
    """The one that INFOXLM_LAUNCHER names.

    Raises:
        ConfigError: there is none of that name that starts workers on this machine.
    """
    name = os.environ.get(VARIABLE) or LOCAL[0]
    if name not in LOCAL:
        raise ConfigError(f"{VARIABLE}: {name!r} starts no workers on this machine: set it to {' or '.join(LOCAL)}")
    return LAUNCHERS[name]


def here(work: Work, *_: Any) -> None:
    """In this process."""

    def train(body: Callable[..., dict[str, Any]], num_workers: int, **arguments: Any) -> None:  # noqa: ARG001
        body(**arguments)

    _lead(work, train, contextlib.nullcontext())


def ray(work: Work, *_: Any) -> None:
    """On Ray workers: Ray Train for what is trained, Ray Data for text."""
    from components.adapters.ray import data, train

    _lead(work, functools.partial(train.run, min_workers=work.min_workers), data.workers(work.num_workers))


def torchrun(work: Work, *_: Any) -> None:
    """On processes of this machine: torch's elastic agent for what is trained, a pool for text."""
    from components.adapters.torchrun import train
    from infoxlm_core.corpora import parallel

    _lead(work, train.run, contextlib.nullcontext(parallel.in_processes(work.num_workers)))


def kuberay(work: Work, cluster: dict[str, Any], step_environment: Environment) -> None:
    """By a RayJob: its head is the driver of Ray workers (`job`), and this step follows it."""
    from components.adapters.kuberay import job as ray_job
    from components.adapters.kuberay import manifest
    from components.settings.cluster import ClusterConfig

    checked = ClusterConfig.parse(cluster, "cluster")
    if not storage.is_remote(work.store):
        raise ConfigError(f"store: workers of a cluster share no directory {work.store}: give s3://bucket/prefix")
    run = runtime.pipeline_run()
    job = manifest.job_name(work.stage, work.store, work.run or f"{work.kind}/{work.name}")
    place = f"work/{job}.json"
    if work.stage not in works.TOGETHER:
        checked = checked.for_text()
    elif work.stage != "pretrain":  # the number of workers changes the results of every other training
        checked = checked.model_copy(update={"min_workers": 0})
    described = asdict(work) | {"pipeline_run": run, "job": job, "min_workers": checked.min_workers}
    artifacts.write(work.store, place, json.dumps(described, indent=1, sort_keys=True))
    outcome = runtime.outcome_path(job, "jobs")

    def ended() -> dict[str, Any] | None:
        return runtime.parse_outcome(artifacts.read(work.store, outcome), outcome)

    if (ended() or {}).get("run", run) != run:
        storage.open(work.store).delete(outcome)  # of another pipeline run: what it met may have been mended
    if work.run:
        lease.check(f"{work.store}/runs/{work.run}/lease.json", job)  # another pipeline run may train the same
    with _heartbeat(work.store, job):
        ray_job.run(
            job,
            f"{work.store}/{place}",
            checked,
            work.num_workers,
            step_environment,
            ask_to_stop=lambda: artifacts.write(work.store, f"runs/{work.run}/stop", job) if work.run else None,
            read_outcome=ended,
        )


LAUNCHERS: dict[str, Launcher] = {"here": here, "ray": ray, "torchrun": torchrun, "kuberay": kuberay}
LOCAL = ("ray", "torchrun")
"""Those that start workers on this machine."""


def _lead(
    work: Work,
    train: Callable[..., Any],
    parallel_map: "AbstractContextManager[ParallelMap | None]",
) -> None:
    """Do work whose workers this process starts: by `train` if they train together, else with `parallel_map`."""
    if work.stage in works.TOGETHER:
        folder = artifacts.local(work.store) / "runs" / work.run
        manifests.make_folder(folder)
        (folder / "stop").unlink(missing_ok=True)  # a request to a process that is gone; one from now on counts
        with workers.stopping_on_signals(folder):
            train(works.train, work.num_workers, run=folder, work=work)
        return
    processes = work.num_workers or work.config.get("processes", 1)

    def build(output: Path) -> dict[str, Any]:
        with costs.measured(work.store, work.kind, work.name, processes, costs.CPU):
            return works.LED[work.stage](work, over_chunks, output)

    with parallel_map as over_chunks:
        artifacts.get_or_build(work.store, work.kind, work.name, build)


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
                artifacts.write(store, heartbeat_path(job), f"{me} {number}")

    threading.Thread(target=give, name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        over.set()
