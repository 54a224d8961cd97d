"""Every field of a config explains itself, and what is printed of it is what holds."""

from collections.abc import Iterator

import pytest

from infoxlm_core.config import StageConfig, describe
from infoxlm_core.run_file import RunConfig


def configs(kind: type[StageConfig] = StageConfig) -> Iterator[type[StageConfig]]:
    for child in kind.__subclasses__():
        yield child
        yield from configs(child)


@pytest.mark.parametrize(
    "kind", [kind for kind in configs() if kind.__module__.startswith("infoxlm_core")], ids=lambda kind: kind.__name__
)
def test_every_field_is_explained_under_the_field(kind):
    silent = [one.name for one in describe.settings(kind) if not one.meaning]

    assert silent == []


def test_a_default_is_the_one_that_holds_at_its_place():
    found = {one.name: one for one in describe.settings(RunConfig)}

    assert found["pretraining.checkpoints.every"].default == "5000"
    assert found["finetuning.checkpoints.every"].default == "1000"  # the recipe of fine-tuning saves more often
    assert found["finetuning.optimization.learning_rate"].default == "7e-06"
    assert found["preparation.languages"].default == "required"


def test_a_type_is_said_in_words_with_its_bounds():
    found = {one.name: one.type for one in describe.settings(RunConfig)}

    assert found["pretraining.contrast.mixup"] == "number, >= 0, <= 1"
    assert found["pretraining.contrast.pooling"] == "`cls` · `mean`"
    assert found["preparation.corpora[].sha256"] == "text or null"
    assert found["registration.gate"] == "mapping of text to number, > -1, < 1"
