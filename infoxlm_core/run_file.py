"""Read, override and validate a run's YAML file. Each section is the config of a stage."""

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
from infoxlm_core.systems.translation.config import TRANSLATION_METRIC, TranslationConfig
from infoxlm_core.tasks.classification.task import ClassificationConfig

MAX_SIZE = 1 << 18  # bytes; PyYAML would need minutes for a larger config file
SEEDS_OF_TRIALS = ("pretraining.seed", "finetuning.seed", "translation.seed")
"""Settings that each trial of an ablation replaces with its own seed."""
Config = TypeVar("Config", bound=StageConfig)


class RunConfig(StageConfig):
    """All settings of a pipeline run."""

    preparation: PreparationConfig
    tokenization: TokenizationConfig = TokenizationConfig()
    pretraining: PretrainingConfig = PretrainingConfig()
    finetuning: ClassificationConfig = ClassificationConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    registration: RegistrationConfig = RegistrationConfig()
    translation: TranslationConfig | None = None
    """Settings of a translator. If set, `infoxlm run` trains a translator instead of a sentence encoder, and does not
    fine-tune."""

    data_workers: NonNegativeInt = 0
    """Number of Ray workers for preparing and tokenizing text, one per CPU core. 0: the calling process does the work.
    This number affects the speed, but not the results."""

    num_workers: NonNegativeInt = 0
    """Number of Ray workers for pre-training and fine-tuning, one per GPU or CPU core. 0: the calling process
    trains."""

    @model_validator(mode="before")
    @classmethod
    def _choose_metric_of_translator(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Set the gate's metric to that of translators, if the run trains a translator and names no metric."""
        registration = values.get("registration", {})
        if values.get("translation") is None or not isinstance(registration, dict):
            return values  # a section that is not a mapping is reported later
        return {**values, "registration": {"metric": TRANSLATION_METRIC, **registration}}

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
        """Check that a translator starts from XLM, and check its languages, the number of workers and the gate."""
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
        for metric in self.registration.gates:
            if metric != TRANSLATION_METRIC:
                raise ValueError(
                    f"registration: the gate needs {metric}, but a translator has only {TRANSLATION_METRIC}: remove "
                    "the metric"
                )
        if self.registration.against == "start":
            raise ValueError(
                "registration.against is start, but a translator has no start to compare with: set it to champion"
            )
        return self

    @model_validator(mode="after")
    def _check_gate(self) -> Self:
        """Check that evaluation measures the gate's metrics."""
        for metric in self.registration.gates:
            if metric.startswith("guard/") and self.evaluation.guard is None:
                raise ValueError(f"registration.gate names {metric}: set evaluation.guard, or remove the metric")
            if metric.startswith("translation/") and self.translation is None:
                raise ValueError(
                    f"registration: the gate needs {metric}, which only a translator has: name another metric, or add "
                    "the section translation"
                )
        return self

    def check_whole_run(self) -> None:
        """Check that the prepared text will suffice for every pipeline step.

        Validation omits this check, because preparing text and planning a run need no held-out pairs.

        Raises:
            ConfigError: no pairs are held out for evaluation, the run cannot measure a metric of the gate, the labeled
                text would have a single label, or fine-tuning uses none of the labeled text's languages.
        """
        preparation = self.preparation
        if not preparation.holds_out_pairs:
            raise ConfigError(
                "preparation: no translation pairs are held out, but evaluation needs them: set held_out_share, or "
                "name a corpus of pairs in held_out"
            )
        has_prepared_labels = len(preparation.labels) > 1
        for metric in self.registration.gates:
            if metric.startswith("classification/") and self.finetuning.data is None and not has_prepared_labels:
                raise ConfigError(
                    f"registration: the gate needs {metric}, but the run has no labeled text: set finetuning.data or, "
                    "with at least two corpora of pairs, preparation.labelled_share; or remove the metric"
                )
        if preparation.labelled_share and not has_prepared_labels:
            raise ConfigError(
                f"preparation.labelled_share ({preparation.labelled_share:g}) sets aside messages labeled with the "
                "names of their corpora, but the run has fewer than two training corpora of pairs: set it to 0, or add "
                "a corpus"
            )
        if has_prepared_labels and self.finetuning.data is None:
            self._check_languages_of_labels()

    def _check_languages_of_labels(self) -> None:
        """Check that fine-tuning trains on a language of the prepared labeled text."""
        train_languages = {two_letters(language) for language in self.finetuning.train_languages}
        if train_languages.isdisjoint(map(two_letters, self.preparation.languages)):
            raise ConfigError(
                f"finetuning.train_languages ({', '.join(self.finetuning.train_languages)}) has no language of the "
                f"labeled text, which has preparation.languages ({', '.join(self.preparation.languages)}): name one of "
                "them"
            )

    def resolve_tokenizer(self) -> Self:
        """Return the config with its tokenizer set, by default to the tokenizer of `pretraining.model.start`."""
        start = self.pretraining.model.start
        if self.tokenization.model or not start or self.pretraining.system != "infoxlm":
            return self
        tokenization = self.tokenization.model_copy(update={"model": start})
        return self.model_copy(update={"tokenization": tokenization})


class StrictLoader(yaml.SafeLoader):
    """Reads YAML 1.2, in which `no` is a string and 0400 is the number 400. Rejects anchors, tags and repeated keys."""

    # The inherited resolvers implement YAML 1.1, in which `no` is false and 1:30 is 90.
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Read the next node. Raise ConfigError if the node has an anchor or a tag, or is an alias."""
        event = self.peek_event()
        line_number = event.start_mark.line + 1
        # Events of anchors and aliases have this attribute. A few nested aliases can expand to gigabytes.
        if getattr(event, "anchor", None):
            raise ConfigError(f"line {line_number}: anchors and aliases are not allowed")
        # A tag such as !!set would create a value that no config has, and the constructors of the YAML library fail at
        # a text such as `!!bool maybe`.
        if getattr(event, "tag", None):
            raise ConfigError(f"line {line_number}: tags such as !!str are not allowed: remove the tag")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return a node's mapping. Raise ConfigError if a key occurs twice."""
        mapping = super().construct_mapping(node, deep)  # keeps only the last value of a repeated key
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
        """Return a node's integer, written as 12, 0o14 or 0xC."""
        text = self.construct_scalar(node)
        # Base 0 parses the prefix, but rejects leading zeros in decimal numbers, which YAML 1.2 allows.
        base = 0 if text.startswith(("0o", "0x")) else 10
        return int(text, base)


# The core schema of YAML 1.2, section 10.3.2: tag, pattern, and possible first characters of a matching word.
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
    """Read a run's YAML file and apply overrides such as `pretraining.optimization.steps=100`.

    Raises:
        ConfigError: the file or a field is invalid. The message names the file, the field, its value and the rule.
    """
    return load_config(RunConfig, path, overrides)


def load_config(config_class: type[Config], path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Read a config of any class from a YAML file, and apply overrides such as `tasks.xnli.seeds=[1]`.

    Raises:
        ConfigError: the file or a field is invalid. The message names the file, the field, its value and the rule.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such config file")
    try:
        values = parse_yaml(user_files.read_text(path, MAX_SIZE))
        if not isinstance(values, dict):
            raise ConfigError("the file must contain a mapping of sections")
        for assignment in overrides:
            apply_override(values, assignment)
        return config_class.parse(values)
    except (InputError, ValueError) as error:  # ValueError: an integer that is too long to be printed
        raise ConfigError(f"{path}: {error}") from None


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text, read by `StrictLoader`. Raise ConfigError if the text is not valid YAML."""
    try:
        return yaml.load(text, Loader=StrictLoader)  # noqa: S506 - StrictLoader is a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # RecursionError: deeply nested YAML
        raise ConfigError(" ".join(str(error).split())) from None  # PyYAML's messages have several lines


def apply_override(values: Any, assignment: str) -> None:
    """Apply an override such as `pretraining.optimization.steps=100` to a mapping of sections.

    Raises:
        ConfigError: the override has no equals sign, its value is not valid YAML, or its name leads through a value
            that is not a mapping. The message begins with the override.
    """
    name, equals_sign, value_text = assignment.partition("=")
    if not equals_sign:
        raise ConfigError(f"override {assignment!r}: write section.name=value")
    location = f"override {name.strip()!r}"
    try:
        new_value = parse_yaml(value_text)
    except ConfigError as error:
        raise ConfigError(f"{location}: {error}") from None
    set_by_name(values, name.strip(), new_value, location)


def parse_with_overrides(
    config_class: type[Config], values: Mapping[str, Any], overrides: Mapping[str, Any], section: str
) -> Config:
    """Parse a config and replace some of its values.

    Args:
        config_class: class of the config.
        values: field values of the config.
        overrides: new values by dotted name, such as {"tasks.xnli.seeds": [1, 2]}.
        section: dotted name of the config, for the error message.

    Raises:
        ConfigError: a field is invalid. The message names the first invalid field.
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
    """Return a run's sections with some values replaced and all defaults filled in.

    Args:
        sections: mapping from section name to field values.
        overrides: new values by dotted name, such as {"pretraining.optimization.steps": 2000}.
        num_workers: number of training workers, at most the number of virtual shards and the fine-tuning batch size.

    Raises:
        ConfigError: a field is invalid, or `RunConfig.check_whole_run` fails.
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
    # Resolve the tokenizer only after the overrides, which may name a different `pretraining.model.start`.
    resolved_values = run.resolve_tokenizer().model_dump(mode="json", exclude_none=True)
    return {name: resolved_values[name] for name in sections}


def override_all_trials(
    sections: Mapping[str, Any], trials: Sequence[Mapping[str, Any]], overrides: Mapping[str, Any], num_workers: int = 0
) -> list[dict[str, Any]]:
    """Apply the same overrides to every trial of an ablation, and return the trials.

    Args:
        sections: mapping from section name to field values, for the sections that all trials share.
        trials: sections that differ for each trial, with the variant and seed under the key `trial`.
        overrides: new values by dotted name, such as {"pretraining.optimization.steps": 2000}.
        num_workers: number of training workers, at most the number of virtual shards and the fine-tuning batch size.

    Raises:
        ConfigError: a field is invalid, an override sets a field in which the trials differ, or the trials have
            different tokenizers or test sentences.
    """
    _check_overrides_of_trials(trials, overrides)
    changed_trials: list[dict[str, Any]] = []
    tokenizers = set()
    translation_tests = set()
    for trial in trials:
        trial_sections = {**sections, **trial}
        variant_and_seed = trial_sections.pop("trial")
        run = RunConfig.parse(override_sections(trial_sections, overrides, num_workers))
        tokenizers.add(run.tokenization.model)
        if len(tokenizers) > 1:
            raise ConfigError(
                "tokenization.model: the variants start from models with their own tokenizers, but share their shards: "
                "if these tokenizers are equal, set it to one of them"
            )
        if run.translation is not None:
            translation_tests.add((frozenset(run.translation.languages), run.translation.validation_pairs))
        if len(translation_tests) > 1:
            raise ConfigError(
                "translation: the variants differ in languages or validation_pairs, so they would translate different "
                "test sentences: give all variants the same values"
            )
        changed_trials.append({"trial": dict(variant_and_seed), **_list_trial_settings(run)})
    return changed_trials


def _list_trial_settings(run: RunConfig) -> dict[str, Any]:
    """Return the sections of a trial without default values.

    All trials together form one pipeline parameter, and its size is limited.
    """
    values = run.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    settings = {name: values.get(name, {}) for name in ("pretraining", "finetuning", "evaluation")}
    settings["pretraining"]["seed"] = run.pretraining.seed  # even the default, because the trials differ in their seeds
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
        if trials and name in SEEDS_OF_TRIALS:
            raise ConfigError(f"overrides: {name!r}: each trial has its own seed: change `trials`")
        distinct_values = {json.dumps(_find_by_name(values, name)) for values in values_of_trials}
        if len(distinct_values) > 1:
            raise ConfigError(f"overrides: {name!r}: the variants differ in this field: change `trials`")


def _find_by_name(values: Any, name: str) -> Any:
    """Return a value in nested mappings by its dotted name, or None if the value is missing."""
    for key in name.split("."):
        values = values.get(key) if isinstance(values, dict) else None
    return values
