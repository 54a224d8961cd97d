"""Start a compiled pipeline on a cluster with Kubeflow Pipelines, follow it, and say how it ended.

Everything is checked before anything is sent: the server takes any parameters, and a misspelt one would be found out
by the first step that misses it. The client of Kubeflow knows how to log in; its way to start a run knows neither the
platform's part of a compiled pipeline nor plugins, so that the request is made here.
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
"""Kubeflow Pipelines; an older one drops what it does not know of a pipeline's part for Kubernetes, all of it."""

_TYPES: dict[str, tuple[type, ...]] = {
    "STRING": (str,),
    "NUMBER_INTEGER": (int,),
    "NUMBER_DOUBLE": (int, float),
    "BOOLEAN": (bool,),
    "STRUCT": (dict,),
    "LIST": (list,),
}
_BETWEEN = 60.0
"""Seconds before a run is submitted again."""
_STILL = 5
"""Minutes after which a state that does not change is said again."""
_PODS = "image, quota or Pod Security? kubectl get events --field-selector type=Warning"
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
    """A compiled pipeline: what runs, and, beside it, what only Kubernetes understands.

    Raises:
        ConfigError: there is none of this name.
    """
    path = COMPILED / f"{pipeline}.yaml"
    if not path.is_file():
        raise ConfigError(f"{path}: no compiled pipeline: run `infoxlm compile`")
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
    """The parameters of a pipeline: type, default, whether it may be left out."""
    return spec["root"].get("inputDefinitions", {}).get("parameters", {})


