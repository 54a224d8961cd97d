"""Read, override and validate the YAML file of a run, whose sections are the configs of the stages."""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import yaml
from pydantic import model_validator

from infoxlm_core import user_files
from infoxlm_core.config import (
    EvaluationConfig,
    PreparationConfig,
    PretrainingConfig,
    RegistrationConfig,
    StageConfig,
    TokenizationConfig,
)
from infoxlm_core.config.base import NonNegativeInt, set_by_name
from infoxlm_core.errors import ConfigError, InputError
from infoxlm_core.languages import two_letters
from infoxlm_core.systems.translation.config import TranslationConfig
from infoxlm_core.tasks.classification.task import ClassificationConfig

MAX_SIZE = 1 << 18  # bytes of a config file; PyYAML needs minutes for a larger one
Config = TypeVar("Config", bound=StageConfig)


class RunConfig(StageConfig):
    """All settings of a run of the pipeline."""

    preparation: PreparationConfig
    tokenization: TokenizationConfig = TokenizationConfig()
    pretraining: PretrainingConfig = PretrainingConfig()
    finetuning: ClassificationConfig = ClassificationConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    registration: RegistrationConfig = RegistrationConfig()
    translation: TranslationConfig | None = None
    """Settings of a translator. If set, `infoxlm run` trains a translator instead of a sentence encoder, without
    fine-tuning."""

    data_workers: NonNegativeInt = 0
    """Number of Ray workers that prepare and tokenize text, one for each CPU core. 0: the calling process does the
    work. This number affects the speed, but not the results."""

    num_workers: NonNegativeInt = 0
    """Number of Ray workers of pre-training and fine-tuning, one for each GPU or CPU core. 0: the calling process
    trains."""

    @model_validator(mode="after")
    def _check_worker_count(self) -> Self:
        """Check that each batch can be divided among the workers."""
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

    @model_validator(mode="after")
    def _check_translation(self) -> Self:
        """Check that a translator starts from XLM and has text in its languages and a virtual shard for each worker."""
        translation = self.translation
        if translation is None:
            return self
        if self.pretraining.system != "xlm":
            raise ValueError(f"pretraining.system ({self.pretraining.system}) must be xlm to train a translator")
        missing_languages = set(translation.languages) - set(self.preparation.languages)
        if missing_languages:
            raise ValueError(
                f"translation.languages: {', '.join(sorted(missing_languages))} is not in preparation.languages"
            )
        if self.num_workers > translation.virtual_shards:
            raise ValueError(
                f"num_workers ({self.num_workers}) must not exceed translation.virtual_shards "
                f"({translation.virtual_shards})"
            )
        return self

    @model_validator(mode="after")
    def _check_gate(self) -> Self:
        """Check that the evaluation measures the metrics of the gate."""
        for metric in self.registration.gates:
            if metric.startswith("guard/") and self.evaluation.guard is None:
                raise ValueError(f"registration.gate names {metric}: set evaluation.guard, or remove the metric")
        return self

    def check_whole_run(self) -> None:
        """Check that the prepared text will suffice for every step of the pipeline.

        Validation does not include this check, because text can be prepared and a run planned without held-out pairs.

        Raises:
            ConfigError: nothing is held out for the evaluation, the gate needs a metric that the run cannot measure,
                the labelled text would have a single label, or none of it is in a language that fine-tuning uses.
        """
        preparation = self.preparation
        if not preparation.holds_out_pairs:
            raise ConfigError(
                "preparation: no translation pairs are held out, and the evaluation needs some: set held_out_share, or "
                "name a corpus of pairs in held_out"
            )
        has_prepared_labels = len(preparation.labels) > 1
        for metric in self.registration.gates:
            if metric.startswith("classification/") and self.finetuning.data is None and not has_prepared_labels:
                raise ConfigError(
                    f"registration: the gate needs {metric}, but the run has no labelled text: set finetuning.data or, "
                    "with at least two corpora of pairs, preparation.labelled_share; or remove the metric"
                )
        if preparation.labelled_share and not has_prepared_labels:
            raise ConfigError(
                f"preparation.labelled_share ({preparation.labelled_share:g}) sets messages aside whose labels are the "
                "names of their corpora, but the run has fewer than two training corpora of pairs: set it to 0, or add "
                "a corpus"
            )
        if has_prepared_labels and self.finetuning.data is None:
            self._check_languages_of_labels()

    def _check_languages_of_labels(self) -> None:
        """Check that fine-tuning trains on a language of the prepared labelled text."""
        train_languages = {two_letters(language) for language in self.finetuning.train_languages}
        if train_languages.isdisjoint(map(two_letters, self.preparation.languages)):
            raise ConfigError(
                f"finetuning.train_languages ({', '.join(self.finetuning.train_languages)}) has no language of the "
                f"labelled text, whose languages are preparation.languages ({', '.join(self.preparation.languages)}): "
                "name one of them"
            )

    def resolve_tokenizer(self) -> Self:
        """Return the config with the tokenizer of the start of pre-training, if it names no tokenizer of its own."""
        start = self.pretraining.model.start
        if self.tokenization.model or not start or self.pretraining.system != "infoxlm":
            return self
        tokenization = self.tokenization.model_copy(update={"model": start})
        return self.model_copy(update={"tokenization": tokenization})


