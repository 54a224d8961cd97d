"""Submit a compiled pipeline to Kubeflow Pipelines, follow its run, and report its outcome.

This does not use `kfp.Client.run_pipeline`, because that has no argument for the plugins of a run.
"""

import contextlib
import copy
import io
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from components.settings.cluster import ClusterFile, Pool, Steps
from infoxlm_core.errors import Cancelled, ConfigError, InfoXLMError, InputError, StorageUnavailable, TryAgain
from pipelines.progress import Progress

COMPILED = Path(__file__).parent / "compiled"
PIPELINES = ("infoxlm", "ablations", "suite", "promotion")
OLDEST = (2, 17)
"""Oldest supported Kubeflow Pipelines. Older ones silently drop the Kubernetes settings of a pipeline."""

_FORM_ADVICE = (
    " In the form Create run, enter {account} as Service Account. Usually you change only the parameters `overrides`,"
    ' such as {{"pretraining.optimization.steps": 2000}}, and `num_workers`. docs/configuration.md and `infoxlm config`'
    " describe all fields."
)
_SECONDS_BETWEEN_RUNS = 60.0
_SECONDS_WITHOUT_SERVER = 3600
_HOST = re.compile(r"(https?://)?(\[[0-9A-Fa-f:]+\]|[\w.-]+)(:[0-9]+)?(/\S*)?")
_ENDED = ("SUCCEEDED", "SKIPPED", "FAILED", "CANCELED")


@dataclass(frozen=True)
class Submission:
    """What `create` submits: a pipeline with its parameters, for a cluster."""

    pipeline: str
    parameters: Mapping[str, Any]
    name: str
    cluster: ClusterFile
    experiment: str
    caching: bool = True
    iterations: Sequence[str] = ()
    """What the iterations of the pipeline's loop are called in the report."""