def check(pipeline: str, spec: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    """Compare parameters with what a pipeline declares.

    Raises:
        ConfigError: one is unknown, missing or of another type.
    """
    known = declared(spec)
    if unknown := sorted(set(parameters) - set(known)):
        raise ConfigError(f"{pipeline} has no parameter {unknown[0]}; known are {', '.join(sorted(known))}")
    for name, said in known.items():
        if name not in parameters:
            if not said.get("isOptional") and "defaultValue" not in said:
                raise ConfigError(f"{pipeline} needs parameter {name}: give it")
            continue
        value, kinds = parameters[name], _TYPES[said["parameterType"]]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(f"{pipeline}: parameter {name} is {value!r:.60}, not of type {said['parameterType']}")


def with_defaults(cluster: ClusterFile, pipeline: str, parameters: Mapping[str, Any]) -> str:
    """Return the YAML of a pipeline for Kubeflow's page: it has these defaults, and the sizes and root of a cluster."""
    spec, platform = read_for(cluster, pipeline)
    spec["defaultPipelineRoot"] = cluster.pipeline_root
    for name, value in parameters.items():
        declared(spec)[name] |= {"defaultValue": value, "isOptional": True}
    return yaml.safe_dump_all([spec, platform], sort_keys=False, allow_unicode=True)


def without_cache(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The pipeline with every task always run, those inside loops too."""
    changed = copy.deepcopy(dict(spec))
    for part in (changed["root"], *changed["components"].values()):
        for task in part.get("dag", {}).get("tasks", {}).values():
            task["cachingOptions"] = {}
    return changed


def connect(host: str, namespace: str = "") -> Any:
    """A client of Kubeflow Pipelines that has reached its server.

    It logs in by the variables that its makers define (KF_PIPELINES_…); a bearer token may be in KF_PIPELINES_TOKEN.

    Raises:
        StorageUnavailable: nobody answers there.
        InputError: the host is no address, or the server refuses, wants a login, or is too old.
    """
    if not _HOST.fullmatch(host):  # of an empty one the client looks for a server of its own
        raise InputError(f"--host {host!r:.200}: give the address of Kubeflow Pipelines, https://…")
    from kfp import client as kfp

    class Client(kfp.Client):
        # theirs tries for half a minute, with tracebacks, takes a page for an answer, and drops the version
        def get_kfp_healthz(self, sleep_duration: int = 5) -> Any:  # noqa: ARG002 - KFP passes it
            answer = self._healthz_api.healthz_service_get_healthz(_preload_content=False)
            return _healthy(host, answer.data)

    file = os.environ.get("KF_PIPELINES_SA_TOKEN_PATH")
    options: dict[str, Any] = {
        "existing_token": os.environ.get("KF_PIPELINES_TOKEN"),
        "credentials": kfp.ServiceAccountTokenVolumeCredentials(file) if file else None,
        "ssl_ca_cert": os.environ.get("SSL_CERT_FILE"),
    }
    with translate_errors(host), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = Client(host, namespace=namespace or "kubeflow", **options)
        client.get_kfp_healthz()
    return client


def _healthy(host: str, answer: bytes) -> Any:
    """What a server says of itself, if it is one of Kubeflow Pipelines, and new enough."""
    import kfp_server_api as api

    try:
        said = json.loads(answer)
        multi_user = said["multi_user"]
    except (ValueError, TypeError, KeyError):
        raise InputError(
            f"{host} does not answer as Kubeflow Pipelines does: if it is a page to log in, put a token into "
            "KF_PIPELINES_TOKEN, else check --host"
        ) from None
    version = re.match(r"v?(\d+)\.(\d+)", str(said.get("tag_name", "")))
    if version and tuple(map(int, version.groups())) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise InputError(f"{host} is Kubeflow Pipelines {said['tag_name']}, too old: update it to {oldest} or newer")
    return api.V2beta1GetHealthzResponse(multi_user=multi_user)


@contextlib.contextmanager
def translate_errors(host: str) -> Iterator[None]:
    """Turn the errors of the client into ours, one line each; what it prints is left out.

    Raises:
        StorageUnavailable: the server does not answer, or with a 5xx.
        InputError: it answers, and refuses.
    """
    import kfp_server_api
    import urllib3

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except kfp_server_api.ApiException as error:
        said = _one_line(error.body or error.reason)
        if error.status and error.status < 500:
            raise InputError(f"{host} refuses ({error.status}: {said})" + _about_accounts(error)) from None
        raise StorageUnavailable(f"{host} does not answer ({error.status}: {said}): try again") from None
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise StorageUnavailable(f"{host} does not answer ({_one_line(error)}): check --host, or try again") from None


def create(client: Any, host: str, submission: Submission) -> str:
    """Start a run; return its id.

    Raises:
        ConfigError: a parameter is wrong; nothing has been sent.
        InputError, StorageUnavailable: the server refuses, or does not answer.
    """
    import kfp_server_api as api

    cluster = submission.cluster
    spec, platform = read_for(cluster, submission.pipeline)
    check(submission.pipeline, spec, submission.parameters)
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
    """Wait until a run has ended; return its state. Every change is said once, with the time since the begin.

    The server may be gone for a while: a run goes on without it.

    Raises:
        StorageUnavailable: the server has not answered for an hour.
        InputError: it refuses, perhaps because the login has expired.
    """
    began = answered = time.monotonic()
    told: dict[str, str] = {}
    since: dict[str, float] = {}
    warned: dict[str, int] = {}
    while True:
        try:
            with translate_errors(host):
                found = client.get_run(run)
            answered = time.monotonic()
        except StorageUnavailable as error:
            if time.monotonic() - answered > 3600:
                raise
            say(f"{error}; the run goes on")
            time.sleep(every)
            continue
        except InputError as error:  # a login that is over
            raise InputError(f"{error}; the run goes on: log in again and look at {page(host, run)}") from None
        states = {task.display_name: task.state for task in getattr(found.run_details, "task_details", None) or ()}
        states = {name: state for name, state in states.items() if name and state} | {"run": found.state or "PENDING"}
        for name, state in states.items():
            if told.get(name) != state:
                say(f"{_clock(time.monotonic() - began)}  {name}: {state.lower()}")
                since[name], warned[name] = time.monotonic(), 0
            minutes = int(time.monotonic() - since[name]) // 60
            if state == "PENDING" and minutes >= _STILL * (warned[name] + 1):
                warned[name] = minutes // _STILL
                say(f"{_clock(time.monotonic() - began)}  {name}: still pending after {minutes} min: {_PODS}")
        told |= states
        if found.state in _ENDED:
            return found.state
        time.sleep(every)


def see_through(client: Any, host: str, submission: Submission, say: Callable[[str], None]) -> None:
    """Start a run and follow it to its end; start it anew, `submit_again` times at most, if it ends with "try again".

    Kubeflow loses exit codes, and which deaths of a pod it retries is a setting of the cluster. What is finished is
    found by content, so that a run that is started anew goes on where the last one was.

    Raises:
        as `create`, `follow` and `failure` do.
    """
    again = submission.cluster.submit_again
    for attempt in range(again + 1):
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
        if attempt == again or state == "CANCELED" or not isinstance(error, TryAgain):
            raise error
        say(f"{error}; submitting it again in {_BETWEEN:.0f} s ({attempt + 1} of {again})")
        time.sleep(_BETWEEN)


def failure(state: str, run: str, store: str) -> InfoXLMError:
    """What went wrong, as the stage that failed last has written it down."""
    from components.platform import runtime

    if state == "CANCELED":
        return Preempted(f"run {run} was terminated: submit it again to continue")
    try:
        return runtime.read_failure(store, run)
    except InfoXLMError as error:
        return InfoXLMError(f"run {run} failed; its error message in the store cannot be read ({error}): read its log")


def page(host: str, run: str) -> str:
    """Where Kubeflow shows a run."""
    return f"{page_of(host)}/#/runs/details/{run}"


def page_of(host: str) -> str:
    """Where Kubeflow's pages begin."""
    return os.environ.get("KF_PIPELINES_UI_ENDPOINT", host).rstrip("/")


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def _about_accounts(error: Any) -> str:
    """What to do if the server refuses a run because of its service account, as Kubeflow does from 2.18 on."""
    if "serviceaccount" not in str(error.body).lower().replace(" ", ""):
        return ""
    return (
        ": the account must be in ALLOWEDSERVICEACCOUNTS of Kubeflow's API server, and you be bound to the Role"
        " infoxlm-submitter: docs/cluster.md, section 3"
    )


def _one_line(error: Any) -> str:
    text = error.decode(errors="replace") if isinstance(error, bytes) else str(error)
    with contextlib.suppress(ValueError, AttributeError):
        text = json.loads(text).get("message", text)
    return " ".join(str(text).split())[:200]
