"""Variables with secrets are recognised by their names."""

import pytest

from components.settings import environment


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "my_credentials"])
def test_name_of_a_secret_is_recognised(name):
    assert environment.is_secret(name)


def test_our_own_variables_are_no_secrets():
    assert not any(map(environment.is_secret, {**environment.RAY, **environment.MLFLOW}))
