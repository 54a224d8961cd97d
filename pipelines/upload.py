"""Upload the pipelines to Kubeflow's page, with defaults for their parameters.

A version is named by release and content: it never changes, and the same content is uploaded once. Image, store and
pool of the cluster become defaults, since Kubeflow takes no parameter from the cluster when a run starts.
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
"""Names of the pipelines in Kubeflow's page."""


@dataclass(frozen=True)
class Uploaded:
    """A version of a pipeline in Kubeflow's page."""

    name: str
    page: str
    new: bool
    """False if it was there before."""


def version_name(pipeline: str, text: str) -> str:
    """Return a name for a version: pipeline, release and digest of the content."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{NAMES[pipeline]}-{importlib.metadata.version('infoxlm-pipeline')}-{digest}"


def upload(
    client: Any, host: str, cluster: ClusterFile, pipeline: str, parameters: Mapping[str, Any], namespace: str = ""
) -> Uploaded:
    """Upload a version of a pipeline whose parameters have these defaults, if it is not there yet.

    Args:
        client: of `submit.connect`.
        host: address of Kubeflow Pipelines.
        cluster: where its runs take place.
        pipeline: one of `submit.PIPELINES`.
        parameters: defaults; the page asks for a parameter without a default.
        namespace: whose users see the pipeline; empty: all users.

    Raises:
        InputError, StorageUnavailable: the server refuses, or does not answer.
    """
    text = submit.with_defaults(cluster, pipeline, parameters)
    name, version = NAMES[pipeline], version_name(pipeline, text)
    with submit.translate_errors(host):
        pipeline_id = _find(client, name, namespace)
        pipeline_id = pipeline_id or _create(client, name, submit.read_compiled(pipeline)[0], namespace)
        page = f"{submit.page_of(host)}/#/pipelines/details/{pipeline_id}"
        if _has_version(client, pipeline_id, version):
            return Uploaded(version, page, new=False)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{version}.yaml")
            path.write_text(text, encoding="utf-8")
            client.upload_pipeline_version(str(path), version, pipeline_id=pipeline_id)
    return Uploaded(version, page, new=True)


def _find(client: Any, name: str, namespace: str) -> str:
    """Return the id of a pipeline; empty if there is none of this name."""
    answer = client._pipelines_api.pipeline_service_list_pipelines(namespace=namespace, filter=_named(name))
    return answer.pipelines[0].pipeline_id if answer.pipelines else ""


def _create(client: Any, name: str, spec: Mapping[str, Any], namespace: str) -> str:
    """Create a pipeline without a version, since the server would name the first version like the pipeline."""
    import kfp_server_api as api

    pipeline = api.V2beta1Pipeline(
        name=name,
        display_name=name,
        description=spec["pipelineInfo"].get("description"),
        namespace=namespace or None,
    )
    return client._pipelines_api.pipeline_service_create_pipeline(pipeline).pipeline_id


def _has_version(client: Any, pipeline: str, version: str) -> bool:
    return bool(client.list_pipeline_versions(pipeline, filter=_named(version)).pipeline_versions)


def _named(name: str) -> str:
    return json.dumps({"predicates": [{"operation": "EQUALS", "key": "display_name", "stringValue": name}]})
