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
        self.pipelines: list[dict] = []
        self.versions: list[dict] = []
        self.uploads: list[str] = []
        """The YAML of each version."""
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
            return 200, {"experiments": [e for e in self.experiments if e["display_name"] == wanted(query)]}
        if path == "/experiments":
            self.experiments.append(body | {"experiment_id": "e-1"})
            return 200, self.experiments[-1]
        if path.startswith("/pipelines"):
            return self.answer_of_pipelines(method, path, query, body)
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

    def answer_of_pipelines(self, method: str, path: str, query: dict, body: Any) -> tuple[int, Any]:
        """As their server: a name is taken once, and a version needs its pipeline."""
        if path == "/pipelines" and method == "GET":
            return 200, {"pipelines": [p for p in self.pipelines if p["display_name"] == wanted(query)]}
        if path == "/pipelines":
            if any(p["display_name"] == body["display_name"] for p in self.pipelines):
                return 409, {"message": "already exists"}
            self.pipelines.append(body | {"pipeline_id": f"p-{len(self.pipelines) + 1}"})
            return 200, self.pipelines[-1]
        if path == "/pipelines/upload_version":
            (name,), (pipeline,) = query["name"], query["pipelineid"]
            if any(v["display_name"] == name for v in self.versions):
                return 409, {"message": "already exists"}
            self.versions.append({"display_name": name, "pipeline_id": pipeline, "pipeline_version_id": name})
            self.uploads.append(body)
            return 200, self.versions[-1]
        of = path.split("/")[2]
        found = [v for v in self.versions if (v["pipeline_id"], v["display_name"]) == (of, wanted(query))]
        return 200, {"pipeline_versions": found}


def wanted(query: dict) -> str:
    """The name that a filter asks for."""
    return json.loads(query["filter"][0])["predicates"][0]["stringValue"]


def read(handler: BaseHTTPRequestHandler) -> Any:
    """The body of a request: JSON, or the one file of a form."""
    content = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    kind = handler.headers.get("Content-Type", "")
    if kind.startswith("multipart/form-data"):
        return content.split(b"\r\n\r\n", 1)[1].rsplit(b"\r\n--", 1)[0].decode()
    return json.loads(content) if content else None


@contextmanager
def running_kubeflow() -> Iterator[Kubeflow]:
    """Serve until the block ends."""
    kubeflow = Kubeflow()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlparse(self.path)
            body = read(self)
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
