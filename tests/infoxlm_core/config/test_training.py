"""What every training refuses in its settings."""

import pytest

from infoxlm_core.config.training import CheckpointsConfig, OptimizationConfig
from infoxlm_core.errors import ConfigError


def test_a_warm_up_that_never_ends_is_refused():
    with pytest.raises(ConfigError, match=r"warmup_steps \(10\) must be below steps \(10\)"):
        OptimizationConfig.parse({"steps": 10, "warmup_steps": 10})


@pytest.mark.parametrize("name", ["../pretrained-1", "runs/pretrained-1", ".hidden"])
def test_a_run_to_go_on_with_is_a_name_and_no_path(name):
    assert CheckpointsConfig.parse({"resume": "pretrained-3f2a"}).resume == "pretrained-3f2a"
    with pytest.raises(ConfigError, match=r"^resume: "):
        CheckpointsConfig.parse({"resume": name})
