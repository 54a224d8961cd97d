"""Submit a compiled pipeline to Kubeflow Pipelines, follow the run, and report the result.

This module does not use `kfp.Client.run_pipeline`, because that method has no argument for a run's plugins.
"""

import contextlib
import io
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from components.settings.cluster import ClusterFile, Pool, Steps
from infoxlm_core.errors import Cancelled, ConfigError, InfoXLMError, InputError, StorageUnavailable, TryAgain
from pipelines.progress import Progress

COMPILED = Path(__file__).parent / "compiled"
PIPELINES = {
    "infoxlm": "pipelines.infoxlm:infoxlm",
    "ablations": "pipelines.ablations:ablations",
    "suite": "pipelines.suite:suite",
    "promotion": "pipelines.promotion:promotion",
    "translation": "pipelines.translation:translation",
    "translation-ablations": "pipelines.translation:translation_ablations",
}
"""Mapping from the name of each compiled pipeline in `COMPILED` to its function."""
OLDEST_VERSION = (2, 17)
"""Oldest supported version of Kubeflow Pipelines. Older versions silently drop a pipeline's Kubernetes settings."""

_FORM_ADVICE = (
    " In the form Create run, enter {account} as Service Account. Usually you change only the parameters `overrides`,"
    ' such as {{"pretraining.optimization.steps": 2000}}, and `num_workers`. docs/configuration.md and `infoxlm config`'
    " describe all fields."
)
_POLL_SECONDS = 10.0
_SECONDS_BETWEEN_RUNS = 60.0  # time for a failed storage or node to recover
_MAX_SECONDS_WITHOUT_SERVER = 3600
_HOST_PATTERN = re.compile(r"https?://(\[[0-9A-Fa-f:]+\]|[\w.-]+)(:[0-9]+)?(/\S*)?")
_END_STATES = ("SUCCEEDED", "SKIPPED", "FAILED", "CANCELED")


@dataclass(frozen=True)
class Submission:
    """A pipeline run to submit with `create_run`."""

    pipeline: str
    parameters: Mapping[str, Any]
    name: str
    cluster: ClusterFile
    experiment: str
    use_cache: bool = True
    iterations: Sequence[str] = ()
    """Names of the loop's iterations, for the progress report."""


