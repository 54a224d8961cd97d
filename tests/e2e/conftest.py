"""The one run in directories that the tests of the whole DAG look at."""

from pathlib import Path

import pytest

from tests.e2e.test_pipeline import kill_and_start_again


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """The store of a run that was killed in pre-training, and started again; its config is `toy.yaml` beside it."""
    return kill_and_start_again(tmp_path_factory.mktemp("e2e"))
