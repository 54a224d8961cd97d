"""Run a training stage of the core on N Ray workers.

The core writes checkpoints, curves and results. Ray starts workers, joins them in a process group, and restarts them
when a worker dies. A worker returns figures, returns an InfoXLMError (which all workers raise and a restart would
repeat), or dies.
"""

import contextlib
import functools
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from components.settings import environment
from infoxlm_core.errors import InfoXLMError, InputError, OutOfMemory, WorkerLost, last_cause, shorten
from infoxlm_core.model import devices
from infoxlm_core.training import workers

logger = logging.getLogger(__name__)

_START_ATTEMPTS = 3
_MAX_FAILURES = 3
_GPU_SECONDS = 1800  # to wait for the GPU of a lost pod; Ray Train waits as long
_ALL_WORKERS_SECONDS = 300.0  # to wait for all workers before a training run continues with fewer
_COLLECTIVE_SECONDS = 300  # to sum gradients; workers wait longer while the first works alone (`distributed.PATIENCE`)


def run(
    train: Callable[..., dict[str, Any]], num_workers: int, run: Path, min_workers: int = 0, **arguments: Any
) -> dict[str, Any]:
    """Call `train(run=run, **arguments)` on every worker. Return the result of the first worker.

    A machine with fewer GPUs than workers trains with one worker per GPU. On a cluster, a training waits until a lost
    node is replaced; with `min_workers` it continues with as many workers as fit, but at least `min_workers`.

    Raises:
        WorkerLost: workers died more often than they are restarted.
        OutOfMemory: Ray killed workers because their pod or machine has too little memory.
        InputError: torch cannot use the GPUs.
        and what `train` raises.
    """
    os.environ.update({**environment.RAY, **os.environ})
    import ray
    from ray.train.v2.api.exceptions import TrainingFailedError

    scratch = Path(tempfile.mkdtemp(prefix="infoxlm-ray-"))  # for Ray's temporary files
    starts_ray = not ray.is_initialized()
    try:
        if starts_ray:
            start(num_workers)
        gpu_count = int(ray.cluster_resources().get("GPU", 0))
        uses_gpus = gpu_count > 0
        if uses_gpus:
            _check_gpu()  # NCCL's own message would not tell the reason
        is_cluster = bool(os.environ.get("RAY_ADDRESS"))
        if uses_gpus and not is_cluster:  # a cluster that has lost a pod gets its GPUs back
            num_workers = workers.limit_to_gpus(num_workers, gpu_count)
        settings = {"train": train, "arguments": {"run": run, **arguments}}
        fit = functools.partial(_fit, settings, run.name, scratch, uses_gpus)
        with workers.stopping_on_signals(run):  # again, since ray.init has set its own handler
            if 0 < min_workers < num_workers:
                result = _fit_elastically(fit, num_workers, min_workers, "GPU" if uses_gpus else "CPU")
            else:
                result = fit(num_workers, _MAX_FAILURES)
    except (TrainingFailedError, ray.exceptions.RayError) as error:
        raise translate_error(error, str(run)) from error
    finally:
        if starts_ray:
            ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)
    return workers.unwrap_figures(result.return_value)


def translate_error(error: Exception, subject: str) -> InfoXLMError:
    """Return an error of Ray as OutOfMemory if Ray killed workers for their memory, else as WorkerLost.

    Ray's message about memory has thousands of characters. Its first lines say how much was used and available.
    """
    text = f"{error} {last_cause(error)}"
    if "running low on memory" in text:
        usage = re.search(r"was ([\d.]+GB) used / ([\d.]+GB) limit", text)
        figures = f" ({usage[1]} used of {usage[2]})" if usage else ""
        return OutOfMemory(
            f"{subject}: a worker ran out of memory{figures}: raise pool.memory, or steps.memory for text; without a "
            "cluster, use fewer workers or free some memory; then run again to continue"
        )
    return WorkerLost(f"{subject}: {type(error).__name__}: {shorten(str(error))}: run again to continue")


