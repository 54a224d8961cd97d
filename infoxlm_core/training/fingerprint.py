"""Compare a run with its checkpoints: data, tokenizer and settings must be equal; code and libraries may differ.

A run with changed data or settings is not resumed, because its curve could not be reproduced. Only a pre-training may
accept the changes, by naming the run in `checkpoints.resume`, because it may be too costly to repeat. Changed code
and libraries are only logged, so that a bug fix does not end a run.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from infoxlm_core import manifests, user_files
from infoxlm_core.config import PretrainingConfig, StageConfig
from infoxlm_core.errors import ConfigMismatch
from infoxlm_core.languages import is_known
from infoxlm_core.model.huggingface import directories
from infoxlm_core.training.finetuning import selection

logger = logging.getLogger(__name__)
LOADED_SUFFIXES = (".safetensors", ".json", ".model", ".txt")  # file types that are loaded from a model directory


@dataclass(frozen=True)
class Fingerprint:
    """The settings, inputs and software on which a training run depends."""

    compared: dict[str, object] = field(default_factory=dict)  # stage version, decisive settings, input digests
    recorded: dict[str, object] = field(default_factory=dict)  # code, libraries, threads, workers, device type
    is_of_pretraining: bool = True  # only the config of a pre-training can accept changes

    @classmethod
    def of(cls, config: StageConfig, version: int, inputs: Mapping[str, str]) -> Self:
        """Return the fingerprint of a training run in this process.

        Args:
            config: stage config.
            version: stage version from `manifests.VERSIONS`.
            inputs: input digests by name.
        """
        from infoxlm_core.training import distributed  # imported here, because comparing fingerprints needs no torch

        compared = collect_decisive_values(config, version, inputs)
        recorded = manifests.describe_software() | distributed.describe()
        return cls(compared, recorded, isinstance(config, PretrainingConfig))

    def meta(self) -> dict[str, Any]:
        """Return the fingerprint's fields in a checkpoint's meta.json."""
        return {"fingerprint": self.compared, "made_by": self.recorded}

    def check(self, meta: Mapping[str, Any], run: str, accept_changes: bool = False) -> None:
        """Compare this fingerprint with a checkpoint's fingerprint. Log accepted differences.

        Args:
            meta: content of the checkpoint's meta.json.
            run: directory of the run.
            accept_changes: whether to resume even if data or settings differ.

        Raises:
            ConfigMismatch: data or settings differ, and changes are not accepted.
        """
        decisive_changes = list_differences(meta["fingerprint"], self.compared)
        if decisive_changes and not accept_changes:
            raise make_mismatch(run, decisive_changes, self.is_of_pretraining)
        saved_software = meta.get("made_by", {})  # older checkpoints lack it
        changes = decisive_changes + list_differences(saved_software, self.recorded)
        if changes:
            logger.warning("%s resumes with changes: %s", run, "; ".join(changes))


def collect_decisive_values(config: StageConfig, version: int, inputs: Mapping[str, str]) -> dict[str, object]:
    """Collect the values that determine a stage's result, by name: its version, settings and inputs.

    Settings for saving, logging and probing are omitted. Input digests replace input paths.
    """
    return {"version": version, **flatten(config.result_fields()), **inputs}


def list_differences(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Describe each difference between two mappings by a phrase such as "seed was 1, is 2"."""
    phrases = []
    for name in sorted(before.keys() | after.keys()):
        old_value = before.get(name)
        new_value = after.get(name)
        if old_value != new_value:
            phrases.append(f"{name} was {old_value!r}, is {new_value!r}")
    return phrases


def make_mismatch(run: str, changes: list[str], is_pretraining: bool = True) -> ConfigMismatch:
    """Create the error for a run whose data or settings have changed since the start."""
    remedy = "Change them back"
    if is_pretraining:
        name = run.rstrip("/").rpartition("/")[2]  # `run` may be a path or a URI
        remedy += f", accept the changes with pretraining.checkpoints.resume: {name}"
    return ConfigMismatch(
        f"{run} was started with other data or settings: {'; '.join(changes)}. {remedy}, or delete {run} to start over"
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Flatten a nested mapping to dotted names: {"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def digest_inputs(paths: str | Sequence[str] | None) -> list[str]:
    """Return a digest of each file or directory. Missing paths have no digest.

    A digest does not depend on the location. It includes the file name, which often contains the language and the
    split (`xquad.de.json`), and the directory name if this is a language code (`fr/dev_2k.tsv`).
    """
    if isinstance(paths, str):
        paths = [paths]
    digests = []
    for name in paths or []:
        path = Path(name).absolute()
        if path.is_dir():
            digests.append(_digest_directory(path))
        elif path.exists():
            digests.append(manifests.digest([_find_language(path.parent), path.name, manifests.file_sha256(path)]))
    return digests


def digest_inputs_by_role(roles: Mapping[str, Sequence[str]]) -> str:
    """Return a digest of files and their roles, such as training and test."""
    return manifests.digest({role: digest_inputs(paths) for role, paths in roles.items()})


def _digest_directory(directory: Path) -> str:
    """Return a digest of a directory's file names and contents. Files that are not loaded with a model do not count."""
    # Exclude the manifest, because it records which code wrote the files.
    files = [path for path in user_files.list_tree(directory) if path.is_file() and path.name != manifests.NAME]
    language = _find_language(directory)
    is_model = any(path.parent == directory and path.suffix == ".safetensors" for path in files)
    if is_model:
        files = _select_loaded_files(directory, files)
        language = ""  # a model's directory name is arbitrary
    sha256_by_name = {str(path.relative_to(directory)): manifests.file_sha256(path) for path in files}
    return manifests.digest([language, sha256_by_name])


def _select_loaded_files(model: Path, files: Sequence[Path]) -> list[Path]:
    """Select the files that loading a model reads."""
    model_directories = [model]
    if (model / selection.FILE).is_file():  # a fine-tuned model may contain further models for single languages
        model_directories += (model / "steps").glob("*")
    if (model / directories.MODULES).is_file():  # the format of sentence-transformers
        model_directories.append(model / directories.POOLING)
    return [path for path in files if path.parent in model_directories and path.suffix in LOADED_SUFFIXES]


def _find_language(directory: Path) -> str:
    """Return a directory's name if this is a language code, else an empty string."""
    return directory.name if is_known(directory.name) else ""
