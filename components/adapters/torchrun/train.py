"""Run a training stage of the core on N processes of this machine without Ray, as `torchrun` does.

torch's elastic agent joins the processes in a group. When a process dies, the agent restarts all processes, and the
training resumes from the newest checkpoint.
"""

import logging
import os
import signal
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infoxlm_core.errors import WorkerLost
from infoxlm_core.model import devices
from infoxlm_core.training import workers

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

MAX_RESTARTS = 3
_COLLECTIVE_TIMEOUT = timedelta(seconds=300)  # for summing gradients; not while the first worker works alone


def launch_training(
    train: Callable[..., dict[str, Any]], num_workers: int, run: Path, **arguments: Any
) -> dict[str, Any]:
    """Call a training function in worker processes on this machine and return the result of the first worker.

    A machine with fewer GPUs than workers trains with one worker per GPU.

    Args:
        train: training function.
        num_workers: number of workers.
        run: directory of the training run, passed to `train` on every worker.
        arguments: further arguments of `train`.

    Raises:
        WorkerLost: workers died more than `MAX_RESTARTS` times.
        InputError: torch cannot use the GPUs.
        and any error that `train` raises.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    gpu_count = devices.count_gpus()
    if gpu_count:
        num_workers = workers.limit_to_gpus(num_workers, gpu_count)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="infoxlm-torchrun-") as scratch:  # for the agent's logs
        launch = elastic_launch(_make_launch_config(num_workers, run.name, scratch), _run_worker)
        try:
            outcomes = launch(train, {"run": run, **arguments})
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            reason = f"worker {rank} ended with exit code {failure.exitcode}"
            raise WorkerLost(f"{run}: {reason}, even after {MAX_RESTARTS} restarts: run again to continue") from error
    return workers.get_figures_or_raise(outcomes[0])  # `outcomes` is indexed by rank


def _make_launch_config(num_workers: int, run_id: str, log_directory: str) -> "LaunchConfig":
    """Return torch's launch configuration for worker processes on this machine."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_workers,
        run_id=run_id,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        local_addr="127.0.0.1",
        max_restarts=MAX_RESTARTS,
        # On these signals, the agent ends the workers at once. Unlike torch's default, the list has neither SIGTERM nor
        # SIGINT, because on these two the training saves a checkpoint before it ends.
        signals_to_handle="SIGHUP,SIGQUIT",
        logs_specs=DefaultLogsSpecs(log_dir=log_directory),
    )


def _run_worker(train: Callable[..., dict[str, Any]], arguments: dict[str, Any]) -> dict[str, Any]:
    """Train in a worker process. Return the outcome of `workers.attempt_training`."""
    import torch
    import torch.distributed as dist

    _leave_process_group_of_agent()  # on Ctrl-C, only the agent's process reacts: it asks the workers to stop
    level = logging.INFO if os.environ["RANK"] == "0" else logging.WARNING  # all workers log the same lines
    logging.basicConfig(level=level, format="%(message)s", force=True)
    uses_gpu = torch.cuda.is_available()
    if uses_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)  # one core per worker
    agent_store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    # Use one prefix per attempt, because the store still contains the addresses of dead workers.
    attempt_store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", agent_store)
    dist.init_process_group(
        backend="nccl" if uses_gpu else "gloo",
        store=attempt_store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=_COLLECTIVE_TIMEOUT,
    )
    try:
        return workers.attempt_training(train, arguments)
    finally:
        dist.destroy_process_group()


def _leave_process_group_of_agent() -> None:
    """Protect this worker from signals to the agent's process group, such as Ctrl-C.

    Only the agent handles these signals: it asks all workers to stop. Restarts still work, because the agent then
    sends SIGTERM to each worker instead of to the group.
    """
    agent_id = os.getppid()
    os.setpgid(0, 0)

    def exit_if_agent_died(*_: object) -> None:
        if os.getppid() != agent_id:
            os._exit(1)  # at once, because nobody waits for the result any more

    signal.signal(signal.SIGINT, exit_if_agent_died)  # torch sends SIGINT to the workers when the agent dies
