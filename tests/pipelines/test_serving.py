"""The server by its answers, with vectors that are made up; with a model, as a process: tests/k8s/test_serving.py."""

import http.client
import json
import socket
import threading

import pytest
import torch

from infoxlm_core.errors import InputError
from pipelines import serving


def lengths(texts) -> torch.Tensor:
    if "break" in texts:
        raise RuntimeError("a secret of the inside")
    return torch.tensor([[float(len(text)), 0.5] for text in texts])


@pytest.fixture
def port():
    with serving.Server(("127.0.0.1", 0), "infoxlm", lengths) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def ask(port: int, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, dict]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def predict(port: int, body: object) -> tuple[int, dict]:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ask(port, "POST", "/v1/models/infoxlm:predict", sent)


def test_a_request_gets_a_vector_for_each_sentence_in_order(port):
    assert predict(port, {"instances": ["a", "grüß"]}) == (200, {"predictions": [[1.0, 0.5], [4.0, 0.5]]})


def test_probes_are_answered_and_what_is_not_there_is_named(port):
    assert ask(port, "GET", "/") == (200, {"status": "alive"})
    assert ask(port, "GET", "/v1/models/infoxlm") == (200, {"name": "infoxlm", "ready": True})
    for method, path in (("GET", "/v1/models/other"), ("POST", "/v1/models/other:predict")):
        status, said = ask(port, method, path, b"{}" if method == "POST" else None)
        assert status == 404 and "Use /v1/models/infoxlm or" in said["error"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, 'Send {"instances"'),
        (b"\xff", 400, 'Send {"instances"'),
        ([], 400, 'Send {"instances"'),
        ({"inputs": ["a"]}, 400, "KeyError: 'instances'"),
        ({"instances": "a"}, 400, "not a list of strings"),
        ({"instances": ["a", 1]}, 400, "not a list of strings"),
        ({"instances": ["\ud800"]}, 400, "surrogates"),
        ({"instances": []}, 400, "The body has 0 sentences. Send 1 to 1024."),
        ({"instances": ["a"] * 1025}, 400, "1025 sentences"),
        ({"instances": ["break"]}, 500, "Its log has the reason"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_words_and_the_next_request_is_served(port, body, status, said):
    found = predict(port, body)

    assert found[0] == status and said in found[1]["error"] and "secret" not in str(found)
    assert predict(port, {"instances": ["a"]})[0] == 200


@pytest.mark.parametrize(("header", "status"), [("", b" 411 "), ("Content-Length: 4194305\r\n", b" 413 ")])
def test_a_request_without_a_length_or_that_is_too_long_is_refused_before_it_is_read(port, header, status):
    with socket.create_connection(("127.0.0.1", port), timeout=30) as raw:
        raw.sendall(f"POST /v1/models/infoxlm:predict HTTP/1.0\r\n{header}\r\n".encode())
        assert status in raw.makefile("rb").readline()


def test_a_port_that_is_taken_is_an_error_with_a_way_out(port):
    with pytest.raises(InputError, match=rf"cannot listen at 127.0.0.1:{port} .* Give another --port"):
        serving.serve(lengths, "infoxlm", "127.0.0.1", port)


def test_an_address_that_is_empty_does_not_open_the_door_to_all():
    with pytest.raises(InputError, match=r"--host is empty\. Give an address of this machine, or 0\.0\.0\.0 for all"):
        serving.serve(lengths, "infoxlm", "", 70_000)
