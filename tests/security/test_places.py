"""A config can name files, buckets and models, but cannot make the program call a server of its choice."""

import socket

import pytest

from components.platform import sources
from infoxlm_core.errors import InputError

FORBIDDEN_SOURCES = [
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
        raise AssertionError(f"connected to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)


@pytest.mark.item("B16", "S10")
@pytest.mark.parametrize("source", FORBIDDEN_SOURCES)
def test_other_sources_are_refused_without_a_connection(source, tmp_path, no_network):
    with pytest.raises(InputError, match=r"no such file|has no config.json"):
        sources.fetch_model(source, tmp_path)
    with pytest.raises(InputError, match="no such file"):
        sources.fetch_data(source, tmp_path)

    assert not list(tmp_path.rglob("*"))
