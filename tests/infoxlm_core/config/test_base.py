"""A wrong config is refused in one line: the field, the rule, and the value."""

from typing import Annotated, Literal

import pytest
from pydantic import Field

from infoxlm_core.config import (
    CleaningConfig,
    CorpusSource,
    EvaluationConfig,
    PreparationConfig,
    PretrainingConfig,
    RegistrationConfig,
    TokenizationConfig,
)
from infoxlm_core.config.base import PositiveInt, Share, StageConfig
from infoxlm_core.errors import ConfigError
from infoxlm_core.tasks.classification.task import ClassificationConfig

TEXT = {"name": "a", "format": "text", "path": "a.txt", "languages": ["de"]}
PAIRS = {"name": "a", "format": "gettext", "path": "a.zip"}


class Inner(StageConfig):
    """A section."""

    rate: Share = 0.5


class Cat(StageConfig):
    """One of two kinds of items."""

    kind: Literal["cat"] = "cat"
    lives: PositiveInt = 9


class Dog(StageConfig):
    """The other kind of items."""

    kind: Literal["dog"] = "dog"
    name: str


class Outer(StageConfig):
    """A stage."""

    inner: Inner = Inner()
    pet: Annotated[Cat | Dog, Field(discriminator="kind")] = Cat()
    steps: PositiveInt = 1
    log_every: PositiveInt = 10


@pytest.mark.item("B14")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"inner": {"rate": 2}}, r"stage\.inner\.rate: Input should be less than or equal to 1, not 2$"),
        ({"inner": {"rat": 1}}, r"stage\.inner\.rat: unknown name; known are rate$"),
        ({"stepz": 1}, r"stage\.stepz: unknown name; known are inner, log_every, pet, steps$"),
        ({"pet": {"kind": "dog", "name": "x", "nam": "y"}}, r"stage\.pet\.nam: unknown name; known are kind, name$"),
        ({"pet": {"kind": "cat", "lives": 0}}, r"stage\.pet\.lives: Input should be greater than 0, not 0$"),
        ({"pet": {"kind": "dog"}}, r"stage\.pet\.name: Field required$"),
        ({"steps": 0, "inner": {"rate": float("nan")}}, r"^stage\.inner\.rate: .* \(and 1 more\)$"),
        ({"steps": True}, "steps: Input should be a valid integer, not True"),
        ({"steps": "300"}, "steps: Input should be a valid integer, not '300'"),
        ({"steps": 2**53}, r"steps: Input should be at most 2\^53 - 1"),
        ({"steps": 1e17}, r"steps: Input should be at most 2\^53 - 1"),
        ({"inner": {"rate": True}}, "rate: Input should be a valid number"),
    ],
)
def test_first_invalid_field_is_named_with_its_section_and_rule(values, message):
    with pytest.raises(ConfigError, match=message):
        Outer.parse(values, "stage")


def test_logging_does_not_affect_the_result():
    assert Outer.parse({"log_every": 3}).result_fields() == {
        "inner": {"rate": 0.5}, "pet": {"kind": "cat", "lives": 9}, "steps": 1,
    }  # fmt: skip


def test_whole_number_that_kubeflow_sends_as_a_double_is_accepted():
    assert Outer.parse({"steps": 300.0}).steps == 300


@pytest.mark.parametrize(
    ("config_class", "values", "name", "value"),
    [
        (CorpusSource, TEXT, "deduplicate", "documents"),
        (CleaningConfig, {}, "near_duplicates", "minhash"),
        (TokenizationConfig, {}, "prefix", "query: "),
        (EvaluationConfig, {}, "guard", {"data": "tatoeba"}),
    ],
)
def test_field_added_later_is_part_of_artifact_keys_only_if_it_is_set(config_class, values, name, value):
    assert name not in config_class.parse(values).result_fields()
    assert name in config_class.parse(values | {name: value}).result_fields()


@pytest.mark.item("B14")
@pytest.mark.parametrize(
    ("config_class", "values", "message"),
    [
        (PretrainingConfig, {"optimization": {"betas": [1, 1]}}, "betas.0: Input should be less than 1"),
        (PretrainingConfig, {"optimization": {"clip_norm": 1e39}}, "clip_norm: Input should be at most 3.4e38"),
        (PretrainingConfig, {"model": {"layers": 10**9}}, "layers: Input should be less than or equal to 1000"),
        (PretrainingConfig, {"model": {"start": ""}}, "model.start: String should have at least 1 character"),
        (TokenizationConfig, {"vocabulary_size": 2**62}, "vocabulary_size: "),
        (PreparationConfig, {"languages": ["de", "xx"]}, "languages.1: .*ISO 639-1 language code, .* not 'xx'"),
        (PreparationConfig, {"languages": ["de"], "corpora": [PAIRS]}, r"pivot \(en\) is not among languages \(de\)"),
        (PreparationConfig, {"languages": ["de", "en"], "corpora": [PAIRS] * 2}, "corpora contains a twice"),
        (PreparationConfig, {"languages": ["de"], "corpora": [TEXT | {"languages": ["fr"]}]}, "a: fr is not among"),
        (CorpusSource, TEXT | {"path": ""}, "corpus a: path is empty"),
        (CorpusSource, TEXT | {"name": "a" * 300}, "name: String should"),
        (CorpusSource, TEXT | {"languages": ["en", "de"]}, "format text needs 1 language$"),
        (CorpusSource, TEXT | {"format": "tsv", "languages": []}, "format tsv needs 1 or 2 languages$"),
        (CorpusSource, TEXT | {"format": "tsv", "languages": ["en", "en"]}, "languages contains a language twice"),
        (CorpusSource, TEXT | {"path": "text/*/de.txt"}, r"path may have \* only in the name of a file"),
        (CorpusSource, TEXT | {"path": "text/*", "sha256": "0" * 64}, r"a path with \* has no sha256"),
        (CleaningConfig, {"min_characters": 9, "max_characters": 3}, r"min_characters \(9\) exceeds max_characters"),
        (ClassificationConfig, {"mixed": 1}, "mixed: Input should be a valid boolean, not 1"),
        (ClassificationConfig, {"text": "label"}, "must be different columns, not 'label' twice"),
        (RegistrationConfig, {"metric": "foo/bar"}, "metric: 'foo/bar' is not a metric .* give retrieval/served"),
        (RegistrationConfig, {"metric": "retrieval/best_layer"}, "metric: 'retrieval/best_layer' is not a metric"),
        (RegistrationConfig, {"metric": "classification/served"}, "metric: 'classification/served' is not a metric"),
        (RegistrationConfig, {"gate": {"retrieval/contrast": 0}}, "retrieval/contrast.*: .* give retrieval/served"),
        (RegistrationConfig, {"gate": {"retrieval/served": 5}}, "gate.retrieval/served: Input should be less than 1"),
        (EvaluationConfig, {"guard": {"data": "a", "languages": 14}}, "^guard.languages: Input should be 'all', '14'"),
        (EvaluationConfig, {"guard": {"data": "a", "languages": ["de", "xx"]}}, "^guard.languages.1: .*, not 'xx'"),
        (CorpusSource, TEXT | {"path": ["a", 3]}, r"^path\.1: Input should be a valid string, not 3"),
        (CorpusSource, TEXT | {"path": 3}, r"^path: Input should be a valid string, not 3 \(and 1 more\)$"),
        (EvaluationConfig, {"merge": [0.5]}, r"merge needs a guard .* set evaluation\.guard"),
    ],
)
def test_value_that_a_stage_cannot_use_is_refused(config_class, values, message):
    with pytest.raises(ConfigError, match=message):
        config_class.parse(values)
