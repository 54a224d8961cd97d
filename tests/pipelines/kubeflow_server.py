"""A server on loopback that answers the clients of Kubeflow Pipelines as Kubeflow 2.17 does, and records requests."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlparse

from pipelines.progress import compute_node_id
from tests.servers.processes import answering

WORKFLOW = "infoxlm-kgmbh"
STEP = "root.exit-handler-1.pretrain"
"""Path of the step `pretrain` of the pipeline `infoxlm` in its Argo workflow."""


class Kubeflow:
    """What the server has been sent, and what it answers."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any, dict]] = []
        self.states = ["PENDING", "RUNNING", "SUCCEEDED"]
        """States of the run, one for each request."""
        self.state_history: list[dict] = []
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
            return 200, self.answer_of_run(self.states.pop(0) if len(self.states) > 1 else self.states[0])
        if path == "/runs/r-1:terminate":
            self.states = ["CANCELING", "CANCELING", "FAILED"]
            return 200, {}
        return 404, {"message": f"{path} not found"}

    def answer_of_run(self, state: str) -> dict:
        """Return the run `r-1` with one step; Kubeflow 2.17 ends a terminated run as FAILED, without an error."""
        if not self.state_history or self.state_history[-1]["state"] != state:
            self.state_history.append({"state": state})
        state_of_step = "RUNNING" if state == "CANCELING" else state
        paths = ("", "root-driver(0)", "root", f"{STEP}-driver(0)", STEP, f"{STEP}.executor", f"{STEP}.executor(0)")
        tasks = list_tasks(dict.fromkeys(paths, state_of_step))
        run = {"run_id": "r-1", "state": state, "created_at": "2026-01-01T00:00:00Z", "error": None}
        return run | {"state_history": self.state_history, "run_details": {"task_details": tasks}}

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


def list_tasks(states: dict[str, str]) -> list[dict]:
    """Return `task_details` as Kubeflow makes them from the nodes of an Argo workflow.

    Args:
        states: state of each node by its path below the workflow's node, which has an empty path.
    """
    tasks = []
    for path, state in states.items():
        children = [f"{WORKFLOW}.{other}" for other in states if is_child(other, path)]
        tasks.append(
            {
                "task_id": f"id of {path}",
                "display_name": path.rpartition(".")[2] or WORKFLOW,
                "state": state,
                "child_tasks": [{"pod_name": compute_node_id(WORKFLOW, child)} for child in children],
            }
        )
    return tasks


def is_child(path: str, parent: str) -> bool:
    """Return whether a node is a task of a group, or an attempt of an executor."""
    is_task = path != parent and path.rpartition(".")[0] == parent
    is_attempt = parent != "" and path.startswith(f"{parent}(")
    return is_task or is_attempt


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

    with answering(Handler) as kubeflow.host:
        yield kubeflow
