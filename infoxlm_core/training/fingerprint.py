"""Compare a run with its checkpoints: data, tokenizer and settings must be equal, code and libraries need not be.

Resuming with other data or settings is refused, unless the config names the run (`checkpoints.resume`), because the
resulting curve could not be reproduced. Other code or libraries are only logged: a bug fix must not cost a week.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from infoxlm_core import manifests, user_files
from infoxlm_core.config import StageConfig
from infoxlm_core.errors import ConfigMismatch
from infoxlm_core.languages import is_known
from infoxlm_core.training.finetuning import selection

logger = logging.getLogger(__name__)
LOADED_SUFFIXES = (".safetensors", ".json", ".model", ".txt")  # the files of a model directory that are loaded


@dataclass(frozen=True)
class Fingerprint:
    """The settings, inputs and software on which a training run depends."""

    compared: dict[str, object] = field(default_factory=dict)  # stage version, decisive settings, digests of inputs
    recorded: dict[str, object] = field(default_factory=dict)  # code, libraries, threads, workers, kind of device

    @classmethod
    def of(cls, config: StageConfig, version: int, inputs: Mapping[str, str]) -> Self:
        """Return the fingerprint of a training run in this process.

        Args:
            config: config of the stage.
            version: version of the stage, see `manifests.VERSIONS`.
            inputs: digests of the inputs by name.
        """
        from infoxlm_core.training import distributed  # a local import: comparing fingerprints needs no torch

        compared = collect_decisive_values(config, version, inputs)
        return cls(compared, recorded=manifests.describe_software() | distributed.describe())

    def meta(self) -> dict[str, Any]:
        """Return the fields of this fingerprint in a checkpoint."""
        return {"fingerprint": self.compared, "made_by": self.recorded}

    def check(self, meta: Mapping[str, Any], run: str, accept_changes: bool = False) -> None:
        """Compare this fingerprint with that of a checkpoint. Log the differences that are accepted.

        Args:
            meta: the checkpoint's meta.json, which contains its fingerprint.
            run: the directory of the run.
            accept_changes: resume even if data or settings differ.

        Raises:
            ConfigMismatch: data or settings differ, and changes are not accepted.
        """
        decisive_changes = list_differences(meta["fingerprint"], self.compared)
        if decisive_changes and not accept_changes:
            raise make_mismatch(run, decisive_changes)
        saved_software = meta.get("made_by", {})  # older checkpoints lack it
        changes = decisive_changes + list_differences(saved_software, self.recorded)
        if changes:
            logger.warning("%s resumes with changes: %s", run, "; ".join(changes))


def collect_decisive_values(config: StageConfig, version: int, inputs: Mapping[str, str]) -> dict[str, object]:
    """Return the values that determine a stage's result: its version, settings and inputs, by name.

    Settings of saving, logging and probing are omitted. The digest of an input replaces its path in the settings.
    """
    return {"version": version, **flatten(config.result_fields()), **inputs}


def list_differences(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return a phrase such as "seed was 1, is 2" for each name whose values differ."""
    phrases = []
    for name in sorted(before.keys() | after.keys()):
        old_value = before.get(name)
        new_value = after.get(name)
        if old_value != new_value:
            phrases.append(f"{name} was {old_value!r}, is {new_value!r}")
    return phrases


def make_mismatch(run: str, changes: list[str]) -> ConfigMismatch:
    """Return the error for a run whose data or settings have changed since its start."""
    name = run.rstrip("/").rpartition("/")[2]
    return ConfigMismatch(
        f"{run} was started with other data or settings: {'; '.join(changes)}. Change them back, accept the changes "
        f"with checkpoints.resume: {name}, or delete {run} to start over"
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Return a nested mapping as a flat mapping with dotted names: {"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def digest_inputs(paths: str | Sequence[str] | None) -> list[str]:
    """Return a digest of each file or directory that exists among the paths of a config.

    Their location does not matter. The name of a file matters, since it often contains the language and the split
    (`xquad.de.json`), and so does the name of its directory if that is a language code (`fr/dev_2k.tsv`).
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
    """Return a digest of the files and of their roles, such as training and test."""
    return manifests.digest({role: digest_inputs(paths) for role, paths in roles.items()})


def _digest_directory(directory: Path) -> str:
    """Return a digest of the names and contents of the files in a directory. Of a model, only loaded files count."""
    # The manifest is excluded, because it records which code wrote the files.
    files = [path for path in user_files.list_tree(directory) if path.is_file() and path.name != manifests.NAME]
    language = _find_language(directory)
    is_model = any(path.parent == directory and path.suffix == ".safetensors" for path in files)
    if is_model:
        files = _select_loaded_files(directory, files)
        language = ""  # the name of a model's directory has no meaning
    sha256_by_name = {str(path.relative_to(directory)): manifests.file_sha256(path) for path in files}
    return manifests.digest([language, sha256_by_name])


def _select_loaded_files(model: Path, files: Sequence[Path]) -> list[Path]:
    """Return those of a model's files that are loaded with it."""
    model_directories = [model]
    if (model / selection.FILE).is_file():  # a fine-tuned model may contain models of single languages
        model_directories += (model / "steps").glob("*")
    return [path for path in files if path.parent in model_directories and path.suffix in LOADED_SUFFIXES]


def _find_language(directory: Path) -> str:
    """Return the name of a directory if it is a language code, else nothing."""
    return directory.name if is_known(directory.name) else ""
