"""Parameters too large to travel through Kubeflow are put into the store, and a reference to their content travels.

Linux takes 128 KiB for one argument or variable. All inputs of a step are JSON (`--executor_input`) in the JSON of its
pod's patch in the JSON of Argo's template, which is a variable of the pod: there a quotation mark is four bytes. Beyond
128 KiB Argo makes a ConfigMap, for which Kubeflow has no right. Each step reads for itself what it is referred to.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from components.platform import artifacts
from infoxlm_core.errors import ConfigError, DataCorrupt, InputError

LARGEST = 100 * 1024
"""Bytes of all that travels together, as they lie in Argo's template; the rest is for what Kubeflow adds."""
OF_A_LOOP = 6 * 1024
"""The same of a task of a loop: a pod's arguments are in the run's status, too, which Argo keeps in one object."""
_KEY = "in_store"
_FOLDER = "parameters"


def shrink(store: str, parameters: Mapping[str, Any], most: int = LARGEST) -> dict[str, Any]:
    """Put the largest mappings and lists into the store, until the parameters have no more than so many bytes.

    Raises:
        ConfigError: they have more all the same.
        InputError, StorageUnavailable: the store refuses, or does not answer.
    """
    shrunk, sizes = dict(parameters), {name: _size(value) for name, value in parameters.items()}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if sum(sizes.values()) > most and isinstance(shrunk[name], dict | list):
            shrunk[name] = _put(store, shrunk[name])
            sizes[name] = _size(shrunk[name])
    if (size := sum(sizes.values())) > most:
        raise ConfigError(f"the parameters have {size} bytes without sections and lists, of {most}: shorten them")
    return shrunk


def resolve(store: str, value: Any) -> Any:
    """A parameter as it was before `shrink`.

    Raises:
        InputError: what it refers to is not in the store.
        DataCorrupt: it is, and with other content.
    """
    reference = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(reference, dict) or set(reference) != {_KEY}:
        return value
    name = str(reference[_KEY])
    content = artifacts.read(store, f"{_FOLDER}/{name}.json")
    if content is None:
        raise InputError(f"{store}/{_FOLDER}/{name}.json, a parameter, is not there: submit again, with --no-cache")
    if hashlib.sha256(content).hexdigest() != name:
        raise DataCorrupt(f"{store}/{_FOLDER}/{name}.json is not what was written: remove it and submit again")
    return json.loads(content)


def _put(store: str, value: Any) -> Any:
    content = json.dumps(value, ensure_ascii=False)
    name = hashlib.sha256(content.encode()).hexdigest()
    artifacts.write(store, f"{_FOLDER}/{name}.json", content)
    return [{_KEY: name}] if isinstance(value, list) else {_KEY: name}


def _size(value: Any) -> int:
    """Bytes in Argo's template."""
    return len(json.dumps(json.dumps(json.dumps(value))))
