"""Every config field is explained, with its type and the default that applies to it."""

from collections.abc import Iterator

import pytest

from infoxlm_core.config import StageConfig, describe
from infoxlm_core.run_file import RunConfig


def list_configs(parent: type[StageConfig] = StageConfig) -> Iterator[type[StageConfig]]:
    """Yield all config classes of the core that are imported."""
    for child in parent.__subclasses__():
        if child.__module__.startswith("infoxlm_core"):
            yield child
        yield from list_configs(child)


@pytest.mark.parametrize("config_class", list(list_configs()), ids=lambda config_class: config_class.__name__)
def test_every_field_is_explained(config_class):
    assert [setting.name for setting in describe.list_settings(config_class) if not setting.meaning] == []


@pytest.mark.parametrize("config_class", list(list_configs()), ids=lambda config_class: config_class.__name__)
def test_documented_defaults_also_apply_to_a_section_that_sets_other_fields(config_class):
    for name, field in config_class.model_fields.items():
        if isinstance(field.default, StageConfig):
            section_class = type(field.default)
            assert field.annotation is section_class
            assert section_class() == field.default, name  # a file that sets one field has the others of the class


def test_types_and_defaults_are_described_in_words():
    settings = {setting.name: setting for setting in describe.list_settings(RunConfig)}

    assert settings["pretraining.checkpoints.every"].default == "5000"
    assert settings["finetuning.checkpoints.every"].default == "1000"  # fine-tuning saves more often
    assert settings["finetuning.optimization.learning_rate"].default == "7e-06"
    assert settings["preparation.languages"].default == "required"
    assert settings["pretraining.contrast.mixup"].type == "number, >= 0, <= 1"
    assert settings["pretraining.contrast.pooling"].type == "`cls` · `mean`"
    assert settings["preparation.corpora[].sha256"].type == "text or null"
    assert settings["registration.gate"].type == "mapping of text to number, > -1, < 1"
