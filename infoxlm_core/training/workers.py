"""What every way to start the workers of a training has in common: how it is asked to stop, how an error comes back."""

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from infoxlm_core import errors, outside
from infoxlm_core.errors import InfoXLMError

logger = logging.getLogger(__name__)


def with_a_gpu_each(wanted: int, gpus: int) -> int:
    """How many workers train if each needs a GPU: as many as wanted, or one a GPU if there are fewer.

    The figures of a pre-training are those of the wanted workers but for rounding.
    """
    if gpus < wanted:
        logger.warning("%d workers were asked for and there are %d GPUs: %d train, one a GPU", wanted, gpus, gpus)
    return min(wanted, gpus)


def attempt(train: Callable[..., dict[str, Any]], arguments: dict[str, Any]) -> dict[str, Any]:
    """Train, in a worker: {"figures": …}, or {"error": class, "message": …} of an error that all workers share.

    Such an error is a result, since starting the workers again would not help. What the operating system says to one
    of several workers is none: the others would wait for a worker that has ended well.
    """
    from infoxlm_core.training import distributed, network  # import torch: who starts workers does without

    try:
        network.tell()
        return {"figures": train(**arguments)}
    except InfoXLMError as error:
        failure = error
    except BaseException as error:
        said = outside.translate(error, arguments.get("run", "")) if distributed.world_size() == 1 else None
        if said is None:
            raise
        failure = said
    return {"error": type(failure).__name__, "message": str(failure)}


def figures(outcome: dict[str, Any]) -> dict[str, Any]:
    """What a worker's `train` returned; raises what it raised."""
    if "error" in outcome:
        raise errors.named(outcome["error"], outcome["message"])
    return outcome["figures"]


@contextlib.contextmanager
def stopping_on_signals(run: Path) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C leave a note that the training finds at its next step: it saves, stops and says so."""

    def leave_note(*_: object) -> None:
        (run / "stop").touch()

    if threading.current_thread() is not threading.main_thread():  # whoever runs us handles signals
        yield
        return
    asking = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # the terminal is closed; `nohup` makes it mean nothing
        asking.append(signal.SIGHUP)
    before = {number: signal.signal(number, leave_note) for number in asking}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
