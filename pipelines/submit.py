"""Start a compiled pipeline on Kubeflow Pipelines, follow the run to its end, and report how it ended.

The request is made here, not by `kfp.Client.run_pipeline`, which has no argument for the plugins of a run.
"""

import contextlib
import copy
import io
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from components.settings.cluster import ClusterFile, Pool, Steps
from infoxlm_core.errors import ConfigError, InfoXLMError, InputError, Preempted, StorageUnavailable, TryAgain

COMPILED = Path(__file__).parent / "compiled"
PIPELINES = ("infoxlm", "ablations", "suite", "promotion")
OLDEST = (2, 17)
"""Version of Kubeflow Pipelines; an older one silently drops the whole Kubernetes part of a pipeline."""

_SECONDS_BETWEEN_RUNS = 60.0
_SECONDS_WITHOUT_SERVER = 3600
_MINUTES_BETWEEN_REMINDERS = 5
_PENDING = "image, quota or Pod Security? kubectl get events --field-selector type=Warning"
_HOST = re.compile(r"(https?://)?(\[[0-9A-Fa-f:]+\]|[\w.-]+)(:[0-9]+)?(/\S*)?")
_ENDED = ("SUCCEEDED", "SKIPPED", "FAILED", "CANCELED")


@dataclass(frozen=True)
class Submission:
    """A run of a pipeline on a cluster."""

    pipeline: str
    parameters: Mapping[str, Any]
    name: str
    cluster: ClusterFile
    experiment: str
    caching: bool = True


