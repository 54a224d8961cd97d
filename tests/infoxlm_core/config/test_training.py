"""Settings of every training run that are refused."""

import pytest

from infoxlm_core.config import PretrainingConfig, RecipeConfig
from infoxlm_core.config.training import OptimizationConfig
from infoxlm_core.errors import ConfigError
from infoxlm_core.systems.translation.config import TranslationConfig


def test_warmup_must_end_before_the_training():
    with pytest.raises(ConfigError, match=r"warmup_steps \(10\) must be below steps \(10\)"):
        OptimizationConfig.parse({"steps": 10, "warmup_steps": 10})


@pytest.mark.parametrize("name", ["../pretrained-1", "runs/pretrained-1", ".hidden"])
def test_run_to_resume_is_a_name_and_not_a_path(name):
    config = PretrainingConfig.parse({"checkpoints": {"resume": "pretrained-3f2a"}})
    assert config.checkpoints.resume == "pretrained-3f2a"
    with pytest.raises(ConfigError, match=r"^checkpoints\.resume: "):
        PretrainingConfig.parse({"checkpoints": {"resume": name}})


@pytest.mark.parametrize(
    ("config_class", "required"), [(RecipeConfig, {}), (TranslationConfig, {"languages": ["de", "fr"]})]
)
def test_only_a_pretraining_can_name_a_run_to_resume(config_class, required):
    with pytest.raises(ConfigError, match=r"^checkpoints\.resume: unknown name; known are every, keep$"):
        config_class.parse(required | {"checkpoints": {"resume": "pretrained-3f2a"}})