class StrictLoader(yaml.SafeLoader):
    """Reads YAML 1.2, in which `no` is a string and 0400 is the number 400. Refuses anchors, tags and repeated keys."""

    # The inherited resolvers implement YAML 1.1, in which `no` is false and 1:30 is 90.
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Read the next node. Raise ConfigError if it has an anchor or is an alias."""
        event = self.peek_event()
        # Anchors and their aliases have this attribute. A few nested aliases can expand to gigabytes.
        if getattr(event, "anchor", None):
            line_number = event.start_mark.line + 1
            raise ConfigError(f"line {line_number}: anchors and aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node. Raise ConfigError if a key occurs twice."""
        mapping = super().construct_mapping(node, deep)
        if len(mapping) == len(node.value):
            return mapping
        previous_keys = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in previous_keys:
                line_number = key_node.start_mark.line + 1
                raise ConfigError(f"line {line_number}: {key!r} occurs twice")
            previous_keys.add(key)
        return mapping

    def construct_integer(self, node: Any) -> int:
        """Return the integer of a node, such as 12, 0o14 or 0xC."""
        text = self.construct_scalar(node)
        # Base 0 reads the prefix, but refuses decimal numbers with leading zeros, which YAML 1.2 allows.
        base = 0 if text.startswith(("0o", "0x")) else 10
        return int(text, base)


# The core schema of YAML 1.2, section 10.3.2: tag, pattern, and the first characters of words that may match it.
for _tag, _pattern, _first_characters in (
    ("null", r"null|Null|NULL|~|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
):
    _whole_word = re.compile(rf"(?:{_pattern})\Z")
    StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _whole_word, _first_characters)
StrictLoader.add_constructor("tag:yaml.org,2002:int", StrictLoader.construct_integer)