def read_compiled(pipeline: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a compiled pipeline: its specification, and the part of it for Kubernetes.

    Raises:
        ConfigError: there is no compiled pipeline of this name.
    """
    path = COMPILED / f"{pipeline}.yaml"
    if not path.is_file():
        raise ConfigError(f"{path}: no such compiled pipeline: run `infoxlm compile`")
    spec, platform = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    return spec, platform


def read_for(cluster: ClusterFile, pipeline: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a compiled pipeline, as `read_compiled` does; its pods request what the cluster's file says."""
    spec, platform = read_compiled(pipeline)
    pool, placements = cluster.pool, platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    for name, executor in spec["deploymentSpec"]["executors"].items():
        container = executor["container"]
        if "accelerator" in container.get("resources", {}):
            container["resources"] = _resources(pool)
            if pool.gpus:
                gpus = {"resourceType": pool.accelerator, "resourceCount": str(pool.gpus)}
                container["resources"]["accelerator"] = gpus
            tolerations = [toleration.model_dump(exclude_none=True) for toleration in pool.tolerations]
            placements[name] |= {"nodeSelector": {"labels": pool.node_selector}, "tolerations": tolerations}
        elif "resources" in container:
            container["resources"] = _resources(cluster.steps)
    return spec, platform


def _resources(amounts: Pool | Steps) -> dict[str, Any]:
    cpu = {f"resourceCpu{bound}": amounts.cpu for bound in ("Limit", "Request")}
    return cpu | {f"resourceMemory{bound}": amounts.memory for bound in ("Limit", "Request")}


def declared(spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the parameters of a pipeline by name: type, default, whether it is optional."""
    return spec["root"].get("inputDefinitions", {}).get("parameters", {})


def with_defaults(cluster: ClusterFile, pipeline: str, parameters: Mapping[str, Any]) -> str:
    """Return the YAML of a pipeline for Kubeflow's page: it has these defaults, and the sizes and root of a cluster."""
    spec, platform = read_for(cluster, pipeline)
    spec["defaultPipelineRoot"] = cluster.pipeline_root
    for name, value in parameters.items():
        declared(spec)[name] |= {"defaultValue": value, "isOptional": True}
    return yaml.safe_dump_all([spec, platform], sort_keys=False, allow_unicode=True)


def without_cache(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pipeline with Kubeflow's cache switched off for all tasks, those in loops included."""
    changed = copy.deepcopy(dict(spec))
    for part in (changed["root"], *changed["components"].values()):
        for task in part.get("dag", {}).get("tasks", {}).values():
            task["cachingOptions"] = {}
    return changed


def connect(host: str, namespace: str = "") -> Any:
    """Return a client of Kubeflow Pipelines that has reached its server.

    It logs in by the variables of KFP's client (KF_PIPELINES_…); KF_PIPELINES_TOKEN may have a bearer token.

    Raises:
        StorageUnavailable: the server does not answer.
        InputError: the host is no address, or the server refuses, needs a login, or is too old.
    """
    if not _HOST.fullmatch(host):  # the client looks for a server by itself if the host is empty
        raise InputError(f"--host {host!r:.200}: give the URL of Kubeflow Pipelines, https://…")
    from kfp import client as kfp

    class Client(kfp.Client):
        # KFP's own method retries for half a minute with tracebacks, accepts a login page, and drops the version
        def get_kfp_healthz(self, sleep_duration: int = 5) -> Any:  # noqa: ARG002 - KFP passes it
            answer = self._healthz_api.healthz_service_get_healthz(_preload_content=False)
            return _check_health(host, answer.data)

    token_file = os.environ.get("KF_PIPELINES_SA_TOKEN_PATH")
    options: dict[str, Any] = {
        "existing_token": os.environ.get("KF_PIPELINES_TOKEN"),
        "credentials": kfp.ServiceAccountTokenVolumeCredentials(token_file) if token_file else None,
        "ssl_ca_cert": os.environ.get("SSL_CERT_FILE"),
    }
    with translate_errors(host), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = Client(host, namespace=namespace or "kubeflow", **options)
        client.get_kfp_healthz()
    return client


def _check_health(host: str, answer: bytes) -> Any:
    """Return the health that a server reports if it is a Kubeflow Pipelines that is new enough."""
    import kfp_server_api as api

    try:
        health = json.loads(answer)
        multi_user = health["multi_user"]
    except (ValueError, TypeError, KeyError):
        raise InputError(
            f"{host} does not answer as Kubeflow Pipelines does: if it shows a login page, put a token into "
            "KF_PIPELINES_TOKEN, else check --host"
        ) from None
    version = re.match(r"v?(\d+)\.(\d+)", str(health.get("tag_name", "")))
    if version and tuple(map(int, version.groups())) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise InputError(f"{host} is Kubeflow Pipelines {health['tag_name']}, too old: update it to {oldest} or newer")
    return api.V2beta1GetHealthzResponse(multi_user=multi_user)


@contextlib.contextmanager
def translate_errors(host: str) -> Iterator[None]:
    """Turn errors of the client into one-line errors of ours; suppress what the client prints.

    Raises:
        StorageUnavailable: the server does not answer, or answers with a 5xx.
        InputError: the server refuses.
    """
    import kfp_server_api
    import urllib3

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except kfp_server_api.ApiException as error:
        answer = f"{error.status}: {_one_line(error.body or error.reason)}"
        if error.status and error.status < 500:
            raise InputError(f"{host} refuses ({answer}){_account_advice(error)}") from None
        raise StorageUnavailable(f"{host} does not answer ({answer}): try again") from None
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise StorageUnavailable(f"{host} does not answer ({_one_line(error)}): check --host, or try again") from None


def create(client: Any, host: str, submission: Submission) -> str:
    """Start a run; return its id.

    Raises:
        InputError, StorageUnavailable: the server refuses, or does not answer.
    """
    import kfp_server_api as api

    cluster = submission.cluster
    spec, platform = read_for(cluster, submission.pipeline)
    spec = spec if submission.caching else without_cache(spec)
    with translate_errors(host):
        experiment = client.create_experiment(submission.experiment)
        run = api.V2beta1Run(
            display_name=submission.name,
            experiment_id=experiment.experiment_id,
            service_account=cluster.service_account,
            pipeline_spec={"pipeline_spec": spec, "platform_spec": platform},
            runtime_config=api.V2beta1RuntimeConfig(
                parameters=dict(submission.parameters), pipeline_root=cluster.pipeline_root
            ),
            plugins_input={"mlflow": {"experiment_name": submission.experiment}},
        )
        return client._run_api.run_service_create_run(run=run).run_id


def follow(client: Any, host: str, run: str, say: Callable[[str], None], every: float = 10) -> str:
    """Wait until a run has ended; return its state. Each change of state is one line, with the time since the start.

    The run continues while the server does not answer.

    Raises:
        StorageUnavailable: the server has not answered for an hour.
        InputError: the server refuses, perhaps because the login has expired.
    """
    started = answered = time.monotonic()
    states: dict[str, str] = {}
    since: dict[str, float] = {}
    reminders: dict[str, int] = {}

    def report(name: str, message: str) -> None:
        say(f"{_clock(time.monotonic() - started)}  {name}: {message}")

    while True:
        try:
            with translate_errors(host):
                found = client.get_run(run)
            answered = time.monotonic()
        except StorageUnavailable as error:
            if time.monotonic() - answered > _SECONDS_WITHOUT_SERVER:
                raise
            say(f"{error}; the run goes on")
            time.sleep(every)
            continue
        except InputError as error:
            raise InputError(f"{error}; the run goes on: log in again and look at {page(host, run)}") from None
        tasks = getattr(found.run_details, "task_details", None) or ()
        current = {task.display_name: task.state for task in tasks if task.display_name and task.state}
        current["run"] = found.state or "PENDING"
        for name, state in current.items():
            if states.get(name) != state:
                report(name, state.lower())
                since[name], reminders[name] = time.monotonic(), 0
            minutes = int(time.monotonic() - since[name]) // 60
            if state == "PENDING" and minutes // _MINUTES_BETWEEN_REMINDERS > reminders[name]:
                reminders[name] = minutes // _MINUTES_BETWEEN_REMINDERS
                report(name, f"still pending after {minutes} min: {_PENDING}")
        states |= current
        if found.state in _ENDED:
            return found.state
        time.sleep(every)


def run_to_end(client: Any, host: str, submission: Submission, say: Callable[[str], None]) -> None:
    """Start a run and follow it to its end; start it again, `submit_again` times at most, if it ends with "try again".

    Kubeflow loses exit codes, and which lost pods it retries is a setting of the cluster. Finished work is found by
    content, so a run that is started again continues where the last one ended.

    Raises:
        as `create`, `follow` and `failure` do.
    """
    attempts = submission.cluster.submit_again
    for attempt in range(attempts + 1):
        run = create(client, host, submission)
        say(f"run         {run}\npage        {page(host, run)}")
        try:
            state = follow(client, host, run, say)
        except KeyboardInterrupt:
            say(f"\nthe run goes on; to end it: infoxlm cancel {run} --host {host}")
            return
        if state == "SUCCEEDED":
            return
        error = failure(state, run, submission.cluster.store)
        if attempt == attempts or state == "CANCELED" or not isinstance(error, TryAgain):
            raise error
        say(f"{error}; submitting it again in {_SECONDS_BETWEEN_RUNS:.0f} s ({attempt + 1} of {attempts})")
        time.sleep(_SECONDS_BETWEEN_RUNS)


def failure(state: str, run: str, store: str) -> InfoXLMError:
    """Return the error of a run that did not succeed, as the stage that failed last wrote it into the store."""
    from components.platform import runtime

    if state == "CANCELED":
        return Preempted(f"run {run} was terminated: submit it again to continue")
    try:
        return runtime.read_failure(store, run)
    except InfoXLMError as error:
        return InfoXLMError(f"run {run} failed; its error message in the store cannot be read ({error}): read its log")


def page(host: str, run: str) -> str:
    """Return the address of a run in Kubeflow's page."""
    return f"{page_of(host)}/#/runs/details/{run}"


def page_of(host: str) -> str:
    """Return the address of Kubeflow's page."""
    return os.environ.get("KF_PIPELINES_UI_ENDPOINT", host).rstrip("/")


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def _account_advice(error: Any) -> str:
    """Return what to do if the server refuses the service account of a run, as Kubeflow does from 2.18 on."""
    if "serviceaccount" not in str(error.body).lower().replace(" ", ""):
        return ""
    return (
        ": the account must be in ALLOWEDSERVICEACCOUNTS of Kubeflow's API server, and you be bound to the Role"
        " infoxlm-submitter: docs/cluster/install.md, section 3"
    )


def _one_line(error: Any) -> str:
    text = error.decode(errors="replace") if isinstance(error, bytes) else str(error)
    with contextlib.suppress(ValueError, AttributeError):
        text = json.loads(text).get("message", text)
    return " ".join(str(text).split())[:200]
