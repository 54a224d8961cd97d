"""Upload the pipelines to Kubeflow with default parameters.

The name of a version has the release and a digest of the content, so an unchanged pipeline is uploaded only once. The
image, store and pool of the cluster become defaults, because Kubeflow cannot take them from the cluster at run time.
"""

import hashlib
import importlib.metadata
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from components.settings.cluster import ClusterFile
from pipelines import submit

NAMES = {name: name if name == "infoxlm" else f"infoxlm-{name}" for name in submit.PIPELINES}
"""Names of the pipelines in Kubeflow."""


@dataclass(frozen=True)
class Uploaded:
    """A version of a pipeline in Kubeflow."""

    name: str
    page: str
    new: bool
    """False if the version existed before."""


def version_name(pipeline: str, text: str) -> str:
    """Return the name of a version: pipeline, release and digest of the content."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{NAMES[pipeline]}-{importlib.metadata.version('infoxlm-pipeline')}-{digest}"


def upload(
    client: Any, host: str, cluster: ClusterFile, pipeline: str, parameters: Mapping[str, Any], namespace: str = ""
) -> Uploaded:
    """Upload a version of a pipeline with these default parameters, unless it exists.

    Args:
        client: result of `submit.connect`.
        host: URL of Kubeflow Pipelines.
        cluster: cluster on which the pipeline will run.
        pipeline: one of `submit.PIPELINES`.
        parameters: default values; Kubeflow asks for parameters without a default.
        namespace: namespace that may see the pipeline; empty for all.

    Raises:
        InputError, StorageUnavailable: the server refuses, or does not answer.
    """
    text = submit.with_defaults(cluster, pipeline, parameters)
    name, version = NAMES[pipeline], version_name(pipeline, text)
    spec, _ = yaml.safe_load_all(text)
    description = spec["pipelineInfo"]["description"]
    with submit.translate_errors(host):
        pipeline_id = _find(client, name, namespace)
        pipeline_id = pipeline_id or _create(client, name, description, namespace)
        page = f"{submit.page_of(host)}/#/pipelines/details/{pipeline_id}"
        if _has_version(client, pipeline_id, version):
            return Uploaded(version, page, new=False)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{version}.yaml")
            path.write_text(text, encoding="utf-8")
            client.upload_pipeline_version(str(path), version, pipeline_id=pipeline_id, description=description)
    return Uploaded(version, page, new=True)


def _find(client: Any, name: str, namespace: str) -> str:
    """Return the id of the pipeline with this name, or an empty string."""
    answer = client._pipelines_api.pipeline_service_list_pipelines(namespace=namespace, filter=_named(name))
    return answer.pipelines[0].pipeline_id if answer.pipelines else ""


def _create(client: Any, name: str, description: str, namespace: str) -> str:
    """Create a pipeline without a version, because the server would give a first version the pipeline's name."""
    import kfp_server_api as api

    pipeline = api.V2beta1Pipeline(name=name, display_name=name, description=description, namespace=namespace or None)
    return client._pipelines_api.pipeline_service_create_pipeline(pipeline).pipeline_id


def _has_version(client: Any, pipeline: str, version: str) -> bool:
    return bool(client.list_pipeline_versions(pipeline, filter=_named(version)).pipeline_versions)


def _named(name: str) -> str:
    return json.dumps({"predicates": [{"operation": "EQUALS", "key": "display_name", "stringValue": name}]})
