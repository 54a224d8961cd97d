"""A wrong config is one line: the field, what is wrong with it, and what stands there."""

import pytest

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


class Inner(StageConfig):
    """A section."""

    rate: Share = 0.5
    """Of something."""


class Outer(StageConfig):
    """A stage."""

    inner: Inner = Inner()
    """A section."""

    steps: PositiveInt = 1
    """How many."""

    log_every: PositiveInt = 10
    """Steps between two lines."""


@pytest.mark.item("B14")
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"inner": {"rate": 2}}, r"stage\.inner\.rate: Input should be less than or equal to 1, not 2$"),
        ({"inner": {"rat": 1}}, r"stage\.inner\.rat: unknown name; known are rate$"),
        ({"stepz": 1}, r"stage\.stepz: unknown name; known are inner, log_every, steps$"),
        ({"steps": 0, "inner": {"rate": float("nan")}}, r"^stage\.inner\.rate: .* \(and 1 more\)$"),
    ],
)
def test_the_first_wrong_field_is_named_with_its_place_and_rule(values, said):
    with pytest.raises(ConfigError, match=said):
        Outer.parse(values, "stage")


def test_how_often_to_log_does_not_belong_to_what_decides_the_result():
    assert Outer.parse({"log_every": 3}).result_fields() == {"inner": {"rate": 0.5}, "steps": 1}


TEXT = {"name": "a", "format": "text", "path": "a.txt", "languages": ["de"]}
PAIRS = {"name": "a", "format": "gettext", "path": "a.zip"}


@pytest.mark.item("B14")
@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        (PretrainingConfig, {"optimization": {"steps": True}}, "steps: Input should be a valid integer, not True"),
        (PretrainingConfig, {"optimization": {"steps": "300"}}, "steps: Input should be a valid integer, not '300'"),
        (PretrainingConfig, {"optimization": {"steps": 10**18}}, r"steps: Input should be at most 2\^53 - 1"),
        (PretrainingConfig, {"optimization": {"learning_rate": True}}, "learning_rate: Input should be a valid number"),
        (PretrainingConfig, {"optimization": {"betas": [1, 1]}}, "betas.0: Input should be less than 1"),
        (PretrainingConfig, {"seed": 2**53 + 1}, r"seed: Input should be at most 2\^53 - 1"),
        (PretrainingConfig, {"model": {"layers": 10**9}}, "layers: Input should be less than or equal to 1000"),
        (PretrainingConfig, {"model": {"hidden": 2**40}}, "hidden: Input should be less than or equal to 131072"),
        (PretrainingConfig, {"batches": {"global_batch_size": 2**40}}, "global_batch_size: Input should be less than"),
        (PretrainingConfig, {"optimization": {"clip_norm": 1e39}}, "clip_norm: Input should be at most 3.4e38"),
        (PretrainingConfig, {"model": {"start": ""}}, "model.start: String should have at least 1 character"),
        (TokenizationConfig, {"model": ""}, "model: String should have at least 1 character"),
        (ClassificationConfig, {"data": ""}, "data.* String should have at least 1 character"),
        (TokenizationConfig, {"vocabulary_size": 2**62}, "vocabulary_size: "),
        (TokenizationConfig, {"character_coverage": 0.5}, "character_coverage: Input should be greater than"),
        (
            PreparationConfig,
            {"languages": ["de", "xx"]},
            "languages.1: .*ISO 639-1 language code, such as de, not 'xx'",
        ),
        (PreparationConfig, {"languages": ["de"], "corpora": [PAIRS]}, r"pivot \(en\) is not among languages \(de\)"),
        (
            PreparationConfig,
            {"languages": ["de", "en"], "corpora": [PAIRS] * 2},
            "corpora contains a twice with the same",
        ),
        (PreparationConfig, {"languages": ["de"], "corpora": [TEXT | {"languages": ["fr"]}]}, "a: fr is not among"),
        (ClassificationConfig, {"mixed": 1}, "mixed: Input should be a valid boolean, not 1"),
        (CorpusSource, TEXT | {"path": ""}, "corpus a: path is empty"),
        (CleaningConfig, {"max_length_ratio": 0.1}, "max_length_ratio: Input should be greater than or equal to 1"),
        (
            CleaningConfig,
            {"similarity": {"encoder": "labse", "minimum": 60}},
            "similarity.minimum: Input should be less than or equal to 1, not 60",
        ),
        (CleaningConfig, {"min_characters": 9, "max_characters": 3}, r"min_characters \(9\) exceeds max_characters"),
        (CorpusSource, {"name": "a" * 300, "format": "text", "path": "a", "languages": ["de"]}, "name: String should"),
        (
            CorpusSource,
            {"name": "a", "format": "tsv", "path": "a", "languages": ["en", "en"]},
            "corpus a: languages contains a language twice",
        ),
        (
            CorpusSource,
            {"name": "a", "format": "text", "path": "text/*/de.txt", "languages": ["de"]},
            r"corpus a: path may have \* only in the name of a file",
        ),
        (
            CorpusSource,
            {"name": "a", "format": "text", "path": "text/*", "languages": ["de"], "sha256": "0" * 64},
            r"corpus a: a path with \* has no sha256",
        ),
        (RegistrationConfig, {"metric": "foo/bar"}, "metric: 'foo/bar' is not a metric .* give retrieval/served"),
        (RegistrationConfig, {"metric": "retrieval/best_layer"}, "metric: 'retrieval/best_layer' is not a metric"),
        (
            RegistrationConfig,
            {"gate": {"retrieval/contrast": 0}},
            "gate.retrieval/contrast.*: .* give retrieval/served",
        ),
        (RegistrationConfig, {"metric": "classification/served"}, "metric: 'classification/served' is not a metric"),
        (RegistrationConfig, {"gate": {"retrieval/served": 5}}, "gate.retrieval/served: Input should be less than 1"),
        (EvaluationConfig, {"max_tokens": 1}, "max_tokens: Input should be greater than 2"),
        (ClassificationConfig, {"text": "label"}, "must be different columns, not 'label' twice"),
    ],
)
def test_what_would_be_bent_or_would_fail_only_later_is_refused_by_its_config(section, values, said):
    with pytest.raises(ConfigError, match=said):
        section.parse(values)


def test_whole_numbers_that_kubeflow_has_made_doubles_are_what_they_were():
    assert Outer.parse({"steps": 300.0}).steps == 300
