"""Run a training stage of the core on N Ray workers.

The core writes checkpoints, curves and results. Ray starts the workers, joins them in a process group, and restarts
them when a worker dies. A worker ends in one of three ways: it returns metrics, it returns an InfoXLMError, or it dies.
Ray does not restart workers after an InfoXLMError, because all workers would raise the error again.
"""

import contextlib
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.settings import environment
from infoxlm_core.errors import InfoXLMError, InputError, OutOfMemory, WorkerLost, last_cause, shorten
from infoxlm_core.model import devices
from infoxlm_core.training import workers

logger = logging.getLogger(__name__)

_START_ATTEMPTS = 3
_MAX_FAILURES = 3
_GPU_SECONDS = 1800  # time limit for the replacement of a lost pod's GPU, as in Ray Train
_ALL_WORKERS_SECONDS = 300.0  # time limit for all workers before a training run continues with fewer
_COLLECTIVE_SECONDS = 300  # time limit for summing gradients; `distributed.PATIENCE` applies while worker 0 works alone


def launch_training(
    train: Callable[..., dict[str, Any]], num_workers: int, run: Path, min_workers: int = 0, **arguments: Any
) -> dict[str, Any]:
    """Call a training function on Ray workers and return the result of the first worker.

    On one machine, at most one worker runs per GPU. On a cluster, the training waits until a lost node is replaced, or
    continues with fewer workers if `min_workers` allows it.

    Args:
        train: training function.
        num_workers: number of workers, each with one GPU, or with one CPU core if Ray has no GPUs.
        run: directory of the training run, passed to `train` on every worker.
        min_workers: smallest number of workers with which the training may continue; 0 requires all workers.
        arguments: further arguments of `train`.

    Raises:
        WorkerLost: workers died more often than Ray restarts them.
        OutOfMemory: Ray killed workers because their pod or machine has too little memory.
        InputError: torch cannot use the GPUs.
        and any error that `train` raises.
    """
    os.environ.update({**environment.RAY, **os.environ})  # the user's own values win
    import ray
    from ray.train.v2.api.exceptions import TrainingFailedError

    worker_settings = {"train": train, "arguments": {"run": run, **arguments}}
    try:
        with (
            tempfile.TemporaryDirectory(prefix="infoxlm-ray-", ignore_cleanup_errors=True) as scratch,
            use_ray(num_workers),
        ):
            gpu_count = int(ray.cluster_resources().get("GPU", 0))
            if gpu_count:
                _check_gpu()  # NCCL's error message would not tell the reason
            is_cluster = bool(os.environ.get("RAY_ADDRESS"))
            if gpu_count and not is_cluster:  # a cluster replaces the GPUs of a lost pod
                num_workers = workers.limit_to_gpus(num_workers, gpu_count)
            training = _Training(worker_settings, run.name, Path(scratch), uses_gpus=gpu_count > 0)
            with workers.stop_training_on_signals(run):  # set again, because ray.init has replaced the handlers
                if 0 < min_workers < num_workers:
                    result = training.fit_elastically(num_workers, min_workers)
                else:
                    result = training.fit(num_workers, _MAX_FAILURES)
    except (TrainingFailedError, ray.exceptions.RayError) as error:
        raise to_infoxlm_error(error, str(run)) from error
    return workers.get_figures_or_raise(result.return_value)


@contextlib.contextmanager
def use_ray(num_workers: int) -> Iterator[None]:
    """Start or join Ray for the duration of the block, unless this process already uses Ray."""
    import ray

    if ray.is_initialized():
        yield
        return
    start_ray(num_workers)
    try:
        yield
    finally:
        ray.shutdown()


def to_infoxlm_error(error: Exception, subject: str) -> InfoXLMError:
    """Convert a Ray error to OutOfMemory if Ray killed a worker for lack of memory, else to WorkerLost.

    Args:
        error: Ray's error, whose message may have thousands of characters.
        subject: name of the failed object, with which the new message begins.
    """
    text = f"{error} {last_cause(error)}"  # why a worker was killed is only in the text
    if "running low on memory" not in text:
        return WorkerLost(f"{subject}: {type(error).__name__}: {shorten(str(error))}: run again to continue")
    match = re.search(r"was ([\d.]+GB) used / ([\d.]+GB) limit", text)
    usage = f" ({match[1]} used of {match[2]})" if match else ""
    return OutOfMemory(
        f"{subject}: a worker ran out of memory{usage}: raise pool.memory, or steps.memory if the step processes "
        "text; without a cluster, use fewer workers or free some memory; then run again to continue"
    )


