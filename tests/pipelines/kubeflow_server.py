"""A server on loopback that answers the clients of Kubeflow Pipelines as Kubeflow 2.17 does, and records requests."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlparse

from pipelines.progress import compute_node_id
from tests.servers.processes import answering

API = "/apis/v2beta1"
WORKFLOW = "infoxlm-kgmbh"
STEP = "root.exit-handler-1.pretrain"
"""Path of the step `pretrain` of the pipeline `infoxlm` in its Argo workflow."""


class Kubeflow:
    """The state of the server: the requests that it has received, and the answers that it gives."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any, dict]] = []
        """Method, path, body and headers of each request."""
        self.states = ["PENDING", "RUNNING", "SUCCEEDED"]
        """States of the run, one for each request."""
        self.state_history: list[dict] = []
        self.refusal: tuple[int, str] | None = None
        """Status and message of the answer to all requests."""
        self.experiments: list[dict] = []
        self.pipelines: list[dict] = []
        self.versions: list[dict] = []
        self.uploads: list[str] = []
        """The YAML of each version."""
        self.host = ""
        self.health: Any = {"multi_user": False, "tag_name": "2.17.0"}

    def list_bodies(self, path: str) -> list[Any]:
        """Return the bodies of the POST requests to a path."""
        return [body for method, request_path, body, _ in self.requests if (method, request_path) == ("POST", path)]

    def answer(self, method: str, path: str, query: dict, body: Any) -> tuple[int, Any]:
        """Return the status and the content of the answer to a request."""
        if path == "/healthz":
            return 200, self.health
        if self.refusal:
            return self.refusal[0], {"message": self.refusal[1]}
        if path == "/experiments" and method == "GET":
            return 200, {"experiments": select_named(self.experiments, query)}
        if path == "/experiments":
            self.experiments.append(body | {"experiment_id": "e-1"})
            return 200, self.experiments[-1]
        if path.startswith("/pipelines"):
            return self.answer_about_pipelines(method, path, query, body)
        if path == "/runs" and method == "POST":
            return 200, {"run_id": "r-1", "display_name": body["display_name"], "state": "PENDING"}
        if path == "/runs/r-1":
            return 200, self.describe_run(self.states.pop(0) if len(self.states) > 1 else self.states[0])
        if path == "/runs/r-1:terminate":
            self.states = ["CANCELING", "CANCELING", "FAILED"]
            return 200, {}
        return 404, {"message": f"{path} not found"}

    def describe_run(self, state: str) -> dict:
        """Return the run `r-1` with one step; Kubeflow 2.17 ends a terminated run as FAILED, without an error."""
        if not self.state_history or self.state_history[-1]["state"] != state:
            self.state_history.append({"state": state})
        state_of_step = "RUNNING" if state == "CANCELING" else state
        paths = ("", "root-driver(0)", "root", f"{STEP}-driver(0)", STEP, f"{STEP}.executor", f"{STEP}.executor(0)")
        tasks = list_tasks(dict.fromkeys(paths, state_of_step))
        run = {"run_id": "r-1", "state": state, "created_at": "2026-01-01T00:00:00Z", "error": None}
        return run | {"state_history": self.state_history, "run_details": {"task_details": tasks}}

    def answer_about_pipelines(self, method: str, path: str, query: dict, body: Any) -> tuple[int, Any]:
        """Answer like Kubeflow's server: a name can be used once, and a version belongs to a pipeline."""
        if path == "/pipelines" and method == "GET":
            return 200, {"pipelines": select_named(self.pipelines, query)}
        if path == "/pipelines":
            if any(pipeline["display_name"] == body["display_name"] for pipeline in self.pipelines):
                return 409, {"message": "already exists"}
            self.pipelines.append(body | {"pipeline_id": f"p-{len(self.pipelines) + 1}"})
            return 200, self.pipelines[-1]
        if path == "/pipelines/upload_version":
            (name,), (pipeline_id,) = query["name"], query["pipelineid"]
            if any(version["display_name"] == name for version in self.versions):
                return 409, {"message": "already exists"}
            self.versions.append({"display_name": name, "pipeline_id": pipeline_id, "pipeline_version_id": name})
            self.uploads.append(body)
            return 200, self.versions[-1]
        pipeline_id = path.split("/")[2]
        versions = [version for version in self.versions if version["pipeline_id"] == pipeline_id]
        return 200, {"pipeline_versions": select_named(versions, query)}


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


def select_named(items: list[dict], query: dict) -> list[dict]:
    """Return the items with the display name that the filter of a list request selects."""
    name = json.loads(query["filter"][0])["predicates"][0]["stringValue"]
    return [item for item in items if item["display_name"] == name]


def read_body(handler: BaseHTTPRequestHandler) -> Any:
    """Return the body of a request: JSON, or the one file of a form."""
    content = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    if handler.headers.get("Content-Type", "").startswith("multipart/form-data"):
        return content.split(b"\r\n\r\n", 1)[1].rsplit(b"\r\n--", 1)[0].decode()
    return json.loads(content) if content else None


@contextmanager
def running_kubeflow() -> Iterator[Kubeflow]:
    """Run the server for the duration of the block."""
    kubeflow = Kubeflow()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlparse(self.path)
            path = url.path.removeprefix(API)
            body = read_body(self)
            kubeflow.requests.append((self.command, path, body, dict(self.headers)))
            status, answer = kubeflow.answer(self.command, path, parse_qs(url.query), body)
            is_page = isinstance(answer, str)
            content = (answer if is_page else json.dumps(answer)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if is_page else "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

    with answering(Handler) as kubeflow.host:
        yield kubeflow