def read_compiled(pipeline: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the specification and the Kubernetes settings of a compiled pipeline.

    Raises:
        ConfigError: the compiled pipeline does not exist.
    """
    path = COMPILED / f"{pipeline}.yaml"
    if not path.is_file():
        raise ConfigError(f"There is no compiled pipeline {path}. Run `infoxlm compile`.")
    spec, platform = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    return spec, platform


def read_compiled_for_cluster(cluster: ClusterFile, pipeline: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a compiled pipeline as `read_compiled` does, but with a cluster's resources for its pods."""
    spec, platform = read_compiled(pipeline)
    pool = cluster.pool
    tolerations = [toleration.model_dump(exclude_none=True) for toleration in pool.tolerations]
    pod_settings = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    for name, executor in spec["deploymentSpec"]["executors"].items():
        container = executor["container"]
        if "accelerator" in container.get("resources", {}):  # a step that trains in its own pod
            container["resources"] = _make_resources(pool)
            if pool.gpus:
                gpus = {"resourceType": pool.accelerator, "resourceCount": str(pool.gpus)}
                container["resources"]["accelerator"] = gpus
            pod_settings[name] |= {"nodeSelector": {"labels": pool.node_selector}, "tolerations": tolerations}
        elif "resources" in container:  # a step that processes data; all others use their namespace's defaults
            container["resources"] = _make_resources(cluster.steps)
    return spec, platform


def _make_resources(amounts: Pool | Steps) -> dict[str, Any]:
    """Return the CPU and memory fields of a compiled pipeline, with requests equal to limits."""
    return {
        "resourceCpuLimit": amounts.cpu,
        "resourceCpuRequest": amounts.cpu,
        "resourceMemoryLimit": amounts.memory,
        "resourceMemoryRequest": amounts.memory,
    }


def read_declarations(spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a mapping from parameter name to declaration: type, default, and whether the parameter is optional."""
    return spec["root"].get("inputDefinitions", {}).get("parameters", {})


def select_parameters(pipeline: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values whose names are parameters of a compiled pipeline."""
    spec, _ = read_compiled(pipeline)
    declarations = read_declarations(spec)
    return {name: value for name, value in values.items() if name in declarations}


def render_for_cluster(cluster: ClusterFile, pipeline: str, defaults: Mapping[str, Any]) -> str:
    """Return the YAML text of a pipeline with default parameters and a cluster's settings."""
    spec, platform = read_compiled_for_cluster(cluster, pipeline)
    spec["defaultPipelineRoot"] = cluster.pipeline_root
    spec["pipelineInfo"]["description"] += _FORM_ADVICE.format(account=cluster.service_account)
    declarations = read_declarations(spec)
    for name, value in defaults.items():
        declarations[name] |= {"defaultValue": value, "isOptional": True}
    return yaml.safe_dump_all([spec, platform], sort_keys=False, allow_unicode=True)


def disable_cache(spec: Mapping[str, Any]) -> None:
    """Disable Kubeflow's cache for all tasks of a pipeline, including those in loops."""
    for component in (spec["root"], *spec["components"].values()):
        for task in component.get("dag", {}).get("tasks", {}).values():
            task["cachingOptions"] = {}  # the cache is enabled only by {"enableCache": true}


def connect(host: str, namespace: str = "") -> Any:
    """Connect to Kubeflow Pipelines. Check that the server answers and has a supported version.

    The client logs in with KFP's own variables (KF_PIPELINES_…) or with the bearer token in KF_PIPELINES_TOKEN.

    Args:
        host: URL of the server.
        namespace: namespace of the runs if Kubeflow is multi-user.

    Raises:
        StorageUnavailable: the server does not answer.
        InputError: the host is not a URL, or the server refuses, requires a login, or is too old.
    """
    # The client would search for a server if the host were empty, and use https if the host had no scheme.
    if not _HOST_PATTERN.fullmatch(host):
        raise InputError(
            f"--host {host!r:.200} is not a URL. Give the URL of Kubeflow Pipelines, https://… or http://…"
        )
    from kfp import client as kfp

    class Client(kfp.Client):
        # Override KFP's own method, which retries for 30 s with tracebacks, accepts login pages and drops the version.
        def get_kfp_healthz(self, sleep_duration: int = 5) -> Any:  # noqa: ARG002 - KFP passes it
            response = self._healthz_api.healthz_service_get_healthz(_preload_content=False)
            return _parse_health(host, response.data)

    token_file = os.environ.get("KF_PIPELINES_SA_TOKEN_PATH")
    options: dict[str, Any] = {
        "existing_token": os.environ.get("KF_PIPELINES_TOKEN"),
        "credentials": kfp.ServiceAccountTokenVolumeCredentials(token_file) if token_file else None,
        "ssl_ca_cert": os.environ.get("SSL_CERT_FILE"),
    }
    with translate_errors(host), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # KFP always warns that it needs a server of version 2
        client = Client(host, namespace=namespace or "kubeflow", **options)  # for KFP, "kubeflow" means no namespace
        client.get_kfp_healthz()  # with a namespace, the constructor does not check the server
    return client


def _parse_health(host: str, body: bytes) -> Any:
    """Parse the response body of a health request.

    Raises:
        InputError: the server is not Kubeflow Pipelines, or its version is not supported.
    """
    import kfp_server_api as api

    try:
        health = json.loads(body)
        multi_user = health["multi_user"]
    except (ValueError, TypeError, KeyError):
        raise InputError(
            f"{host} is not the API of Kubeflow Pipelines. If it is a login page, set KF_PIPELINES_TOKEN to a token. "
            "Otherwise, check --host."
        ) from None
    tag = str(health.get("tag_name", ""))
    match = re.match(r"v?(\d+)\.(\d+)", tag)  # no match: a development build, which is accepted
    if match and (int(match[1]), int(match[2])) < OLDEST_VERSION:
        major, minor = OLDEST_VERSION
        raise InputError(
            f"{host} runs Kubeflow Pipelines {tag}, which is too old. Update it to {major}.{minor} or newer."
        )
    return api.V2beta1GetHealthzResponse(multi_user=multi_user)


@contextlib.contextmanager
def translate_errors(host: str) -> Iterator[None]:
    """Convert exceptions of Kubeflow's client to one-line errors, and suppress the client's output, such as HTML links.

    Raises:
        StorageUnavailable: the server does not answer, or answers with status 5xx.
        InputError: the server refuses the request.
    """
    import kfp_server_api
    import urllib3

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except kfp_server_api.ApiException as error:
        answer = f"{error.status}: {_to_one_line(error.body or error.reason)}"
        if error.status and error.status < 500:  # the client's fault, so trying again would not help
            raise InputError(f"{host} refuses the request ({answer}).") from None
        raise StorageUnavailable(f"{host} does not answer ({answer}). Try again.") from None
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise StorageUnavailable(
            f"{host} does not answer ({_to_one_line(error)}). Check --host, or try again."
        ) from None


def create_run(client: Any, host: str, submission: Submission) -> str:
    """Start a run on the cluster and return its id.

    Raises:
        InputError, StorageUnavailable: the server refuses, or does not answer.
    """
    import kfp_server_api as api

    cluster = submission.cluster
    spec, platform = read_compiled_for_cluster(cluster, submission.pipeline)
    if not submission.use_cache:
        disable_cache(spec)
    parameters = dict(submission.parameters)
    runtime_config = api.V2beta1RuntimeConfig(parameters=parameters, pipeline_root=cluster.pipeline_root)
    with translate_errors(host):
        experiment = client.create_experiment(submission.experiment)
        run = api.V2beta1Run(
            display_name=submission.name,
            experiment_id=experiment.experiment_id,
            service_account=cluster.service_account,
            pipeline_spec={"pipeline_spec": spec, "platform_spec": platform},
            runtime_config=runtime_config,
            # Kubeflow's optional MLflow plugin opens an MLflow run for the pipeline run, in this experiment.
            plugins_input={"mlflow": {"experiment_name": submission.experiment}},
        )
        # KFP's public method `run_pipeline` has no argument for plugins.
        return client._run_api.run_service_create_run(run=run).run_id


def follow_run(client: Any, host: str, run_id: str, progress: Progress, print_line: Callable[[str], None]) -> str:
    """Wait until a run ends and return its state. Print the progress with the elapsed time.

    Args:
        client: result of `connect`.
        host: URL of Kubeflow Pipelines.
        run_id: id of the run.
        progress: object that describes the changes of the run's steps.
        print_line: function that prints a line of the progress report.

    Returns:
        SUCCEEDED, FAILED, SKIPPED, or CANCELED if a user has terminated the run.

    Raises:
        StorageUnavailable: the server has not answered for an hour.
        InputError: the server refuses, for example because the login has expired.
    """
    start_time = time.monotonic()
    last_state = ""
    while True:
        run = _get_run(client, host, run_id, print_line)
        tasks = getattr(run.run_details, "task_details", None) or ()
        state = _read_state(run)
        messages = progress.describe_changes(tasks)
        if state != last_state:
            messages.append(f"run: {state.lower()}")
            last_state = state
        # Call this after `describe_changes`, which records the running steps that a reminder names.
        messages += progress.describe_pending(tasks, time.monotonic())
        elapsed = timedelta(seconds=int(time.monotonic() - start_time))
        for message in messages:
            print_line(f"{elapsed}  {message}")
        if state in _END_STATES:
            return state
        time.sleep(_POLL_SECONDS)


def _get_run(client: Any, host: str, run_id: str, print_line: Callable[[str], None]) -> Any:
    """Request a run from the server. Retry for up to an hour while the server does not answer.

    Raises:
        StorageUnavailable, InputError: as in `follow_run`.
    """
    first_request_time = time.monotonic()
    while True:
        try:
            with translate_errors(host):
                return client.get_run(run_id)
        except StorageUnavailable as error:
            # The run continues without the API server, so wait until the server returns.
            if time.monotonic() - first_request_time > _MAX_SECONDS_WITHOUT_SERVER:
                raise
            print_line(f"{error} The run continues on the cluster.")
            time.sleep(_POLL_SECONDS)
        except InputError as error:  # for example, the login expired during a long run
            url = make_run_url(host, run_id)
            raise InputError(f"{error} The run continues on the cluster. Log in again and look at {url}") from None


def _read_state(run: Any) -> str:
    """Return a run's state. Return CANCELED for a terminated run, although Kubeflow 2.17 reports FAILED."""
    past_states = {change.state for change in run.state_history or ()}
    if run.state == "FAILED" and "CANCELING" in past_states:
        return "CANCELED"
    return run.state or "PENDING"


def submit_and_wait(client: Any, host: str, submission: Submission, print_line: Callable[[str], None]) -> None:
    """Submit a run, wait for its end and print its summary. Resubmit it after a temporary failure.

    The run is resubmitted up to `submit_again` times, but never after a user has cancelled it. Artifacts are addressed
    by content, so a resubmitted run resumes where the previous run ended.

    Raises:
        InfoXLMError: an error of `create_run` or `follow_run`, or the error that `read_run_error` returns.
    """
    spec, _ = read_compiled(submission.pipeline)
    store = submission.cluster.store
    max_retries = submission.cluster.submit_again
    for retry in range(max_retries + 1):
        run_id = create_run(client, host, submission)
        print_line(f"run         {run_id}\npage        {make_run_url(host, run_id)}")
        progress = Progress(spec, submission.iterations)
        try:
            state = follow_run(client, host, run_id, progress, print_line)
        except KeyboardInterrupt:
            print_line(f"\nthe run continues on the cluster; to end it: infoxlm cancel {run_id} --host {host}")
            return
        _print_summary(store, run_id, print_line)
        if state == "SUCCEEDED":
            return
        error = read_run_error(state, run_id, store)
        if retry == max_retries or not isinstance(error, TryAgain):  # TryAgain: a temporary failure, exit code 75
            raise error
        print_line(f"{error}; submitting it again in {_SECONDS_BETWEEN_RUNS:.0f} s ({retry + 1} of {max_retries})")
        time.sleep(_SECONDS_BETWEEN_RUNS)


def _print_summary(store: str, run_id: str, print_line: Callable[[str], None]) -> None:
    """Print the summary that a run's last step wrote to the store. Print a note if the summary cannot be read."""
    from components.platform import runtime

    try:
        summary = runtime.read_summary(store, run_id)
    except InfoXLMError as error:  # not raised, because the run's own error is more important to the user
        print_line(f"The summary of the run cannot be read ({error}). Look at its page.")
        return
    if summary:
        print_line(summary)


def read_run_error(state: str, run_id: str, store: str) -> InfoXLMError:
    """Return the error of a failed run: Cancelled, or the error that its last failed stage stored."""
    from components.platform import runtime

    if state == "CANCELED":
        return Cancelled(f"Run {run_id} was cancelled. Submit it again to continue from its artifacts and checkpoints.")
    try:
        return runtime.read_failure(store, run_id)
    except InfoXLMError as error:
        return InfoXLMError(
            f"Run {run_id} failed, and its error message in the store cannot be read ({error}). Read its log."
        )


def make_run_url(host: str, run_id: str) -> str:
    """Return the URL of a run in Kubeflow's web interface."""
    return f"{find_web_interface(host)}/#/runs/details/{run_id}"


def find_web_interface(host: str) -> str:
    """Return the URL of Kubeflow's web interface."""
    return os.environ.get("KF_PIPELINES_UI_ENDPOINT", host).rstrip("/")


def _to_one_line(error: Any) -> str:
    """Shorten an error to one line of at most 200 characters. Return only the field `message` of a JSON response."""
    text = error.decode(errors="replace") if isinstance(error, bytes) else str(error)
    with contextlib.suppress(ValueError, AttributeError):  # the text is not a JSON object
        text = json.loads(text).get("message", text)
    return " ".join(str(text).split())[:200]