def load(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the YAML file of a run and apply overrides such as `pretraining.optimization.steps=100`.

    Raises:
        ConfigError: one line with file, field, value and rule.
    """
    return load_config(RunConfig, path, overrides)


def load_config(config_class: type[Config], path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file as a config of any class, and apply overrides such as `tasks.xnli.seeds=[1]`.

    Raises:
        ConfigError: one line with file, field, value and rule.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such config file")
    try:
        values = yaml.load(user_files.read_text(path, MAX_SIZE), Loader=StrictLoader)  # noqa: S506 - a SafeLoader
        for assignment in overrides:
            apply_override(values, assignment)
        if not isinstance(values, dict):
            raise ConfigError("the file must contain a mapping of sections")
        return config_class.parse(values)
    except (InputError, yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())  # messages of PyYAML have several lines
        raise ConfigError(f"{path}: {reason}") from None


def apply_override(values: Any, assignment: str) -> None:
    """Apply an override such as `pretraining.optimization.steps=100` to a mapping of sections."""
    name, equals_sign, value_text = assignment.partition("=")
    if not equals_sign:
        raise ConfigError(f"override {assignment!r}: write section.name=value")
    new_value = yaml.load(value_text, Loader=StrictLoader)  # noqa: S506 - a SafeLoader
    set_by_name(values, name.strip(), new_value, f"override {name.strip()!r}")


def parse_with_overrides(
    config_class: type[Config], values: Mapping[str, Any], overrides: Mapping[str, Any], section: str
) -> Config:
    """Return a config after replacing some of its values.

    Args:
        config_class: class of the config.
        values: the values of its fields.
        overrides: new values by dotted name, such as {"tasks.xnli.seeds": [1, 2]}.
        section: name of the config, for the error message.

    Raises:
        ConfigError: a field is invalid; the message names the first one.
    """
    config = config_class.parse(values, section)
    if not overrides:
        return config
    new_values = config.model_dump(mode="json", exclude_none=True)
    for name, value in overrides.items():
        set_by_name(new_values, name, value, f"override {name!r}")
    return config_class.parse(new_values, section)


def override_sections(
    sections: Mapping[str, Any], overrides: Mapping[str, Any], num_workers: int = 0
) -> dict[str, Any]:
    """Return the sections of a run with new values for some fields, and with the defaults of all others.

    Args:
        sections: name of each section -> its values.
        overrides: new values by dotted name, such as {"pretraining.optimization.steps": 2000}.
        num_workers: number of training workers, which some rules limit.

    Raises:
        ConfigError: a field is wrong, or the text does not suffice, see `RunConfig.check_whole_run`.
    """
    values = copy.deepcopy(dict(sections))
    for name, value in overrides.items():
        section, dot, _ = name.partition(".")
        if not dot or section not in sections:
            section_names = ", ".join(sections)
            raise ConfigError(
                f"overrides: {name!r} is not a field of a section: write SECTION.NAME; sections are {section_names}"
            )
        set_by_name(values, name, value, f"override {name!r}")
    run = RunConfig.parse({**values, "num_workers": num_workers})
    run.check_whole_run()
    # The tokenizer is resolved here and not when the file is read, because an override may name another start.
    resolved_values = run.resolve_tokenizer().model_dump(mode="json", exclude_none=True)
    return {name: resolved_values[name] for name in sections}


def override_all_trials(
    sections: Mapping[str, Any], trials: Sequence[Mapping[str, Any]], overrides: Mapping[str, Any], num_workers: int = 0
) -> list[dict[str, Any]]:
    """Return the trials of an ablation with the same new values in each of them.

    Args:
        sections: sections that all trials share: name of each section -> its values.
        trials: for each trial, the sections in which it differs, and under `trial` its variant and seed.
        overrides: new values by dotted name, such as {"pretraining.optimization.steps": 2000}.
        num_workers: number of training workers, which some rules limit.

    Raises:
        ConfigError: a field is wrong; an override sets a field in which the trials differ; or the trials have different
            tokenizers.
    """
    _check_overrides_of_trials(trials, overrides)
    changed_trials: list[dict[str, Any]] = []
    tokenizers = set()
    for trial in trials:
        trial_sections = {**sections, **trial}
        variant_and_seed = trial_sections.pop("trial")
        run = RunConfig.parse(override_sections(trial_sections, overrides, num_workers))
        tokenizers.add(run.tokenization.model)
        if len(tokenizers) > 1:
            raise ConfigError(
                "tokenization.model: the variants start from models with their own tokenizers, but share their shards: "
                "set it to the tokenizer of all variants"
            )
        changed_trials.append({"trial": dict(variant_and_seed), **_list_trial_settings(run)})
    return changed_trials


def _list_trial_settings(run: RunConfig) -> dict[str, Any]:
    """Return the sections of a run that belong to a trial, without defaults.

    All trials together are one parameter of a pipeline, whose size is limited.
    """
    values = run.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    settings: dict[str, Any] = {}
    for name in ("pretraining", "finetuning", "evaluation"):
        settings[name] = values.get(name, {})
    settings["pretraining"]["seed"] = run.pretraining.seed
    if "translation" in values:
        settings["translation"] = values["translation"]
    return settings


def _check_overrides_of_trials(trials: Sequence[Mapping[str, Any]], overrides: Mapping[str, Any]) -> None:
    """Raise ConfigError if an override sets a seed or a field in which the trials differ."""
    values_of_trials = []
    for trial in trials:
        pretraining = PretrainingConfig.parse(trial["pretraining"], "pretraining")
        values = {"pretraining": pretraining.model_dump(mode="json")}
        if "translation" in trial:
            translation = TranslationConfig.parse(trial["translation"], "translation")
            values["translation"] = translation.model_dump(mode="json")
        values_of_trials.append(values)
    for name in overrides:
        if trials and name in ("pretraining.seed", "finetuning.seed", "translation.seed"):
            raise ConfigError(f"overrides: {name!r}: each trial has its own seed: change `trials`")
        distinct_values = {json.dumps(_find_by_name(values, name)) for values in values_of_trials}
        if len(distinct_values) > 1:
            raise ConfigError(f"overrides: {name!r}: the variants differ in it: change `trials`")


def _find_by_name(values: Any, name: str) -> Any:
    """Return a value in a mapping of sections by its dotted name, or None if it is missing."""
    for key in name.split("."):
        values = values.get(key) if isinstance(values, dict) else None
    return values
