"""A run is one YAML file whose sections are the configs of the stages: read strictly, override, check."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml
from pydantic import NonNegativeInt, model_validator

from infoxlm_core.config import (
    EvaluationConfig,
    FinetuningConfig,
    PreparationConfig,
    PretrainingConfig,
    RegistrationConfig,
    StageConfig,
    TokenizationConfig,
)
from infoxlm_core.errors import ConfigError

Config = TypeVar("Config", bound=StageConfig)


class RunConfig(StageConfig):
    """One YAML file: everything a run of the pipeline needs."""

    preparation: PreparationConfig
    tokenization: TokenizationConfig = TokenizationConfig()
    pretraining: PretrainingConfig = PretrainingConfig()
    finetuning: FinetuningConfig = FinetuningConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    registration: RegistrationConfig = RegistrationConfig()
    data_workers: NonNegativeInt = 0
    """Ray Data workers of preparation and tokenization, one a CPU core; 0: in the calling process. They change how long
    it takes and nothing else."""

    num_workers: NonNegativeInt = 0
    """Ray workers of pre-training and fine-tuning, one a GPU or CPU core; 0: in the calling process."""

    @model_validator(mode="after")
    def _workers_divide(self) -> Self:
        if self.num_workers and self.pretraining.batches.virtual_shards % self.num_workers:
            raise ValueError(
                f"num_workers ({self.num_workers}) must divide "
                f"pretraining.batches.virtual_shards ({self.pretraining.batches.virtual_shards})"
            )
        if self.num_workers > self.finetuning.batch_size:
            raise ValueError(
                f"num_workers ({self.num_workers}) must not exceed finetuning.batch_size ({self.finetuning.batch_size})"
            )
        return self


class StrictLoader(yaml.SafeLoader):
    """YAML without surprises: no anchors, no tags beyond plain values, no key twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ConfigError(f"line {self.peek_event().start_mark.line + 1}: anchors and aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key, (key_node, _) in zip(keys, node.value, strict=True):
            if keys.count(key) > 1:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: {key!r} stands twice")
        return super().construct_mapping(node, deep)


def load(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's YAML file and apply overrides such as `pretraining.optimization.steps=100`.

    Raises:
        ConfigError: one line with file, field, value and rule.
    """
    return load_as(RunConfig, path, overrides)


def load_as(kind: type[Config], path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """`load` for a file of another kind, such as a suite's."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such config file")
    if path.stat().st_size > 2**20:
        raise ConfigError(f"{path}: larger than 1 MiB")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=StrictLoader)  # a SafeLoader
        for change in overrides:
            override(values, change)
        if not isinstance(values, dict):
            raise ConfigError("the file holds no mapping of sections")
        return kind.parse(values)
    except (ConfigError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None


def override(values: Any, change: str) -> None:
    """Change one value inside a mapping of sections: `pretraining.optimization.steps=100`."""
    name, equals, value = change.partition("=")
    if not equals:
        raise ConfigError(f"override {change!r}: write section.name=value")
    *sections, last = name.strip().split(".")
    for section in sections:
        values = values.setdefault(section, {}) if isinstance(values, dict) else None
    if not isinstance(values, dict):
        raise ConfigError(f"override {change!r}: {'.'.join(sections)} is no section")
    values[last] = yaml.load(value, Loader=StrictLoader)
