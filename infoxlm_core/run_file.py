"""Read, override and validate the YAML file of a run, whose sections are the configs of the stages."""

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

MAX_SIZE = 1 << 18  # bytes of a config file; PyYAML would read a larger one for minutes
Config = TypeVar("Config", bound=StageConfig)


class RunConfig(StageConfig):
    """All settings of a run of the pipeline."""

    preparation: PreparationConfig
    tokenization: TokenizationConfig = TokenizationConfig()
    pretraining: PretrainingConfig = PretrainingConfig()
    finetuning: ClassificationConfig = ClassificationConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    registration: RegistrationConfig = RegistrationConfig()
    data_workers: NonNegativeInt = 0
    """Ray Data workers of preparation and tokenization, one for each CPU core; 0: the calling process does the work.
    They affect speed, never results."""

    num_workers: NonNegativeInt = 0
    """Ray workers of pre-training and fine-tuning, one for each GPU or CPU core; 0: the calling process trains."""

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
    """A safe loader of YAML 1.2: `no` is a word, 0400 is four hundred; anchors, tags and repeated keys are errors."""

    # The resolvers of PyYAML implement YAML 1.1, in which `no` is false and 1:30 is 90.
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        if getattr(self.peek_event(), "anchor", None):  # of an anchor, or of an alias of one
            raise ConfigError(f"line {self.peek_event().start_mark.line + 1}: anchors and aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            seen = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if key in seen:
                    raise ConfigError(f"line {key_node.start_mark.line + 1}: {key!r} occurs twice")
                seen.add(key)
        return mapping

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
    """Read the YAML file of a run and apply overrides such as `pretraining.optimization.steps=100`.

    Raises:
        ConfigError: one line with file, field, value and rule.
    """
    return load_as(RunConfig, path, overrides)


def load_as(kind: type[Config], path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file of another kind, such as a suite, as `load` does."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such config file")
    try:
        values = yaml.load(outside.read_text(path, MAX_SIZE), Loader=StrictLoader)  # noqa: S506 - a SafeLoader
        for change in overrides:
            override(values, change)
        if not isinstance(values, dict):
            raise ConfigError("the file must contain a mapping of sections")
        return kind.parse(values)
    except (InputError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None


def override(values: Any, change: str) -> None:
    """Apply an override such as `pretraining.optimization.steps=100` to a mapping of sections."""
    name, equals, value = change.partition("=")
    if not equals:
        raise ConfigError(f"override {change!r}: write section.name=value")
    put(values, name.strip(), yaml.load(value, Loader=StrictLoader))  # noqa: S506 - a SafeLoader


def put(values: Any, name: str, value: Any) -> None:
    """Set the value with a dotted name, such as `pretraining.optimization.steps`, in a mapping of sections."""
    *sections, last = name.split(".")
    for section in sections:
        values = values.setdefault(section, {}) if isinstance(values, dict) else None
    if not isinstance(values, dict):
        raise ConfigError(f"override {name!r}: {'.'.join(sections)} is not a section")
    values[last] = value


def parse_changed(kind: type[Config], values: Mapping[str, Any], changes: Mapping[str, Any], where: str) -> Config:
    """Return a config after changes such as {"tasks.xnli.seeds": [1, 2]}; ConfigError names the first wrong field."""
    parsed = kind.parse(values, where)
    if not changes:
        return parsed
    plain = parsed.model_dump(mode="json", exclude_none=True)
    for name, value in changes.items():
        put(plain, name, value)
    return kind.parse(plain, where)


def _get(values: Any, name: str) -> Any:
    """Return the value with a dotted name in a mapping of sections, or None."""
    for key in name.split("."):
        values = values.get(key) if isinstance(values, dict) else None
    return values


def override_sections(
    sections: Mapping[str, Any], overrides: Mapping[str, Any], num_workers: int = 0
) -> dict[str, Any]:
    """Return the validated sections of a run with defaults, after changes such as
    {"pretraining.optimization.steps": 2000}.

    Raises:
        ConfigError: one line that names the first wrong field.
    """
    values = copy.deepcopy(dict(sections))
    for name, value in overrides.items():
        section, dot, _ = name.partition(".")
        if not dot or section not in sections:
            known = ", ".join(sections)
            raise ConfigError(
                f"overrides: {name!r} is not a field of a section: write SECTION.NAME; sections are {known}"
            )
        put(values, name, value)
    run = RunConfig.parse({**values, "num_workers": num_workers}).model_dump(mode="json", exclude_none=True)
    return {name: run[name] for name in sections}


def override_trials(
    sections: Mapping[str, Any], trials: Sequence[Mapping[str, Any]], overrides: Mapping[str, Any], num_workers: int = 0
) -> list[dict[str, Any]]:
    """Return the trials of an ablation after the same changes, each with all its settings.

    Raises:
        ConfigError: a field is wrong, or the trials differ in it, so that the names of the variants would be wrong.
    """
    planned = [PretrainingConfig.parse(item["pretraining"], "pretraining").model_dump(mode="json") for item in trials]
    for name in overrides:
        if trials and name in ("pretraining.seed", "finetuning.seed"):
            raise ConfigError(f"overrides: {name!r}: each trial has its own seed: change `trials`")
        if len({json.dumps(_get({"pretraining": settings}, name)) for settings in planned}) > 1:
            raise ConfigError(f"overrides: {name!r}: the variants differ in it: change `trials`")
    changed: list[dict[str, Any]] = []
    for item in trials:
        sections_of_trial = {**sections, "pretraining": item["pretraining"]}
        run = RunConfig.parse(override_sections(sections_of_trial, overrides, num_workers))
        # Defaults are omitted, because all trials together are one parameter of limited size.
        plain = run.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        trial = {name: plain.get(name, {}) for name in ("pretraining", "finetuning", "evaluation")}
        trial["pretraining"] |= {"seed": run.pretraining.seed}
        changed.append({"trial": dict(item["trial"]), **trial})
    return changed
