"""The HTTP server answers valid requests and refuses others. tests/k8s/test_serving.py runs it with a model."""

import http.client
import json
import socket
import threading

import pytest
import torch

from infoxlm_core.errors import InputError
from pipelines import serving


def embed_lengths(texts) -> torch.Tensor:
    """Return the length of each text as its vector, or fail for the text `fail`."""
    if "fail" in texts:
        raise RuntimeError("an internal secret")
    return torch.tensor([[float(len(text)), 0.5] for text in texts])


@pytest.fixture
def port():
    with serving.Server(("127.0.0.1", 0), "infoxlm", embed_lengths) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def send(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, dict]:
    """Send a request and return the status and the parsed body of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, body)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def predict(port: int, body: object) -> tuple[int, dict]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return send(port, "POST", "/v1/models/infoxlm:predict", content)


def test_each_sentence_has_its_vector_in_order(port):
    assert predict(port, {"instances": ["a", "grüß"]}) == (200, {"predictions": [[1.0, 0.5], [4.0, 0.5]]})


def test_probes_of_the_server_and_of_its_model_succeed(port):
    assert send(port, "GET", "/") == (200, {"status": "alive"})
    assert send(port, "GET", "/v1/models/infoxlm") == (200, {"name": "infoxlm", "ready": True})


@pytest.mark.parametrize(
    ("method", "path", "body"), [("GET", "/v1/models/other", None), ("POST", "/v1/models/other:predict", b"{}")]
)
def test_unknown_path_is_refused_with_the_known_ones(port, method, path, body):
    status, answer = send(port, method, path, body)

    assert status == 404
    assert "Use /v1/models/infoxlm or" in answer["error"]


@pytest.mark.parametrize(
    ("body", "expected_status", "message"),
    [
        (b"{", 400, 'Send {"instances"'),
        (b"\xff", 400, 'Send {"instances"'),
        ({"inputs": ["a"]}, 400, "KeyError: 'instances'"),
        ({"instances": "a"}, 400, "not a list of strings"),
        ({"instances": ["a", 1]}, 400, "not a list of strings"),
        ({"instances": ["\ud800"]}, 400, "surrogates"),
        ({"instances": []}, 400, "The body has 0 sentences. Send 1 to 1024."),
        ({"instances": ["a"] * 1025}, 400, "1025 sentences"),
        ({"instances": ["fail"]}, 500, "Its log has the reason"),
    ],
)
def test_invalid_request_is_refused_and_the_next_one_is_answered(port, body, expected_status, message):
    status, answer = predict(port, body)

    assert status == expected_status
    assert message in answer["error"]
    assert "secret" not in answer["error"]
    assert predict(port, {"instances": ["a"]})[0] == 200


@pytest.mark.parametrize(("header", "status"), [("", b" 411 "), ("Content-Length: 4194305\r\n", b" 413 ")])
def test_request_without_a_length_or_of_excessive_length_is_refused_unread(port, header, status):
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(f"POST /v1/models/infoxlm:predict HTTP/1.0\r\n{header}\r\n".encode())
        assert status in connection.makefile("rb").readline()


def test_port_in_use_is_refused(port):
    with pytest.raises(InputError, match=rf"cannot listen at 127.0.0.1:{port} .* Give another --port"):
        serving.serve_embeddings(embed_lengths, "infoxlm", "127.0.0.1", port)


def test_empty_address_is_refused_because_it_would_mean_all_addresses():
    with pytest.raises(InputError, match=r"--host is empty\. Give an address of this machine, or 0\.0\.0\.0 for all"):
        serving.serve_embeddings(embed_lengths, "infoxlm", "", 70_000)
