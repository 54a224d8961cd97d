"""Settings that travel through Kubeflow by reference: the store has the content, and the reference is its digest.

    STORE/parameters/SHA256.json

Kubeflow hands all inputs of a step to its pod in one variable, for which Linux takes 128 KiB, and Argo keeps the inputs
of all steps of a run in one object of 1 MiB. So a step passes settings on by reference, and a person may give them
directly as long as they are small. Every step calls `resolve` on the mappings and lists that it is given.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from components.platform import artifacts
from infoxlm_core.errors import ConfigError, DataCorrupt, InputError

LARGEST = 32 * 1024
"""Bytes of JSON up to which the parameters of a run travel directly. A quotation mark takes four bytes on the way."""
MOST_LOOP_STEPS = 150
"""Steps that a loop may have. Calculated from the status of a run on Kubeflow 2.17, 190 would fill Argo's object."""
POINTS_PER_STEP = 10
"""Points that one step measures, of a suite with more than `MOST_LOOP_STEPS` points."""

_KEY = "in_store"
_FOLDER = "parameters"


def fit(store: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a run as they can travel: directly, or, if they are large, by reference.

    Raises:
        InputError, StorageUnavailable: the store refuses, or does not answer.
    """
    if len(json.dumps(dict(parameters))) <= LARGEST:
        return dict(parameters)
    return {
        name: by_reference(store, value) if isinstance(value, dict | list) else value
        for name, value in parameters.items()
    }


def by_reference(store: str, value: Any) -> Any:
    """Write a mapping or a list into the store; return a reference of the same type.

    Raises:
        InputError, StorageUnavailable: the store refuses, or does not answer.
    """
    content = json.dumps(value, ensure_ascii=False)
    digest = hashlib.sha256(content.encode()).hexdigest()
    artifacts.write(store, f"{_FOLDER}/{digest}.json", content)
    return [{_KEY: digest}] if isinstance(value, list) else {_KEY: digest}


def resolve(store: str, value: Any) -> Any:
    """Return what a reference of `by_reference` refers to; return any other value as it is.

    Raises:
        InputError: the store does not have it.
        DataCorrupt: the content has another digest.
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


def split_points(points: Sequence[Any]) -> list[list[Any]]:
    """Divide the points of a suite among the steps of a loop, as evenly as possible.

    Neighbouring points take equally long, so they go to different steps.

    Raises:
        ConfigError: they need more steps than Argo can hold.
    """
    steps = len(points) if len(points) <= MOST_LOOP_STEPS else -(-len(points) // POINTS_PER_STEP)
    check_loop(steps, f"{len(points)} points", "one task at a time (--only TASK)")
    return [list(points[first::steps]) for first in range(steps)]


def check_loop(steps: int, items: str, remedy: str) -> None:
    """Raise ConfigError if Argo cannot hold a loop of so many steps."""
    if steps > MOST_LOOP_STEPS:
        raise ConfigError(f"{items} need {steps} steps, and Argo holds {MOST_LOOP_STEPS}: submit {remedy}")
