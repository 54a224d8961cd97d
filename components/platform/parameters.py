"""Pass large settings through Kubeflow by reference: the store holds the content, and the reference holds its digest.

    STORE/parameters/SHA256.json

Kubeflow passes all inputs of a step in one environment variable, which Linux limits to 128 KiB. Argo keeps the inputs
of all steps of a run in one object of at most 1 MiB. Therefore, only small settings are passed directly. Every step
calls `dereference` on its parameters.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from components.platform import artifacts
from infoxlm_core.errors import ConfigError, DataCorrupt, InputError

MAX_DIRECT_BYTES = 32 * 1024
"""Largest JSON size of parameters that are passed directly. Escaping expands each quotation mark to 4 bytes, and the
escaped parameters must fit in the environment variable of 128 KiB."""
MAX_LOOP_STEPS = 150
"""Largest number of steps in a loop. As measured with Kubeflow 2.17, about 190 steps fill Argo's object."""
TRIALS_PER_STEP = 10
"""Number of trials per step if a suite has more than `MAX_LOOP_STEPS` trials."""

_REFERENCE_KEY = "in_store"


def store_if_large(store: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's parameters. If they are too large for Kubeflow, replace all mappings and lists by references.

    A reference contains only the digest of the content, and the content is written to the store.

    Raises:
        InputError, StorageUnavailable: the store refuses, or does not answer.
    """
    if len(json.dumps(dict(parameters))) <= MAX_DIRECT_BYTES:
        return dict(parameters)
    references = {}
    for name, value in parameters.items():
        is_collection = isinstance(value, dict | list)
        references[name] = write_reference(store, value) if is_collection else value
    return references


def write_reference(store: str, value: Any) -> Any:
    """Write a mapping or a list to the store. Return a reference of the same type, as Kubeflow requires.

    Raises:
        InputError, StorageUnavailable: the store refuses, or does not answer.
    """
    content = json.dumps(value, ensure_ascii=False)
    digest = hashlib.sha256(content.encode()).hexdigest()
    artifacts.write(store, f"parameters/{digest}.json", content)
    reference = {_REFERENCE_KEY: digest}
    return [reference] if isinstance(value, list) else reference


def dereference(store: str, value: Any) -> Any:
    """Return the content for a reference from `write_reference`. Return any other value unchanged.

    Raises:
        InputError: the content is not in the store.
        DataCorrupt: the content does not match its digest.
    """
    # The reference to a list is also a list, because Kubeflow checks the types of parameters.
    reference = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(reference, dict) or set(reference) != {_REFERENCE_KEY}:
        return value
    digest = str(reference[_REFERENCE_KEY])
    path = f"parameters/{digest}.json"
    content = artifacts.read(store, path)
    if content is None:
        raise InputError(f"{store}/{path}, a parameter of this run, does not exist: submit again with --no-cache")
    if hashlib.sha256(content).hexdigest() != digest:
        raise DataCorrupt(f"{store}/{path} was changed after it was written: delete it and submit again")
    return json.loads(content)


def split_trials(trials: Sequence[Any]) -> list[list[Any]]:
    """Divide the trials of a suite evenly among the steps of a loop.

    Neighbouring trials take about equally long. Distributing them to different steps gives all steps similar durations.

    Raises:
        ConfigError: the trials need more steps than Argo allows.
    """
    step_count = len(trials)  # if possible, one step per trial, so that Kubeflow shows and retries single trials
    if step_count > MAX_LOOP_STEPS:
        step_count = math.ceil(len(trials) / TRIALS_PER_STEP)
    check_loop_size(step_count, f"{len(trials)} trials", remedy="one task at a time (--only TASK)")
    return [list(trials[first::step_count]) for first in range(step_count)]


def check_loop_size(step_count: int, items: str, remedy: str) -> None:
    """Raise ConfigError if a loop has more steps than Argo allows.

    Args:
        step_count: number of steps of the loop.
        items: description of the loop's items for the error message, such as `1501 trials`.
        remedy: smaller loop to suggest in the error message.
    """
    if step_count > MAX_LOOP_STEPS:
        raise ConfigError(f"{items} need {step_count} steps, but Argo allows {MAX_LOOP_STEPS}: submit {remedy}")
