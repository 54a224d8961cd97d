"""The file that describes a cluster, and what becomes of it."""

import json
from pathlib import Path

import pytest

from components.settings.cluster import ClusterConfig, ClusterFile, Pool
from infoxlm_core.errors import ConfigError
from infoxlm_core.run_file import load_as

FILE = Path(__file__).parents[3] / "configs" / "cluster.yaml"
IMAGE = f"image=registry.example/infoxlm@sha256:{'1' * 64}"


def test_the_file_in_the_repository_becomes_parameters_of_the_pipeline():
    file = load_as(ClusterFile, FILE, [IMAGE])

    parameters = file.parameters()

    assert set(parameters) == {"store", "image", "cluster"}
    cluster = ClusterConfig.parse(parameters["cluster"], "cluster")
    assert (cluster.image, cluster.pool, cluster.steps) == (file.image, file.pool, file.steps)
    assert cluster.pool.gpus == 8 and cluster.pool.tolerations[0].effect == "NoSchedule"


def test_numbers_may_come_back_from_kubeflow_as_floats():
    seconds = "pool.tolerations=[{key: a, effect: NoExecute, tolerationSeconds: 30}]"
    values = load_as(ClusterFile, FILE, [IMAGE, seconds]).parameters()["cluster"]
    floats = json.loads(json.dumps(values), parse_int=float)

    assert ClusterConfig.parse(floats, "cluster") == ClusterConfig.parse(values, "cluster")


@pytest.mark.parametrize("num_workers", [0, 12])
def test_workers_that_do_not_fill_their_pods_are_refused(num_workers):
    with pytest.raises(ConfigError, match=rf"num_workers \({num_workers}\) must be 1 or more, .* one pod \(8\)"):
        Pool(gpus=8).split(num_workers)


def test_the_placeholder_of_an_image_is_not_submitted():
    with pytest.raises(ConfigError, match="is a placeholder: replace it by the digest"):
        load_as(ClusterFile, FILE).parameters()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("image=registry.example/infoxlm:latest", "is not an image by digest: write name@sha256:…"),
        ("image=registry.example/infoxlm@sha256:12", "is not an image by digest"),
        ("store=/data/runs", "store"),
        ("store=s3://", "store"),
        ("gpus=8", "gpus: unknown name; known are"),
        ("pool.gpu=8", "pool.gpu: unknown name; known are accelerator"),
        ("pool.gpus=-1", "pool.gpus"),
        ("pool.memory=512", "pool.memory"),
        ("pool.tolerations=[{kee: x}]", "pool.tolerations.0.kee: unknown name"),
        ("ray.shared_memory=600Gi", "ray.shared_memory (600Gi) is part of pool.memory (512Gi)"),
        ("ray.devices={rdma: 8}", "ray.devices"),
        ("ray.devices={rdma/hca: 0}", "ray.devices"),
        ("ray.devices={nvidia.com/gpu: 8}", "nvidia.com/gpu is pool.accelerator: set its number in pool.gpus"),
        ("ray.service_account=Not_A_Name", "ray.service_account"),
        ("ray.start_seconds=0", "ray.start_seconds"),
        ("ray.environment={AWS_SECRET_ACCESS_KEY: x}", "put it into a Secret of environment_from"),
        ("ray.environment={MLFLOW_TRACKING_PASSWORD: x}", "put it into a Secret"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line_that_names_it(change, words):
    with pytest.raises(ConfigError) as refused:
        load_as(ClusterFile, FILE, [IMAGE, change])

    assert words in str(refused.value)
    assert str(FILE) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_image_of_a_local_registry_is_one_by_digest_too():
    image = f"localhost:5001/infoxlm@sha256:{'a' * 64}"

    assert load_as(ClusterFile, FILE, [f"image={image}"]).image == image
