"""Which variables must not stand in a manifest."""

import pytest

from components.settings import environment


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "my_credentials"])
def test_a_variable_that_holds_a_secret_is_known_by_its_name(name):
    assert environment.is_secret(name)


def test_what_we_set_ourselves_is_no_secret():
    assert not any(map(environment.is_secret, {**environment.RAY, **environment.MLFLOW}))
