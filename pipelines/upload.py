"""Put the pipelines into Kubeflow's page, with parameters that run as they are.

A version is named by release and content, so that the same is there once; one is never changed. Where it runs (image,
store, pool) becomes the default of a parameter: Kubeflow resolves no parameter from the cluster when a run begins.
"""

import hashlib
import importlib.metadata
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.settings.cluster import ClusterFile
from pipelines import submit

NAMES = {name: name if name == "infoxlm" else f"infoxlm-{name}" for name in submit.PIPELINES}
"""Of the pipelines in Kubeflow's page."""


@dataclass(frozen=True)
class Uploaded:
    """A version of a pipeline in Kubeflow's page."""

    name: str
    page: str
    new: bool
    """False: it was there."""


def version_name(pipeline: str, text: str) -> str:
    """Release and digest of a filled-in pipeline; unlike names of all others, as Kubernetes' own objects need them."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{NAMES[pipeline]}-{importlib.metadata.version('infoxlm-pipeline')}-{digest}"


def upload(
    client: Any, host: str, cluster: ClusterFile, pipeline: str, parameters: Mapping[str, Any], namespace: str = ""
) -> Uploaded:
    """Make a version of a pipeline whose parameters have these defaults, if there is none yet.

    Args:
        client: of `submit.connect`.
        host: address of Kubeflow Pipelines.
        cluster: where its runs take place.
        pipeline: one of `submit.PIPELINES`.
        parameters: defaults. What has none, the page asks for.
        namespace: the pipeline is seen there only; empty: by all.

    Raises:
        InputError, StorageUnavailable: the server refuses, or does not answer.
    """
    text = submit.with_defaults(cluster, pipeline, parameters)
    name, version = NAMES[pipeline], version_name(pipeline, text)
    with submit.translate_errors(host):
        found = _find(client, name, namespace) or _create(client, name, submit.read_compiled(pipeline)[0], namespace)
        page = f"{submit.page_of(host)}/#/pipelines/details/{found}"
        if _has_version(client, found, version):
            return Uploaded(version, page, new=False)
        with tempfile.TemporaryDirectory() as folder:
            (path := Path(folder, f"{version}.yaml")).write_text(text, encoding="utf-8")
            client.upload_pipeline_version(str(path), version, pipeline_id=found)
    return Uploaded(version, page, new=True)


def _find(client: Any, name: str, namespace: str) -> str:
    found = client._pipelines_api.pipeline_service_list_pipelines(namespace=namespace, filter=_called(name)).pipelines
    return found[0].pipeline_id if found else ""


def _create(client: Any, name: str, spec: Mapping[str, Any], namespace: str) -> str:
    """A pipeline without a version: the server would call the first one like the pipeline."""
    import kfp_server_api as api

    described = api.V2beta1Pipeline(
        name=name,
        display_name=name,
        description=spec["pipelineInfo"].get("description"),
        namespace=namespace or None,
    )
    return client._pipelines_api.pipeline_service_create_pipeline(described).pipeline_id


def _has_version(client: Any, pipeline: str, version: str) -> bool:
    return bool(client.list_pipeline_versions(pipeline, filter=_called(version)).pipeline_versions)


def _called(name: str) -> str:
    return json.dumps({"predicates": [{"operation": "EQUALS", "key": "display_name", "stringValue": name}]})
