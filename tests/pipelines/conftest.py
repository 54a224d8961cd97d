"""Fixtures that the tests of several commands for a cluster share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pipelines.cli.app import CONFIGS
from tests.pipelines.kubeflow_server import Kubeflow, running_kubeflow

IMAGE = f"registry.example/infoxlm@sha256:{'a1' * 32}"
SUITE = """
models: {ours: "models:/infoxlm@champion"}
tasks: {tatoeba: {settings: {task: retrieval, data: "s3://data/tatoeba"}}}
"""


@pytest.fixture(scope="module", autouse=True)
def no_kubeflow_settings() -> Iterator[None]:
    """Hide the settings of the developer's own Kubeflow from the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("KF_PIPELINES_")]:
            patch.delenv(name)
        yield


@pytest.fixture
def kubeflow() -> Iterator[Kubeflow]:
    with running_kubeflow() as server:
        yield server


def write_cluster(folder: Path, **changes: str) -> Path:
    """Write a cluster file: the packaged one with an image by digest, and with other changes."""
    values = yaml.safe_load((CONFIGS / "cluster.yaml").read_text()) | {"image": IMAGE} | changes
    (folder / "cluster.yaml").write_text(yaml.safe_dump(values))
    return folder / "cluster.yaml"
