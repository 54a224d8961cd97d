"""Settings of every training run that are refused."""

import pytest

from infoxlm_core.config.training import CheckpointsConfig, OptimizationConfig
from infoxlm_core.errors import ConfigError


def test_warmup_must_end_before_the_training():
    with pytest.raises(ConfigError, match=r"warmup_steps \(10\) must be below steps \(10\)"):
        OptimizationConfig.parse({"steps": 10, "warmup_steps": 10})


@pytest.mark.parametrize("name", ["../pretrained-1", "runs/pretrained-1", ".hidden"])
def test_run_to_resume_is_a_name_and_not_a_path(name):
    assert CheckpointsConfig.parse({"resume": "pretrained-3f2a"}).resume == "pretrained-3f2a"
    with pytest.raises(ConfigError, match=r"^resume: "):
        CheckpointsConfig.parse({"resume": name})