def _fit(
    settings: dict[str, Any], name: str, scratch: Path, uses_gpus: bool, num_workers: int, max_failures: int
) -> Any:
    """Call `_run_in_worker(settings)` on `num_workers` workers, which Ray restarts at most `max_failures` times."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    run_config = RunConfig(
        name=f"{name}-{secrets.token_hex(4)}",  # unique, because Ray would continue an earlier run of the same name
        storage_path=str(scratch),
        failure_config=FailureConfig(
            max_failures=max_failures, max_preemption_failures=max_failures, controller_failure_limit=5
        ),
    )
    return TorchTrainer(
        _run_in_worker,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=uses_gpus),
        torch_config=TorchConfig(backend="nccl" if uses_gpus else "gloo", timeout_s=_COLLECTIVE_SECONDS),
        run_config=run_config,
    ).fit()


def _fit_elastically(fit: Callable[[int, int], Any], num_workers: int, min_workers: int, resource: str) -> Any:
    """Call `fit`. After a failure, call it again with as many workers as the cluster has resources for.

    We do not use Ray Train's elasticity, because it stops a training run without saving a checkpoint first.
    """
    from ray.train.v2.api.exceptions import TrainingFailedError

    count = num_workers
    for _ in range(_MAX_FAILURES):
        try:
            return fit(count, 0)
        except TrainingFailedError as error:
            logger.warning("a worker was lost (%s)", shorten(str(error)))
            count = _count_available_workers(num_workers, min_workers, resource)
            logger.warning("continuing with %d of %d workers", count, num_workers)
    return fit(count, 0)


def _count_available_workers(num_workers: int, min_workers: int, resource: str) -> int:
    """Return how many workers can start: all if the cluster recovers within minutes, else as many as it can hold now.

    Raises:
        WorkerLost: fewer than `min_workers` can start.
    """
    import ray
    from ray.util import placement_group, remove_placement_group

    # Reserve the resources, because the cluster may still list those of the lost node. It removes them when the node
    # has been silent for about a minute, so the list is correct after the wait.
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
    """Create Ray's token file with mode 0600, because every user could read a file that Ray creates."""
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ):
        return
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # mode 0600
        file.write(secrets.token_hex(32))
        file.flush()
        with contextlib.suppress(FileExistsError):  # the token exists; another process may have just created it
            os.link(file.name, path)
    path.chmod(0o600)


def start(num_workers: int) -> None:
    """Join the cluster that RAY_ADDRESS names, or start one on this machine with a core for each worker."""
    import ray

    local_cluster: dict[str, Any] = {}
    if not os.environ.get("RAY_ADDRESS"):  # "local" avoids joining a cluster that another process left here
        local_cluster = {"address": "local", "num_cpus": max(num_workers + 1, os.cpu_count() or 1)}
        _create_private_token()
    for attempt in range(1, _START_ATTEMPTS + 1):
        try:
            ray.init(
                logging_level=logging.WARNING,
                include_dashboard=True,  # without it Ray Train logs a warning every second
                runtime_env={"env_vars": _make_worker_environment()},
                **local_cluster,
            )
            return
        except Exception as error:
            ray.shutdown()
            if attempt == _START_ATTEMPTS:
                raise WorkerLost(f"Ray did not start in {_START_ATTEMPTS} attempts ({error}): run again") from error
            logger.warning("Ray did not start (%s), trying again", error)


def _make_worker_environment() -> dict[str, str]:
    """Return the environment variables for the workers, without secrets, because Ray shows them to all its users."""
    variables = {name: os.environ.get(name, value) for name, value in environment.RAY.items()}
    for name, value in os.environ.items():
        if name.startswith(("INFOXLM_TRACKER", "MLFLOW_", "HF_", "RUN_ID")) and not environment.is_secret(name):
            variables[name] = value
    return variables


def _check_gpu() -> None:
    """Raise InputError with the reason if torch cannot use a GPU that Ray assigns."""
    import ray

    task = ray.remote(num_gpus=1)(devices.explain_missing_gpu).remote()
    reason = ray.get(task, timeout=_GPU_SECONDS)
    if reason:
        raise InputError(reason)


def _run_in_worker(settings: dict[str, Any]) -> dict[str, Any]:
    """Configure the process of a Ray worker, and run the training in it."""
    import torch
    from ray import train as ray_train
    from ray.train.torch import get_device

    rank = ray_train.get_context().get_world_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s", force=True)
    device = get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray does not hide GPUs from a worker that was assigned none
        torch.set_num_threads(1)  # one core per worker
    return workers.attempt(settings["train"], settings["arguments"])
