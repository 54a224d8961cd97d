"""Run a training stage of the core on N Ray workers.

Checkpoints, curves and results are files of the core's; Ray starts workers, joins them in a process group and starts
them again when one dies. A worker ends in three ways: with figures, with an error of ours that all workers share
(returned, since trying again would not help), or dead.
"""

import bisect
import contextlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from components.settings import environment
from infoxlm_core.errors import InputError, WorkerLost
from infoxlm_core.model import devices
from infoxlm_core.training import workers

logger = logging.getLogger(__name__)

_TRIES = 3
_FAILURES = 3
_SECONDS_TO_COME = 1800  # a GPU of a pod that was lost; as long as Ray Train waits
_SECONDS_FOR_ALL, _SECONDS_FOR_SOME = 300.0, 30.0
"""How long a training that may go on with fewer workers waits for all of them again, and for each smaller number."""
_SECONDS_TO_COLLECT = 300  # gradients; for what the first worker does alone the others wait longer (`distributed`)


def run(
    train: Callable[..., dict[str, Any]], num_workers: int, run: Path, min_workers: int = 0, **arguments: Any
) -> dict[str, Any]:
    """Call `train(run=run, **arguments)` on every worker; return what the first one returned.

    A machine with fewer GPUs than workers trains on those, with fewer workers. On a cluster a training waits for a node
    that was lost; with `min_workers` it goes on without, on as many as there are places for, and no fewer than these.

    Raises:
        WorkerLost: a worker died more often than Ray was told to start it again.
        InputError: torch cannot use the GPUs.
        and what `train` raises.
    """
    os.environ.update({**environment.RAY, **os.environ})
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    scratch = Path(tempfile.mkdtemp(prefix="infoxlm-ray-"))  # Ray's own bookkeeping is disposable
    mine = not ray.is_initialized()
    try:
        if mine:
            start(num_workers)
        found = ray.cluster_resources().get("GPU", 0)  # of a cluster: its head has none itself
        gpu = found > 0
        if gpu:
            _look_at_one_gpu()  # before NCCL does, which only says that there is none
        if gpu and not os.environ.get("RAY_ADDRESS"):  # of a cluster a pod may be lost: wait for its GPUs
            num_workers = workers.limit_to_gpus(num_workers, int(found))
        with workers.stopping_on_signals(run):  # once more: ray.init has put its own handler

            def fit(count: int, failures: int) -> Any:
                return TorchTrainer(
                    _work,
                    train_loop_config={"train": train, "arguments": {"run": run, **arguments}},
                    scaling_config=ScalingConfig(num_workers=count, use_gpu=gpu),
                    torch_config=TorchConfig(backend="nccl" if gpu else "gloo", timeout_s=_SECONDS_TO_COLLECT),
                    run_config=RunConfig(
                        name=f"{run.name}-{secrets.token_hex(4)}",  # Ray would take another attempt for this one
                        storage_path=str(scratch),
                        failure_config=FailureConfig(
                            max_failures=failures, max_preemption_failures=failures, controller_failure_limit=5
                        ),
                    ),
                ).fit()

            if 0 < min_workers < num_workers:
                result = _fit_with_what_is_there(fit, num_workers, min_workers, "GPU" if gpu else "CPU")
            else:
                result = fit(num_workers, _FAILURES)
    except (TrainingFailedError, ray.exceptions.RayError) as error:
        reason = " ".join(str(error).split())[-300:]
        raise WorkerLost(f"{run}: {type(error).__name__}: {reason}: run again to go on") from error
    finally:
        if mine:
            ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)
    return workers.figures(result.return_value)


def _fit_with_what_is_there(fit: Callable[[int, int], Any], wanted: int, least: int, resource: str) -> Any:
    """`fit`, again after a failure, with as many workers as there are places for.

    Ray Train's own elasticity stops a training that runs, without a checkpoint, to resize it.
    """
    from ray.train.v2.api.exceptions import TrainingFailedError

    count = wanted
    for failures in range(_FAILURES + 1):
        try:
            return fit(count, 0)
        except TrainingFailedError as error:
            if failures == _FAILURES:
                raise
            logger.warning("a worker is lost (%s)", " ".join(str(error).split())[-200:])
            count = _places(wanted, least, resource)
            logger.warning("going on with %d of %d workers", count, wanted)
    raise AssertionError("unreachable")


def _places(wanted: int, least: int, resource: str) -> int:
    """How many workers can start now: all, if they can within minutes, else as many as there are places for.

    Raises:
        WorkerLost: fewer than `least`.
    """
    from ray.util import placement_group, remove_placement_group

    def there_are(count: int) -> bool:
        # what a cluster says it has may be on a node that is gone: ask for it
        asked = placement_group([{resource: 1}] * count)
        there = asked.wait(_SECONDS_FOR_ALL if count == wanted else _SECONDS_FOR_SOME)
        remove_placement_group(asked)
        return bool(there)

    if there_are(wanted):
        return wanted
    counts = range(least, wanted)  # by halves: of 63 numbers six are tried
    places = bisect.bisect_left(counts, True, key=lambda count: not there_are(count))
    if not places:
        raise WorkerLost(f"no place for {least} workers (ray.min_workers), of {wanted}: run again when nodes are back")
    return counts[places - 1]


def _keep_token_private() -> None:
    """Make the token of clusters on this machine before Ray does, whose file every user could read."""
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ):
        return
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # mode 0600
        file.write(secrets.token_hex(32))
        file.flush()
        with contextlib.suppress(FileExistsError):  # there is one, or somebody else was faster
            os.link(file.name, path)
    path.chmod(0o600)


def start(num_workers: int) -> None:
    """Join the cluster that RAY_ADDRESS names, else start one on this machine with a core for each worker."""
    import ray

    here: dict[str, Any] = {}
    if not os.environ.get("RAY_ADDRESS"):  # "local": no cluster that somebody else has left on this machine
        here = {"address": "local", "num_cpus": max(num_workers + 1, os.cpu_count() or 1)}
        _keep_token_private()
    for attempt in range(1, _TRIES + 1):
        try:
            ray.init(
                logging_level=logging.WARNING,
                include_dashboard=True,  # without it Ray Train complains every second
                runtime_env={"env_vars": _variables()},
                **here,
            )
            return
        except Exception as error:
            ray.shutdown()
            if attempt == _TRIES:
                raise WorkerLost(f"Ray does not start after {_TRIES} tries ({error}): run again") from error
            logger.warning("Ray did not start (%s), trying again", error)


def _variables() -> dict[str, str]:
    """What workers must know of this process's environment; no secret, for Ray shows them to all its users."""
    passed_on = ("INFOXLM_TRACKER", "MLFLOW_", "HF_", "RUN_ID")
    known = {name: value for name, value in os.environ.items() if name.startswith(passed_on)}
    ours = {name: os.environ.get(name, value) for name, value in environment.RAY.items()}
    return ours | {name: value for name, value in known.items() if not environment.is_secret(name)}


def _look_at_one_gpu() -> None:
    """Raise InputError if torch cannot use a GPU that Ray gives it."""
    import ray

    if why := ray.get(ray.remote(num_gpus=1)(devices.why_no_gpu).remote(), timeout=_SECONDS_TO_COME):
        raise InputError(why)


def _work(settings: dict[str, Any]) -> dict[str, Any]:
    """The body of one Ray worker."""
    import torch
    from ray import train as ray_train
    from ray.train.torch import get_device

    rank = ray_train.get_context().get_world_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s", force=True)
    device = get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray hides none from a worker that was given none
        torch.set_num_threads(1)  # one core a worker
    return workers.attempt(settings["train"], settings["arguments"])
