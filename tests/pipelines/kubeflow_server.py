"""A server on loopback that answers what the clients of Kubeflow Pipelines ask, and keeps what they send."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse


class Kubeflow:
    """What the server has been sent, and what it answers."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any, dict]] = []
        self.states = ["PENDING", "RUNNING", "SUCCEEDED"]
        """Of the run, one for each time that somebody asks."""
        self.refusal: tuple[int, str] | None = None
        self.experiments: list[dict] = []
        self.host = ""
        self.health: Any = {"multi_user": False, "tag_name": "2.17.0"}

    def sent(self, method: str, path: str) -> list[Any]:
        """Bodies of the requests to a path."""
        return [body for done, where, body, _ in self.requests if (done, where) == (method, path)]

    def answer(self, method: str, path: str, query: dict, body: Any) -> tuple[int, Any]:
        path = path.removeprefix("/apis/v2beta1")
        if path == "/healthz":
            return 200, self.health
        if self.refusal:
            return self.refusal[0], {"message": self.refusal[1]}
        if path == "/experiments" and method == "GET":
            wanted = json.loads(query["filter"][0])["predicates"][0]["stringValue"]
            return 200, {"experiments": [e for e in self.experiments if e["display_name"] == wanted]}
        if path == "/experiments":
            self.experiments.append(body | {"experiment_id": "e-1"})
            return 200, self.experiments[-1]
        if path == "/runs" and method == "POST":
            return 200, {"run_id": "r-1", "display_name": body["display_name"], "state": "PENDING"}
        if path == "/runs/r-1":
            state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
            tasks = [{"task_id": "1", "display_name": "pretrain", "state": state}]
            found = {"run_id": "r-1", "state": state, "created_at": "2026-01-01T00:00:00Z"}
            return 200, found | {"run_details": {"task_details": tasks}}
        if path == "/runs/r-1:terminate":
            return 200, {}
        return 404, {"message": f"{path} not found"}


@contextmanager
def running_kubeflow() -> Iterator[Kubeflow]:
    """Serve until the block ends."""
    kubeflow = Kubeflow()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlparse(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            kubeflow.requests.append((self.command, url.path.removeprefix("/apis/v2beta1"), body, dict(self.headers)))
            code, said = kubeflow.answer(self.command, url.path, parse_qs(url.query), body)
            text = said.encode() if isinstance(said, str) else json.dumps(said).encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/html" if isinstance(said, str) else "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_POST = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    kubeflow.host = f"http://127.0.0.1:{server.server_port}"
    try:
        yield kubeflow
    finally:
        server.shutdown()
        server.server_close()
