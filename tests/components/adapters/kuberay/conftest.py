"""A Kubernetes API server for each test, and a launcher with short pauses."""

from collections.abc import Iterator

import pytest

from components.adapters.kuberay import job, log
from tests.servers.kubernetes_api import KubernetesServer, running_kubernetes


@pytest.fixture
def kubernetes(monkeypatch) -> Iterator[KubernetesServer]:
    pauses = {
        "_POLL_SECONDS": 0.05,
        "_MAX_RETRY_SECONDS": 0.1,
        "_RESTART_SECONDS": 0.05,
        "_LAST_LINES_SECONDS": 0.2,
        "_OPERATOR_SECONDS": 0,
    }
    monkeypatch.setattr(job, "_RECREATION_SECONDS", (0.05, 0.1))
    for name, seconds in pauses.items():
        monkeypatch.setattr(job, name, seconds)
    monkeypatch.setattr(log, "_RECONNECT_SECONDS", 0.05)
    monkeypatch.setattr(log, "_LAST_RECONNECT_SECONDS", 0.0125)
    with running_kubernetes() as server:
        yield server
