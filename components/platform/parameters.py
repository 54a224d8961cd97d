"""Pass large settings through Kubeflow by reference: the store holds the content, the reference is its digest.

    STORE/parameters/SHA256.json

Kubeflow passes all inputs of a step to its pod in a single environment variable, which Linux limits to 128 KiB. Argo
keeps the inputs of all steps of a run in a single object of at most 1 MiB. Therefore, only small settings are passed
directly. Every step calls `resolve` on its parameters.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from components.platform import artifacts
from infoxlm_core.errors import ConfigError, DataCorrupt, InputError

LARGEST = 32 * 1024
"""Largest size of a run's parameters to pass directly, in bytes of JSON. Escaping makes a quotation mark 4 bytes."""
MAX_LOOP_STEPS = 150
"""Largest number of steps in a loop. Extrapolated from Kubeflow 2.17, 190 steps would fill Argo's object."""
TRIALS_PER_STEP = 10
"""Trials that one step measures if a suite has more than `MAX_LOOP_STEPS` trials."""

_KEY = "in_store"
_FOLDER = "parameters"


def fit(store: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a run, with references in place of mappings and lists if they are too large.

    Raises:
        InputError, StorageUnavailable: the store refuses, or does not answer.
    """
    if len(json.dumps(dict(parameters))) <= LARGEST:
        return dict(parameters)
    references = {}
    for name, value in parameters.items():
        is_collection = isinstance(value, dict | list)
        references[name] = write_reference(store, value) if is_collection else value
    return references


def write_reference(store: str, value: Any) -> Any:
    """Write a mapping or a list into the store. Return a reference of the same type.

    Raises:
        InputError, StorageUnavailable: the store refuses, or does not answer.
    """
    content = json.dumps(value, ensure_ascii=False)
    digest = hashlib.sha256(content.encode()).hexdigest()
    artifacts.write(store, f"{_FOLDER}/{digest}.json", content)
    return [{_KEY: digest}] if isinstance(value, list) else {_KEY: digest}


def resolve(store: str, value: Any) -> Any:
    """Return the content of a reference made by `write_reference`. Return any other value unchanged.

    Raises:
        InputError: the content is not in the store.
        DataCorrupt: the content does not match its digest.
    """
    reference = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(reference, dict) or set(reference) != {_KEY}:
        return value
    digest = str(reference[_KEY])
    path = f"{store}/{_FOLDER}/{digest}.json"
    content = artifacts.read(store, f"{_FOLDER}/{digest}.json")
    if content is None:
        raise InputError(f"{path}, a parameter of this run, does not exist: submit again with --no-cache")
    if hashlib.sha256(content).hexdigest() != digest:
        raise DataCorrupt(f"{path} was changed after it was written: delete it and submit again")
    return json.loads(content)


def split_trials(trials: Sequence[Any]) -> list[list[Any]]:
    """Divide the trials of a suite evenly among the steps of a loop.

    Neighbouring trials take about as long as each other, so they go to different steps to balance the load.

    Raises:
        ConfigError: the trials need more steps than Argo can hold.
    """
    step_count = len(trials)
    if step_count > MAX_LOOP_STEPS:
        step_count = math.ceil(len(trials) / TRIALS_PER_STEP)
    check_loop(step_count, f"{len(trials)} trials", "one task at a time (--only TASK)")
    return [list(trials[first::step_count]) for first in range(step_count)]


def check_loop(steps: int, items: str, remedy: str) -> None:
    """Raise ConfigError if a loop has more steps than Argo can hold."""
    if steps > MAX_LOOP_STEPS:
        raise ConfigError(f"{items} need {steps} steps, but Argo allows {MAX_LOOP_STEPS}: submit {remedy}")
