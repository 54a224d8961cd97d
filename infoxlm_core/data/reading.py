"""Read the parts of token shards: safetensors files that are verified and mapped into memory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from infoxlm_core import manifests

REMEDY = "remove the directory and run tokenize_corpus again"
_TYPES: dict[str, np.dtype[Any]] = {"U32": np.dtype("<u4"), "U64": np.dtype("<u8")}  # by their safetensors names


def map_arrays(path: Path) -> dict[str, np.ndarray]:
    """Map the arrays of a safetensors file into memory, whose own library would copy them."""
    content = np.asarray(np.memmap(path, np.uint8, "r"))
    header_size = int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8 : 8 + header_size].tobytes())
    data = content[8 + header_size :]
    arrays = {}
    for name, description in header.items():
        start, end = description["data_offsets"]
        arrays[name] = data[start:end].view(_TYPES[description["dtype"]])
    return arrays


class PartReader:
    """Reads the parts of the shards in a directory, and verifies each part before its first use.

    Args:
        directory: the shards.
        files: size and digest of each file, from the manifest.
    """

    def __init__(self, directory: Path, files: Mapping[str, dict[str, Any]]) -> None:
        self._directory = directory
        self._files = files

    def size(self, name: str) -> int:
        """Return the bytes of a part."""
        return self._files[name]["size"]

    def read(self, name: str) -> dict[str, np.ndarray]:
        """Return the arrays of a part. Raise DataCorrupt if its file is missing or differs from the manifest."""
        path = manifests.join_inside(self._directory, name)
        manifests.verify_file(path, self._files[name], REMEDY)
        return map_arrays(path)
