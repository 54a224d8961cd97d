"""A wrong config is one line: the field, what is wrong with it, and what stands there."""

import pytest
from pydantic import PositiveInt

from infoxlm_core.config.base import Share, StageConfig
from infoxlm_core.errors import ConfigError


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
