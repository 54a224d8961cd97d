"""A Kubernetes API server in this process. kmock stores the objects; tests do the work of operators and kubelets.

For example, tests patch the status of a job as KubeRay's operator does. They can plan faults of the next calls. The
server records every call of the launcher as RBAC sees it: (verb, API group, resource).
"""

import asyncio
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import kmock
from aiohttp import web
from kubernetes import client

from tests.servers.processes import until

NAMESPACE = "infoxlm"
_URL = re.compile(
    r"/apis?/(?:(?P<group>[^/]+)/)?v1(?:alpha1)?/namespaces/[^/]+/(?P<resource>[a-z]+)(?:/(?P<name>[^/]+)(?:/(?P<sub>log))?)?"
)
_VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}

LOST = web.Response()


class KubernetesServer:
    """The server, with its recorded calls and planned faults."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str]] = []
        self.queries: list[dict[str, str]] = []
        self.bodies: list[tuple[str, str, dict]] = []
        self.logs: dict[str, list[Callable[[], Iterator[str]]]] = {}
        self.url = ""
        self._faults: list[tuple[str, str, int | str]] = []

    def api(self) -> client.ApiClient:
        return client.ApiClient(client.Configuration(host=self.url))

    # ---- work of operators, kubelets and administrators

    def jobs_ever(self) -> list[dict]:
        """Return the bodies of all jobs that were created, in order."""
        return [body for verb, _, body in self.bodies if verb == "create"]

    def job(self, name: str) -> dict | None:
        try:
            return self._ask("GET", f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayjobs/{name}")
        except urllib.error.HTTPError:
            return None

    def wait_for(self, name: str, creations: int = 1) -> dict:
        """Wait until a job has been created `creations` times, and return it."""
        until(lambda: len(self.jobs_ever()) >= creations and self.job(name))
        return self.job(name)

    def patch(self, name: str, change: dict) -> None:
        self._ask("PATCH", f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayjobs/{name}", change)

    def status(self, name: str, **fields: object) -> None:
        self.patch(name, {"status": fields})

    def put_job(self, name: str, **body: object) -> None:
        job = {"apiVersion": "ray.io/v1", "kind": "RayJob", "spec": {}, **body}
        job["metadata"] = {"name": name, "namespace": NAMESPACE, **job.get("metadata", {})}
        self._ask("POST", f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayjobs", job)

    def delete(self, name: str) -> None:
        self._ask("DELETE", f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayjobs/{name}")

    def put_submitter(self, name: str, job: str, *logs: Callable[[], Iterator[str]], created: str = "00") -> None:
        """Create the pod of a submitter. Each connection to its log gets the next of `logs`."""
        self.logs[name] = list(logs)
        metadata = {"name": name, "namespace": NAMESPACE, "labels": {"job-name": job}}
        metadata["creationTimestamp"] = f"2026-01-01T00:00:{created}Z"
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": {"phase": "Running"}}
        pod["spec"] = {"nodeName": "n1", "containers": [{"name": "ray-job-submitter", "image": "i"}]}
        self._ask("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", pod)

    def put_step(self, name: str, workflow: str, uid: str) -> None:
        """Create the pod of a step, as Argo does for a workflow."""
        owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": workflow, "uid": uid}
        metadata = {"name": name, "namespace": NAMESPACE, "ownerReferences": [owner | {"controller": True}]}
        metadata["creationTimestamp"] = "2025-01-01T00:00:00Z"
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": {"phase": "Running"}}
        self._ask("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", pod)

    def put_workflow(self, name: str, uid: str, **body: object) -> None:
        """Create a workflow, as Argo stores it."""
        workflow = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", **body}
        workflow["metadata"] = {"name": name, "namespace": NAMESPACE, "uid": uid}
        self._ask("POST", f"/apis/argoproj.io/v1alpha1/namespaces/{NAMESPACE}/workflows", workflow)

    def end_submitter(self, name: str) -> None:
        change = {"status": {"phase": "Succeeded"}}
        self._ask("PATCH", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}", change)

    def put_worker(self, name: str, reason: str, message: str) -> None:
        """Create a pod of a RayCluster whose container is waiting for a reason."""
        metadata = {"name": name, "namespace": NAMESPACE, "labels": {"ray.io/is-ray-node": "yes"}}
        metadata["creationTimestamp"] = "2025-01-01T00:00:00Z"
        waiting = {"name": "ray-worker", "state": {"waiting": {"reason": reason, "message": message}}}
        waiting |= {"ready": False, "restartCount": 0, "image": "i", "imageID": ""}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
        pod["status"] = {"phase": "Pending", "containerStatuses": [waiting]}
        self._ask("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", pod)

    def put_pod(
        self,
        name: str,
        node_type: str,
        node: str = "",
        unschedulable: str = "",
        memory: str = "8Gi",
        killed: tuple[str, int] | None = None,
    ) -> None:
        """Create a pod of a RayCluster.

        Args:
            name: name of the pod.
            node_type: Ray's type of the node.
            node: node on which the pod runs; if empty, the pod is pending.
            unschedulable: the scheduler's reason why the pod is pending.
            memory: memory limit of its container.
            killed: reason and exit code of the last termination of its container.
        """
        metadata = {"name": name, "namespace": NAMESPACE, "creationTimestamp": "2025-01-01T00:00:00Z"}
        metadata["labels"] = {"ray.io/is-ray-node": "yes", "ray.io/node-type": node_type}
        container = {"name": "c", "image": "i", "resources": {"limits": {"memory": memory}}}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}
        pod["status"] = {"phase": "Running" if node else "Pending"}
        if node:
            pod["spec"]["nodeName"] = node
        if unschedulable:
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            pod["status"]["conditions"] = [condition | {"message": unschedulable}]
        if killed:
            terminated = {"reason": killed[0], "exitCode": killed[1]}
            status = {"name": "c", "image": "i", "imageID": "", "ready": True, "restartCount": 1}
            pod["status"]["containerStatuses"] = [status | {"lastState": {"terminated": terminated}}]
        self._ask("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", pod)

    def delete_pods(self) -> None:
        """Delete all pods except those of steps."""
        for pod in self._ask("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]:
            if not pod["metadata"]["name"].startswith("step"):
                self._ask("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}")

    def put_event(self, about: str, message: str, at: str = "") -> None:
        event = {"metadata": {"name": f"e-{about}", "namespace": NAMESPACE}, "message": message, "type": "Warning"}
        event["involvedObject"] = {"kind": "Pod", "name": about}
        event |= {"lastTimestamp": at} if at else {}
        self._ask("POST", f"/api/v1/namespaces/{NAMESPACE}/events", event)

    def fail(self, verb: str, *how: int | str, resource: str = "rayjobs") -> None:
        """Make the next calls of a verb fail.

        Args:
            how: an HTTP status; "cut" closes the connection; "lost" closes it after the call was executed.
        """
        self._faults += [(verb, resource, kind) for kind in how]

    def pending_faults(self) -> int:
        return len(self._faults)

    # ---- internals

    def _ask(self, method: str, path: str, body: dict | None = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "operator"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse | None:
        """Record a call of the launcher. Answer it if a fault is planned or a log is requested, else return None."""
        if request.headers.get("User-Agent") == "operator":
            return None
        match = _URL.fullmatch(request.path)
        resource = f"{match['resource']}/{match['sub']}" if match["sub"] else match["resource"]
        verb = _VERBS.get(request.method, "get" if match["name"] else "list")
        self.calls.append((verb, match["group"] or "", resource))
        self.queries.append(dict(request.query))
        if request.method != "GET":
            self.bodies.append((verb, request.content_type, json.loads(await request.read() or b"{}")))
        for fault in self._faults:
            if fault[:2] == (verb, resource):
                self._faults.remove(fault)
                return await _fail(request, fault[2])
        if resource == "pods/log":
            return await self._log(request)
        return None

    async def _log(self, request: web.BaseRequest) -> web.StreamResponse:
        pod = request.path.split("/")[-2]
        if not self.logs[pod]:
            return web.Response(text="")
        response = web.StreamResponse()
        await response.prepare(request)
        for line in self.logs[pod].pop(0)():
            if line == "cut":
                request.transport.close()
                break
            await response.write(line.encode() + b"\n")
        return response


async def _fail(request: web.BaseRequest, how: int | str) -> web.StreamResponse:
    if how == "lost":
        return LOST
    if how == "cut":
        request.transport.close()
        return web.Response()
    status = {"kind": "Status", "code": int(how), "reason": "Test", "message": f"planned {how}"}
    return web.json_response(status, status=int(how))


class _Emulator(kmock.KubernetesEmulator):
    """kmock's server, which first records the call and applies faults. Its lists honor a label selector NAME=VALUE."""

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        answer = await self.recorder.answer(request)
        if answer is LOST:
            await super().__call__(request)
            request.transport.close()
        return answer or await super().__call__(request)

    async def _serve_list(self, request: kmock.Request) -> dict:
        """Return the requested objects that have the selected label. kmock itself ignores selectors."""
        answer = await super()._serve_list(request)
        selector = request.params.get("labelSelector")
        if selector:
            label = tuple(selector.split("="))
            answer["items"] = [body for body in answer["items"] if label in body["metadata"].get("labels", {}).items()]
        return answer


@contextmanager
def running_kubernetes() -> Iterator[KubernetesServer]:
    """Run a server on loopback, in a thread with its own event loop."""
    server = KubernetesServer()
    has_started = threading.Event()
    is_over = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with _Emulator() as emulator, kmock.Server(emulator) as http:
            emulator.recorder = server
            emulator.resources["ray.io/v1/rayjobs"] = {"namespaced": True, "kind": "RayJob"}
            emulator.resources["argoproj.io/v1alpha1/workflows"] = {"namespaced": True, "kind": "Workflow"}
            for plural, kind in (("pods", "Pod"), ("events", "Event")):
                emulator.resources[f"v1/{plural}"] = {"namespaced": True, "kind": kind}
            server.url = str(http.url).rstrip("/")
            has_started.set()
            await is_over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert has_started.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(10)
