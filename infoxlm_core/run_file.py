"""A run is one YAML file whose sections are the configs of the stages: read strictly, override, check."""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import yaml
from pydantic import model_validator

from infoxlm_core import outside
from infoxlm_core.config import (
    EvaluationConfig,
    PreparationConfig,
    PretrainingConfig,
    RegistrationConfig,
    StageConfig,
    TokenizationConfig,
)
from infoxlm_core.config.base import NonNegativeInt
from infoxlm_core.errors import ConfigError, InputError
from infoxlm_core.tasks.classification.settings import ClassificationConfig

MAX_SIZE = 1 << 18  # bytes of a config; reading a longer one of one key a line would take minutes
Config = TypeVar("Config", bound=StageConfig)


class RunConfig(StageConfig):
    """One YAML file: everything a run of the pipeline needs."""

    preparation: PreparationConfig
    tokenization: TokenizationConfig = TokenizationConfig()
    pretraining: PretrainingConfig = PretrainingConfig()
    finetuning: ClassificationConfig = ClassificationConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    registration: RegistrationConfig = RegistrationConfig()
    data_workers: NonNegativeInt = 0
    """Ray Data workers of preparation and tokenization, one a CPU core; 0: in the calling process. They change how long
    it takes and nothing else."""

    num_workers: NonNegativeInt = 0
    """Ray workers of pre-training and fine-tuning, one a GPU or CPU core; 0: in the calling process."""

    @model_validator(mode="after")
    def _enough_for_all_workers(self) -> Self:
        if self.num_workers > self.pretraining.batches.virtual_shards:
            raise ValueError(
                f"num_workers ({self.num_workers}) must not exceed "
                f"pretraining.batches.virtual_shards ({self.pretraining.batches.virtual_shards})"
            )
        if self.num_workers > self.finetuning.batch_size:
            raise ValueError(
                f"num_workers ({self.num_workers}) must not exceed finetuning.batch_size ({self.finetuning.batch_size})"
            )
        return self


class StrictLoader(yaml.SafeLoader):
    """YAML 1.2 without surprises: `no` is a word, 0400 is four hundred; no anchors, no tags, no key twice."""

    yaml_implicit_resolvers: ClassVar[
        dict[str, Any]
    ] = {}  # those of PyYAML are YAML 1.1's: `no` is false there, 1:30 is 90

    def compose_node(self, parent: Any, index: Any) -> Any:
        if getattr(self.peek_event(), "anchor", None):  # an alias has one, too
            raise ConfigError(f"line {self.peek_event().start_mark.line + 1}: anchors and aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            seen = set()
            for key_node, _ in node.value:
                if (key := self.construct_object(key_node, deep=True)) in seen:
                    raise ConfigError(f"line {key_node.start_mark.line + 1}: {key!r} stands twice")
                seen.add(key)
        return found

    def construct_integer(self, node: Any) -> int:
        text = self.construct_scalar(node)
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)


for _kind, _pattern, _first in (  # the core schema of YAML 1.2, section 10.3.2
    ("null", r"null|Null|NULL|~|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
):
    StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_pattern})\Z"), _first)
StrictLoader.add_constructor("tag:yaml.org,2002:int", StrictLoader.construct_integer)


def load(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's YAML file and apply overrides such as `pretraining.optimization.steps=100`.

    Raises ConfigError: one line with file, field, value and rule.
    """
    return load_as(RunConfig, path, overrides)


def load_as(kind: type[Config], path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """`load` for a file of another kind, such as a suite's."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such config file")
    try:
        values = yaml.load(outside.read_text(path, MAX_SIZE), Loader=StrictLoader)  # noqa: S506 - a SafeLoader
        for change in overrides:
            override(values, change)
        if not isinstance(values, dict):
            raise ConfigError("the file holds no mapping of sections")
        return kind.parse(values)
    except (InputError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None


def override(values: Any, change: str) -> None:
    """Change one value inside a mapping of sections: `pretraining.optimization.steps=100`."""
    name, equals, value = change.partition("=")
    if not equals:
        raise ConfigError(f"override {change!r}: write section.name=value")
    put(values, name.strip(), yaml.load(value, Loader=StrictLoader))  # noqa: S506 - a SafeLoader


def put(values: Any, name: str, value: Any) -> None:
    """Set one value inside a mapping of sections, by its name in them: `pretraining.optimization.steps`."""
    *sections, last = name.split(".")
    for section in sections:
        values = values.setdefault(section, {}) if isinstance(values, dict) else None
    if not isinstance(values, dict):
        raise ConfigError(f"override {name!r}: {'.'.join(sections)} is no section")
    values[last] = value


def parse_changed(kind: type[Config], values: Mapping[str, Any], changes: Mapping[str, Any], where: str) -> Config:
    """A config after single changes such as {"tasks.xnli.seeds": [1, 2]}; ConfigError names the first wrong field."""
    parsed = kind.parse(values, where)
    if not changes:
        return parsed
    plain = parsed.model_dump(mode="json", exclude_none=True)
    for name, value in changes.items():
        put(plain, name, value)
    return kind.parse(plain, where)


def _get(values: Any, name: str) -> Any:
    """One value inside a mapping of sections, by its name in them; None where there is none."""
    for part in name.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def override_sections(
    sections: Mapping[str, Any], overrides: Mapping[str, Any], num_workers: int = 0
) -> dict[str, Any]:
    """The sections of a run as plain values, defaults filled in, after single changes such as
    {"pretraining.optimization.steps": 2000}; all of it checked.

    Raises:
        ConfigError: one line that names the first wrong field.
    """
    values = copy.deepcopy(dict(sections))
    for name, value in overrides.items():
        section, dot, _ = name.partition(".")
        if not dot or section not in sections:
            known = ", ".join(sections)
            raise ConfigError(f"overrides: {name!r} is no field of a section: write SECTION.NAME; sections are {known}")
        put(values, name, value)
    checked = RunConfig.parse({**values, "num_workers": num_workers}).model_dump(mode="json", exclude_none=True)
    return {name: checked[name] for name in sections}


def override_trials(
    sections: Mapping[str, Any], trials: Sequence[Mapping[str, Any]], overrides: Mapping[str, Any], num_workers: int = 0
) -> list[dict[str, Any]]:
    """The trials of an ablation after the same changes; each with all settings.

    Raises:
        ConfigError: a field is wrong, or one in which the trials differ: it would change what a variant's name means.
    """
    planned = [PretrainingConfig.parse(item["pretraining"], "pretraining").model_dump(mode="json") for item in trials]
    for name in overrides:
        if trials and name in ("pretraining.seed", "finetuning.seed"):
            raise ConfigError(f"overrides: {name!r}: each trial has a seed of its own: change `trials`")
        if len({json.dumps(_get({"pretraining": one}, name)) for one in planned}) > 1:
            raise ConfigError(f"overrides: {name!r}: the variants differ in it: change `trials`")
    changed: list[dict[str, Any]] = []
    for item in trials:
        own = {**sections, "pretraining": item["pretraining"]}
        run = RunConfig.parse(override_sections(own, overrides, num_workers))
        # without defaults: all trials together are one parameter, and these have a limit
        plain = run.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        each = {name: plain.get(name, {}) for name in ("pretraining", "finetuning", "evaluation")}
        each["pretraining"] |= {"seed": run.pretraining.seed}
        changed.append({"trial": dict(item["trial"]), **each})
    return changed