def read_compiled(pipeline: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a compiled pipeline as its specification and its Kubernetes settings.

    Raises:
        ConfigError: there is no compiled pipeline of this name.
    """
    path = COMPILED / f"{pipeline}.yaml"
    if not path.is_file():
        raise ConfigError(f"{path}: no such compiled pipeline: run `infoxlm compile`")
    spec, platform = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    return spec, platform


def read_for(cluster: ClusterFile, pipeline: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a compiled pipeline as `read_compiled` does, and set the resources of its pods from the cluster file."""
    spec, platform = read_compiled(pipeline)
    pool = cluster.pool
    pod_settings = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    for name, executor in spec["deploymentSpec"]["executors"].items():
        container = executor["container"]
        if "accelerator" in container.get("resources", {}):
            container["resources"] = _resources(pool)
            if pool.gpus:
                gpus = {"resourceType": pool.accelerator, "resourceCount": str(pool.gpus)}
                container["resources"]["accelerator"] = gpus
            tolerations = [toleration.model_dump(exclude_none=True) for toleration in pool.tolerations]
            pod_settings[name] |= {"nodeSelector": {"labels": pool.node_selector}, "tolerations": tolerations}
        elif "resources" in container:
            container["resources"] = _resources(cluster.steps)
    return spec, platform


def _resources(amounts: Pool | Steps) -> dict[str, Any]:
    cpu = {f"resourceCpu{bound}": amounts.cpu for bound in ("Limit", "Request")}
    return cpu | {f"resourceMemory{bound}": amounts.memory for bound in ("Limit", "Request")}


def declared(spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the parameter declarations of a pipeline by name: type, default, and whether it is optional."""
    return spec["root"].get("inputDefinitions", {}).get("parameters", {})


def with_defaults(cluster: ClusterFile, pipeline: str, parameters: Mapping[str, Any]) -> str:
    """Return the YAML of a pipeline with these default parameters and with the resources and root of a cluster."""
    spec, platform = read_for(cluster, pipeline)
    spec["defaultPipelineRoot"] = cluster.pipeline_root
    spec["pipelineInfo"]["description"] += _FORM_ADVICE.format(account=cluster.service_account)
    for name, value in parameters.items():
        declared(spec)[name] |= {"defaultValue": value, "isOptional": True}
    return yaml.safe_dump_all([spec, platform], sort_keys=False, allow_unicode=True)


def without_cache(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the pipeline with Kubeflow's cache disabled for all tasks, including those in loops."""
    changed = copy.deepcopy(dict(spec))
    for component in (changed["root"], *changed["components"].values()):
        for task in component.get("dag", {}).get("tasks", {}).values():
            task["cachingOptions"] = {}
    return changed


def connect(host: str, namespace: str = "") -> Any:
    """Return a client of Kubeflow Pipelines after checking that its server answers.

    It logs in with the variables of KFP's client (KF_PIPELINES_…), or with a bearer token in KF_PIPELINES_TOKEN.

    Raises:
        StorageUnavailable: the server does not answer.
        InputError: the host is not a URL, or the server refuses, needs a login, or is too old.
    """
    if not _HOST.fullmatch(host):  # with an empty host, the client would search for a server
        raise InputError(f"--host {host!r:.200}: give the URL of Kubeflow Pipelines, https://…")
    from kfp import client as kfp

    class Client(kfp.Client):
        # KFP's method retries for 30 s with tracebacks, accepts a login page, and drops the version
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
    """Parse the health answer; raise InputError unless the server is a recent enough Kubeflow Pipelines."""
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
    """Convert exceptions of the client to one-line errors of this project; suppress the client's output.

    Raises:
        StorageUnavailable: the server does not answer, or answers with status 5xx.
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
    """Start a run and return its id.

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


def follow(client: Any, host: str, run: str, progress: Progress, say: Callable[[str], None], every: float = 10) -> str:
    """Wait until a run has ended and return its state; report the progress with the time since the start.

    While the server does not answer, the run continues, and so does the waiting.

    Args:
        client: result of `connect`.
        host: URL of Kubeflow Pipelines.
        run: id of the run.
        progress: describes the changes of the steps.
        say: receives the lines of the report.
        every: seconds between two requests.

    Returns:
        SUCCEEDED, FAILED, SKIPPED, or CANCELED if somebody has terminated the run.

    Raises:
        StorageUnavailable: the server has not answered for an hour.
        InputError: the server refuses, perhaps because the login has expired.
    """
    started = answered = time.monotonic()
    last_state = ""
    while True:
        try:
            with translate_errors(host):
                status = client.get_run(run)
            answered = time.monotonic()
        except StorageUnavailable as error:
            if time.monotonic() - answered > _SECONDS_WITHOUT_SERVER:
                raise
            say(f"{error}; the run goes on")
            time.sleep(every)
            continue
        except InputError as error:
            raise InputError(f"{error}; the run goes on: log in again and look at {page(host, run)}") from None
        tasks = getattr(status.run_details, "task_details", None) or ()
        state = _state_of(status)
        lines = progress.describe_changes(tasks)
        if state != last_state:
            lines.append(f"run: {state.lower()}")
            last_state = state
        lines += progress.describe_pending(tasks, time.monotonic())
        for line in lines:
            say(f"{_clock(time.monotonic() - started)}  {line}")
        if state in _ENDED:
            return state
        time.sleep(every)


def _state_of(run: Any) -> str:
    """Return the state of a run. Kubeflow 2.17 ends a terminated run as FAILED, and only its history shows why."""
    past_states = {entry.state for entry in run.state_history or ()}
    if run.state == "FAILED" and "CANCELING" in past_states:
        return "CANCELED"
    return run.state or "PENDING"


def run_to_end(client: Any, host: str, submission: Submission, say: Callable[[str], None]) -> None:
    """Start a run, follow it to its end and print its summary; resubmit it after a temporary failure.

    It is resubmitted up to `submit_again` times, but never if somebody has cancelled it. Kubeflow does not keep exit
    codes, and the cluster decides which lost pods it retries. Artifacts are addressed by content, so a resubmitted run
    resumes where the last one ended.

    Raises:
        as `create`, `follow` and `failure` do.
    """
    spec, _ = read_compiled(submission.pipeline)
    store = submission.cluster.store
    attempts = submission.cluster.submit_again
    for attempt in range(attempts + 1):
        run = create(client, host, submission)
        say(f"run         {run}\npage        {page(host, run)}")
        try:
            state = follow(client, host, run, Progress(spec, submission.iterations), say)
        except KeyboardInterrupt:
            say(f"\nthe run goes on; to end it: infoxlm cancel {run} --host {host}")
            return
        _say_summary(store, run, say)
        if state == "SUCCEEDED":
            return
        error = failure(state, run, store)
        if attempt == attempts or not isinstance(error, TryAgain):
            raise error
        say(f"{error}; submitting it again in {_SECONDS_BETWEEN_RUNS:.0f} s ({attempt + 1} of {attempts})")
        time.sleep(_SECONDS_BETWEEN_RUNS)


def _say_summary(store: str, run: str, say: Callable[[str], None]) -> None:
    """Print the summary that the last step of a run has written to the store, if it has and the store is reachable."""
    from components.platform import runtime

    try:
        summary = runtime.read_summary(store, run)
    except InfoXLMError as error:
        say(f"the summary of the run cannot be read ({error}): look at its page")
        return
    if summary:
        say(summary)


def failure(state: str, run: str, store: str) -> InfoXLMError:
    """Return the error of a run that did not succeed: Cancelled, or what its last failed stage wrote to the store."""
    from components.platform import runtime

    if state == "CANCELED":
        return Cancelled(f"run {run} was cancelled: submit it again to continue from its artifacts and checkpoints")
    try:
        return runtime.read_failure(store, run)
    except InfoXLMError as error:
        return InfoXLMError(
            f"run {run} failed, and its error message in the store cannot be read ({error}): read its log"
        )


def page(host: str, run: str) -> str:
    """Return the URL of a run in Kubeflow's web interface."""
    return f"{page_of(host)}/#/runs/details/{run}"


def page_of(host: str) -> str:
    """Return the URL of Kubeflow's web interface."""
    return os.environ.get("KF_PIPELINES_UI_ENDPOINT", host).rstrip("/")


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def _account_advice(error: Any) -> str:
    """Return a remedy if the server refused the service account of a run, as Kubeflow 2.18 and newer may do."""
    if "serviceaccount" not in str(error.body).lower().replace(" ", ""):
        return ""
    return (
        ": add the account to ALLOWEDSERVICEACCOUNTS of Kubeflow's API server, and bind your user to the Role"
        " infoxlm-submitter: docs/cluster/install.md, section 3"
    )


def _one_line(error: Any) -> str:
    text = error.decode(errors="replace") if isinstance(error, bytes) else str(error)
    with contextlib.suppress(ValueError, AttributeError):
        text = json.loads(text).get("message", text)
    return " ".join(str(text).split())[:200]
