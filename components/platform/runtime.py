"""How a component ends: clearly, and with its driver."""

import contextlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from components.adapters import storage
from components.platform import artifacts
from components.settings import environment
from infoxlm_core import outside
from infoxlm_core.errors import InfoXLMError, InputError
from infoxlm_core.results.trials import Trial

logger = logging.getLogger(__name__)

DRIVER = "INFOXLM_DRIVER_PID"
"""Environment variable of a local run: the process whose end ends every stage."""


@contextlib.contextmanager
def ending_clearly(
    store: str,
    name: str,
    trial: Mapping[str, Any] | None = None,
    outcome_of: str = "",
) -> Iterator[None]:
    """Run a stage's body; turn what goes wrong into one line, an exit code and an outcome in the store.

    Args:
        store: directory, or s3://bucket/prefix, that gets the outcome.
        name: of the stage.
        trial: of an ablation or a suite, so that every line says which one speaks.
        outcome_of: the job that this is; its outcome is kept by its name, for whichever pipeline run follows it.
    """
    environment.take_ours(os.environ)
    if trial:
        name = f"{name} {Trial.parse(trial).name}"
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name}: %(message)s", datefmt="%H:%M:%S", force=True)
    for chatty in ("httpx", "py4j", "matplotlib", "fontTools", "alembic", "botocore"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    _end_with_driver()
    try:
        pipeline_run()
        if storage.is_remote(store) and store.endswith("/"):
            raise InputError(f"store {store}: write it without the slash at its end")
        yield
        return
    except InfoXLMError as error:
        failure = error
    except BaseException as error:
        if not isinstance(error, Exception) and not outside.is_panic(error):
            raise
        if said := outside.translate(error, store):
            failure = said
        else:
            traceback.print_exc()
            failure = InfoXLMError(f"{type(error).__name__}: {error}")
    line = " ".join(str(failure).split())
    outcome: dict[str, Any] = {"stage": name, "code": failure.exit_code, "class": type(failure).__name__}
    with contextlib.suppress(OSError, InfoXLMError):  # a full disk, or too old a Kubeflow, must not hide why
        outcome |= {"message": line, "run": pipeline_run()}
        for place in dict.fromkeys((str(artifacts.local(store)), store)):  # the local runner reads it here
            artifacts.write(
                place, outcome_name(outcome_of or name, outcome_of and "jobs"), json.dumps(outcome, indent=1)
            )
    print(f"{name}: {type(failure).__name__}: {line}", file=sys.stderr, flush=True)
    sys.exit(failure.exit_code)


def pipeline_run() -> str:
    """What tells this pipeline run from others: KFP's id of it, from the pod's label, or the local runner's.

    Raises:
        InputError: this is a pod of a Kubeflow that has dropped our settings of pods, the label among them.
    """
    if not os.environ.get("RUN_ID") and os.environ.get("KFP_POD_NAME"):
        raise InputError("RUN_ID is not set: Kubeflow Pipelines is too old (backend before 2.17): update it, run again")
    return os.environ.get("RUN_ID") or "by-hand"


def outcome_name(of: str = "", run: str = "") -> str:
    """Where in the store a stage, or a job, says why it failed; without one, the folder of all of a pipeline run."""
    safe = re.sub(r"[^\w.-]+", "-", of)
    return f"outcome/{run or pipeline_run()}" + (f"/{safe}.json" if safe else "")


def _end_with_driver() -> None:
    """Ask this process to stop (SIGTERM) when the driver of a local run is gone: nobody waits for it any more."""
    driver = int(os.environ.get(DRIVER, "0"))

    def watch() -> None:
        while Path(f"/proc/{driver}").exists():
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    if driver and Path(f"/proc/{driver}").exists():
        threading.Thread(target=watch, name="driver-watch", daemon=True).start()
