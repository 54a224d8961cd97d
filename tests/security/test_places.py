"""A config names files, buckets and models; it cannot make us call a server of its choice."""

import socket

import pytest

from components.platform import sources
from infoxlm_core.errors import InputError

PLACES = [
    "http://169.254.169.254/latest/meta-data/iam/security-credentials/",
    "https://169.254.169.254/latest",
    "http://[::ffff:169.254.169.254]/latest",
    "http://0x7f000001:8265/api/jobs/",
    "http://localhost:5000/api/2.0/mlflow/users/list",
    "//169.254.169.254/latest",
    "ftp://example.org/model",
    "file:///etc",
    "file:/etc/passwd",
    "gs://bucket/model",
    "hdfs://namenode/model",
    "git+https://example.org/model",
    "ssh://example.org/model",
    "data:text/plain,x",
    "models:/../../etc/passwd",
]


@pytest.fixture
def no_network(monkeypatch):
    def refuse(self, address):
        raise AssertionError(f"called {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)


@pytest.mark.item("B16", "S10")
@pytest.mark.parametrize("place", PLACES)
def test_other_places_than_files_buckets_and_the_hub_are_refused_without_a_call(place, tmp_path, no_network):
    with pytest.raises(InputError, match=r"no such file|has no config.json"):
        sources.fetch_model(place, tmp_path)
    with pytest.raises(InputError, match="no such file"):
        sources.fetch_data(place, tmp_path)

    assert not list(tmp_path.rglob("*"))
