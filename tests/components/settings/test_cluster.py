"""The file that describes a cluster is validated and becomes parameters of the pipeline."""

import json
from pathlib import Path

import pytest

from components.settings.cluster import ClusterConfig, ClusterFile, Pool
from infoxlm_core.errors import ConfigError
from infoxlm_core.run_file import load_config

FILE = Path(__file__).parents[3] / "configs" / "cluster.yaml"
IMAGE = f"image=localhost:5001/infoxlm@sha256:{'1' * 64}"


def test_example_file_becomes_parameters_of_the_pipeline():
    file = load_config(ClusterFile, FILE, [IMAGE])

    parameters = file.make_parameters()

    assert set(parameters) == {"store", "image", "cluster"}
    cluster = ClusterConfig.parse(parameters["cluster"], "cluster")
    assert (cluster.image, cluster.pool, cluster.steps) == (file.image, file.pool, file.steps)
    assert cluster.pool.gpus == 8 and cluster.pool.tolerations[0].effect == "NoSchedule"


def test_floats_from_kubeflow_are_accepted_as_whole_numbers():
    seconds = "pool.tolerations=[{key: a, effect: NoExecute, tolerationSeconds: 30}]"
    values = load_config(ClusterFile, FILE, [IMAGE, seconds]).make_parameters()["cluster"]
    floats = json.loads(json.dumps(values), parse_int=float)

    assert ClusterConfig.parse(floats, "cluster") == ClusterConfig.parse(values, "cluster")


@pytest.mark.parametrize("num_workers", [0, 12])
def test_workers_must_fill_their_pods(num_workers):
    with pytest.raises(ConfigError, match=rf"num_workers \({num_workers}\) must be 1 or more, .* one pod \(8\)"):
        Pool(gpus=8).split_workers(num_workers)


def test_placeholder_image_is_refused():
    with pytest.raises(ConfigError, match="is a placeholder: replace it by the digest"):
        load_config(ClusterFile, FILE).make_parameters()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("image=registry.example/infoxlm:latest", "is not an image by digest: write name@sha256:…"),
        ("image=registry.example/infoxlm@sha256:12", "is not an image by digest"),
        ("store=/data/runs", "store"),
        ("store=s3://", "store"),
        ("gpus=8", "gpus: unknown name; known are"),
        ("pool.gpu=8", "pool.gpu: unknown name; known are accelerator"),
        ("pool.memory=512", "pool.memory"),
        ("pool.tolerations=[{kee: x}]", "pool.tolerations.0.kee: unknown name"),
        ("ray.shared_memory=600Gi", "ray.shared_memory (600Gi) is part of pool.memory (512Gi)"),
        ("ray.devices={rdma: 8}", "ray.devices"),
        ("ray.devices={nvidia.com/gpu: 8}", "nvidia.com/gpu is pool.accelerator: set its number in pool.gpus"),
        ("ray.service_account=Not_A_Name", "ray.service_account"),
        ("ray.environment={AWS_SECRET_ACCESS_KEY: x}", "put it into a Secret of environment_from"),
    ],
)
def test_invalid_field_is_refused_by_name_in_one_line(change, message):
    with pytest.raises(ConfigError) as error:
        load_config(ClusterFile, FILE, [IMAGE, change])

    assert message in str(error.value)
    assert str(FILE) in str(error.value)
    assert "\n" not in str(error.value)
