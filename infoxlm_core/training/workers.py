"""Code shared by all launchers of training workers: worker counts, errors as results, stop signals."""

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from infoxlm_core import errors, user_files
from infoxlm_core.errors import InfoXLMError

logger = logging.getLogger(__name__)


def limit_to_gpus(workers: int, gpus: int) -> int:
    """Limit the number of workers to one per GPU. Log a warning if there are fewer GPUs than workers."""
    if gpus < workers:
        logger.warning("%d workers were requested, but there are %d GPUs: training with %d", workers, gpus, gpus)
    return min(workers, gpus)


def attempt_training(train: Callable[..., dict[str, Any]], arguments: dict[str, Any]) -> dict[str, Any]:
    """Train in a worker. Return {"figures": …}, or {"error": class, "message": …} if a restart would not help.

    All workers raise the same InfoXLMError (`distributed.sharing_errors`). Any other error may occur on a single
    worker. With several workers, it is raised here, so that the launcher stops the other workers.
    """
    # Imported here, because launchers do not need torch.
    from infoxlm_core.training import distributed

    try:
        return {"figures": train(**arguments)}
    except InfoXLMError as error:
        return _describe_error(error)
    except BaseException as error:
        if distributed.world_size() > 1:
            raise
        known_error = user_files.translate_error(error, arguments.get("run", ""))
        if known_error is None:
            raise
        return _describe_error(known_error)


def _describe_error(error: InfoXLMError) -> dict[str, Any]:
    """Convert an error to a result from which `get_figures_or_raise` can restore it in another process."""
    return {"error": type(error).__name__, "message": str(error)}


def get_figures_or_raise(outcome: dict[str, Any]) -> dict[str, Any]:
    """Return the figures from an outcome of `attempt_training`, or raise the error in the outcome."""
    if "error" in outcome:
        raise errors.from_name(outcome["error"], outcome["message"])
    return outcome["figures"]


def stop_training_on_signals(run: Path) -> contextlib.AbstractContextManager[None]:
    """Create RUN/stop on SIGTERM, SIGINT and SIGHUP, so that training saves and stops after its next step."""
    return handle_signals(lambda *_: (run / "stop").touch())


@contextlib.contextmanager
def handle_signals(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Call a handler on SIGTERM, SIGINT and SIGHUP inside this context. SIGHUP stays ignored under `nohup`.

    Does nothing in threads other than the main thread, because Python does not allow signal handlers there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handled.append(signal.SIGHUP)
    previous_handlers = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous_handler in previous_handlers.items():
            signal.signal(number, previous_handler)