@dataclass(frozen=True)
class _Training:
    """A training run on Ray Train."""

    worker_settings: dict[str, Any]
    """Argument of `_run_in_worker`: the training function and its arguments."""
    name: str
    scratch: Path
    """Directory for Ray's temporary files."""
    uses_gpus: bool

    def fit(self, num_workers: int, max_failures: int) -> Any:
        """Train on `num_workers` workers and return Ray's result. Restart the workers up to `max_failures` times."""
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        # Ray counts preemptions and failures of its controller separately, by default without a limit.
        failure_config = FailureConfig(
            max_failures=max_failures, max_preemption_failures=max_failures, controller_failure_limit=5
        )
        run_config = RunConfig(
            name=f"{self.name}-{secrets.token_hex(4)}",  # unique, so that Ray does not resume an earlier run
            storage_path=str(self.scratch),
            failure_config=failure_config,
        )
        backend = "nccl" if self.uses_gpus else "gloo"
        return TorchTrainer(
            _run_in_worker,
            train_loop_config=self.worker_settings,
            scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=self.uses_gpus),
            torch_config=TorchConfig(backend=backend, timeout_s=_COLLECTIVE_SECONDS),
            run_config=run_config,
        ).fit()

    def fit_elastically(self, num_workers: int, min_workers: int) -> Any:
        """Train. After the loss of a worker, continue with as many workers as the cluster can start.

        Ray Train's own elasticity is not used, because it stops a training run without saving a checkpoint.
        """
        from ray.train.v2.api.exceptions import TrainingFailedError

        resource = "GPU" if self.uses_gpus else "CPU"
        current_workers = num_workers
        for _ in range(_MAX_FAILURES):
            try:
                return self.fit(current_workers, max_failures=0)  # Ray itself would restart the same number of workers
            except TrainingFailedError as error:
                logger.warning("a worker was lost (%s)", shorten(str(error)))
                current_workers = _count_available_workers(num_workers, min_workers, resource)
                logger.warning("continuing with %d of %d workers", current_workers, num_workers)
        return self.fit(current_workers, max_failures=0)


def _count_available_workers(num_workers: int, min_workers: int, resource: str) -> int:
    """Wait for the cluster to recover, and return how many of the workers can start.

    Raises:
        WorkerLost: fewer than `min_workers` can start.
    """
    import ray
    from ray.util import placement_group, remove_placement_group

    # Reserve the resources, because Ray may still list those of the lost node. Ray removes a node that has been silent
    # for about a minute, so the list is correct after the wait.
    group = placement_group([{resource: 1}] * num_workers)
    has_recovered = group.wait(_ALL_WORKERS_SECONDS)
    remove_placement_group(group)
    if has_recovered:
        return num_workers
    available_count = min(int(ray.cluster_resources().get(resource, 0)), num_workers)
    if available_count < min_workers:
        raise WorkerLost(
            f"only {available_count} of {num_workers} workers can start, and ray.min_workers is {min_workers}: run "
            "again when nodes are available"
        )
    return available_count


def _create_private_token() -> None:
    """Create Ray's token file, readable by this user only. Ray itself would make the file readable by all users."""
    if "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ:
        return
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # mode 0600
        file.write(secrets.token_hex(32))
        file.flush()
        # A hard link never shows a partial token. An existing token is kept, because another process may use it.
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)
    path.chmod(0o600)


def start_ray(num_workers: int) -> None:
    """Join the cluster that RAY_ADDRESS names, or start Ray on this machine with a CPU core for each worker."""
    import ray

    local_cluster: dict[str, Any] = {}
    if not os.environ.get("RAY_ADDRESS"):
        num_cpus = max(num_workers + 1, os.cpu_count() or 1)  # Ray only counts cores, so they need not exist
        local_cluster = {"address": "local", "num_cpus": num_cpus}  # never joins another process's cluster
        _create_private_token()
    for attempt in range(1, _START_ATTEMPTS + 1):
        try:
            ray.init(
                logging_level=logging.WARNING,
                include_dashboard=True,  # without a dashboard, Ray Train logs a warning every second
                runtime_env={"env_vars": _make_worker_environment()},
                **local_cluster,
            )
            return
        except Exception as error:
            ray.shutdown()  # end the processes that have started, so that the next attempt starts from nothing
            if attempt == _START_ATTEMPTS:
                raise WorkerLost(f"Ray did not start in {_START_ATTEMPTS} attempts ({error}): run again") from error
            logger.warning("Ray did not start (%s), trying again", error)


def _make_worker_environment() -> dict[str, str]:
    """Return the workers' environment variables without secrets, because Ray shows the variables to all its users."""
    variables = {name: os.environ.get(name, value) for name, value in environment.RAY.items()}
    for name, value in os.environ.items():
        if name.startswith(("INFOXLM_TRACKER", "MLFLOW_", "HF_", "RUN_ID")) and not environment.is_secret(name):
            variables[name] = value
    return variables


def _check_gpu() -> None:
    """Raise InputError with the reason if torch cannot use the GPU that Ray assigns."""
    import ray

    gpu_task = ray.remote(num_gpus=1)(devices.explain_missing_gpu)
    reason = ray.get(gpu_task.remote(), timeout=_GPU_SECONDS)
    if reason:
        raise InputError(reason)


def _run_in_worker(settings: dict[str, Any]) -> dict[str, Any]:
    """Train in the process of a Ray worker. Return the outcome of `workers.attempt_training`.

    Args:
        settings: mapping with the training function ("train") and its arguments ("arguments").
    """
    import torch
    from ray import train as ray_train
    from ray.train.torch import get_device

    rank = ray_train.get_context().get_world_rank()
    level = logging.INFO if rank == 0 else logging.WARNING  # all workers log the same lines
    logging.basicConfig(level=level, format="%(message)s", force=True)
    device = get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray does not hide GPUs from workers without a GPU
        torch.set_num_threads(1)  # one core per worker
    return workers.attempt_training(settings["train"], settings["arguments"])
