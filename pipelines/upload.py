"""Upload the pipelines to Kubeflow with default parameters.

A version's name contains the release and a digest of the content, so an unchanged pipeline is uploaded only once. The
cluster's image, store and pool become defaults, because Kubeflow cannot look them up at run time.
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


@dataclass(frozen=True)
class UploadedVersion:
    """A pipeline version in Kubeflow."""

    name: str
    page: str
    """URL in the web interface."""
    is_new: bool
    """Whether this call uploaded the version."""


def upload_version(
    client: Any, host: str, cluster: ClusterFile, pipeline: str, defaults: Mapping[str, Any], namespace: str = ""
) -> UploadedVersion:
    """Upload a pipeline version with default parameters, unless an equal version exists.

    Args:
        client: result of `submit.connect`.
        host: URL of Kubeflow Pipelines.
        cluster: settings of the cluster on which the pipeline will run.
        pipeline: name of the pipeline, a key of `submit.PIPELINES`.
        defaults: default values of parameters. Kubeflow asks for parameters without a default.
        namespace: namespace that may see the pipeline; empty for all namespaces.

    Raises:
        InputError, StorageUnavailable: the server refuses, or does not answer.
    """
    yaml_text = submit.render_for_cluster(cluster, pipeline, defaults)
    spec, _ = yaml.safe_load_all(yaml_text)
    name = spec["pipelineInfo"]["name"]
    description = spec["pipelineInfo"]["description"]
    release = importlib.metadata.version("infoxlm-pipeline")
    digest = hashlib.sha256(yaml_text.encode()).hexdigest()[:12]  # 48 bits suffice for a pipeline's versions
    version = f"{name}-{release}-{digest}"
    with submit.translate_errors(host):
        pipeline_id = _find_pipeline(client, name, namespace)
        if not pipeline_id:
            pipeline_id = _create_pipeline(client, name, description, namespace)
        page = f"{submit.find_web_interface(host)}/#/pipelines/details/{pipeline_id}"
        equal_versions = client.list_pipeline_versions(pipeline_id, filter=_make_name_filter(version))
        if equal_versions.pipeline_versions:
            return UploadedVersion(version, page, is_new=False)
        with tempfile.TemporaryDirectory() as directory:  # the client accepts only a file, not its text
            path = Path(directory, f"{version}.yaml")
            path.write_text(yaml_text, encoding="utf-8")
            client.upload_pipeline_version(str(path), version, pipeline_id=pipeline_id, description=description)
    return UploadedVersion(version, page, is_new=True)


def _find_pipeline(client: Any, name: str, namespace: str) -> str:
    """Return the id of the pipeline with this name, or "" if it does not exist."""
    name_filter = _make_name_filter(name)
    response = client._pipelines_api.pipeline_service_list_pipelines(namespace=namespace, filter=name_filter)
    return response.pipelines[0].pipeline_id if response.pipelines else ""


def _create_pipeline(client: Any, name: str, description: str, namespace: str) -> str:
    """Create a pipeline without versions and return its id.

    A version uploaded together with the pipeline would get the pipeline's name.
    """
    import kfp_server_api as api

    pipeline = api.V2beta1Pipeline(name=name, display_name=name, description=description, namespace=namespace or None)
    return client._pipelines_api.pipeline_service_create_pipeline(pipeline).pipeline_id


def _make_name_filter(name: str) -> str:
    """Return a list request's filter for a display name."""
    return json.dumps({"predicates": [{"operation": "EQUALS", "key": "display_name", "stringValue": name}]})
