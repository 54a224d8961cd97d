"""Settings of a cluster.

A `ClusterFile`, such as configs/cluster.yaml, contains all settings that depend on the cluster. `make_parameters`
derives the pipeline parameters. The parameter `cluster` is a `ClusterConfig` for the RayJobs that steps start. If
`cluster` is empty, a step trains in its own process.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from components.settings.environment import is_secret
from infoxlm_core.config import StageConfig
from infoxlm_core.errors import ConfigError

Cores = Annotated[str, Field(pattern=r"^\d+(\.\d+)?m?$", coerce_numbers_to_str=True)]
Bytes = Annotated[str, Field(pattern=r"^[1-9]\d*(Mi|Gi|Ti)$")]
KubernetesName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=253)]
DeviceName = Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$", max_length=253)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

_IMAGE_BY_DIGEST = re.compile(r"[^\s@]+@sha256:[0-9a-f]{64}")


def check_image(image: str) -> str:
    """Return an image name with a digest. Raise ValueError for a tag, because tags may move to other images."""
    if not _IMAGE_BY_DIGEST.fullmatch(image):
        raise ValueError(
            f"{image!r} is not an image by digest: write name@sha256:… with the digest that `docker push` printed"
        )
    return image


class RayConfig(StageConfig):
    """Settings of RayJobs, except the image and the worker pods."""

    service_account: KubernetesName = "infoxlm-ray"
    """Service account of the Ray pods. It needs access to the store, but no permissions in Kubernetes."""

    environment: dict[Variable, str] = Field(default_factory=dict)
    """Additional environment variables of the Ray pods. The step's MLFLOW_* and AWS_ENDPOINT_URL* are always set."""

    environment_from: list[KubernetesName] = Field(default_factory=list)
    """Secrets whose entries become environment variables of the Ray pods. Web identity needs none."""

    queue: KubernetesName | None = None
    """Kueue's LocalQueue for the jobs. Without one, jobs start at once."""

    priority_class: KubernetesName | None = None
    """PriorityClass of the Ray pods. Default: the cluster's default."""

    start_seconds: PositiveInt = 3600
    """Seconds to wait for GPUs before the step fails. Time in Kueue's queue does not count."""

    partial_seconds: PositiveInt = 600
    """Seconds after which a job is deleted if only some of its pods have found a node. The job is created again later.
    This prevents two jobs from blocking each other, because a job's pods are scheduled one by one. Use more time than
    your cloud takes to add a node. With `queue`, no job is deleted, because Kueue admits only whole jobs."""

    run_seconds: PositiveInt = 14 * 86_400
    """Limit on a job's run time in seconds. If the step is retried, training resumes from its checkpoint."""

    min_workers: NonNegativeInt = 0
    """Smallest number of workers with which pre-training continues if a lost node is not replaced within 5 minutes. Use
    this setting for spot nodes. 0: the training waits for all workers. Losses are equal up to rounding. After the next
    loss of a node, and in the next job, all workers are requested again. With this setting, an evicted or deleted
    worker pod saves no checkpoint, so the steps since the last checkpoint are repeated."""

    grace_seconds: PositiveInt = 120
    """Termination grace period of Ray pods in seconds. Use twice the time for saving a checkpoint."""

    disk: Bytes | None = None
    """Disk space that a Ray pod requests (`ephemeral-storage`). Shards and checkpoints are stored there, so use twice
    their size. If a node's disk is full, pods without a request are evicted first."""

    devices: dict[DeviceName, PositiveInt] = Field(default_factory=dict)
    """Further extended resources of a pod with GPUs, such as {rdma/hca: 8} or {vpc.amazonaws.com/efa: 32}. Without
    RDMA, nodes exchange gradients over TCP. The exchange then takes longer than the rest of a step."""

    shared_memory: Bytes = "16Gi"
    """Size of /dev/shm in a worker pod, included in the pod's memory."""

    head_cpu: Cores = "2"
    """CPU cores of the head pod, such as 2 or 500m."""

    head_memory: Bytes = "8Gi"
    """Memory of the head pod, which starts the workers and does not train."""

    head_node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes on which the head may run. Default: any node."""

    retries: NonNegativeInt = 3
    """Number of restarts of a job after temporary failures (exit code 75)."""

    @field_validator("environment")
    @classmethod
    def _refuse_secrets(cls, environment: dict[str, str]) -> dict[str, str]:
        """Refuse variables whose names suggest secrets, because a job's manifest would show their values."""
        for name in environment:
            if is_secret(name):
                raise ValueError(
                    f"{name} would be readable in every manifest: put it into a Secret of environment_from"
                )
        return environment


class Toleration(StageConfig):
    """A toleration of worker pods, with the field names of Kubernetes."""

    key: str | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    tolerationSeconds: NonNegativeInt | None = None


class Pool(StageConfig):
    """Resources and nodes of the worker pods that train."""

    accelerator: str = "nvidia.com/gpu"
    """Name of the extended resource for GPUs in Kubernetes."""

    gpus: NonNegativeInt = 1
    """GPUs per worker pod, with one training worker per GPU. 0: pods without GPUs, one training worker per pod."""

    cpu: Cores = "8"
    """CPU cores of one worker pod, such as 8 or 7500m."""

    memory: Bytes = "64Gi"
    """Memory of one worker pod in Mi, Gi or Ti, including `ray.shared_memory`."""

    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes that train. Default: any node."""

    tolerations: list[Toleration] = Field(default_factory=list)
    """Tolerations as in a pod: {key, operator, value, effect}."""

    def split_workers(self, num_workers: int) -> tuple[int, int]:
        """Return the number of pods for the training workers, and the number of GPUs per pod.

        If `num_workers` is less than `gpus`, the workers share one pod with one GPU per worker.

        Raises:
            ConfigError: `num_workers` is 0, or the workers do not fill all pods.
        """
        gpus_per_pod = min(self.gpus, num_workers)
        workers_per_pod = max(gpus_per_pod, 1)
        pod_count, remaining_workers = divmod(num_workers, workers_per_pod)
        if num_workers < 1 or remaining_workers:
            raise ConfigError(
                f"num_workers ({num_workers}) must be 1 or more, and a multiple of pool.gpus if there are more workers "
                f"than GPUs in one pod ({self.gpus}): change one of them"
            )
        return pod_count, gpus_per_pod


class Steps(StageConfig):
    """Resources of steps that do not train, and of Ray pods that process text."""

    cpu: Cores = "4"
    """CPU cores, such as 4 or 500m."""

    memory: Bytes = "16Gi"
    """Memory in Mi, Gi or Ti."""


class ClusterConfig(RayConfig):
    """Settings for steps that may start a RayJob: the pipeline parameter `cluster`."""

    image: str
    """Container image of the Ray pods, by digest: name@sha256:…"""

    pool: Pool = Pool()
    steps: Steps = Steps()

    _check_image = field_validator("image")(check_image)

    def for_text(self) -> Self:
        """Return a copy for worker pods that process text: a step's resources, no GPUs, any node, all workers."""
        pool = Pool(gpus=0, cpu=self.steps.cpu, memory=self.steps.memory)
        return self.model_copy(update={"pool": pool, "min_workers": 0})


class ClusterFile(StageConfig):
    """The YAML file of a cluster, such as configs/cluster.yaml."""

    image: str
    """Container image of all steps and Ray pods, by digest."""

    store: Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*://[^/\s]+(/[^/\s]+)*$")]
    """Location of artifacts and checkpoints that all pods can reach: s3://bucket/prefix."""

    pipeline_root: Annotated[str, Field(pattern=r"^[a-z0-9]+://[^\s]+$")]
    """Location of Kubeflow's own small files."""

    service_account: KubernetesName = "infoxlm-runner"
    """Service account of the steps. It may create RayJobs."""

    experiment: str = "infoxlm"
    """Name of the experiment in Kubeflow and MLflow."""

    namespace: KubernetesName | None = None
    """Namespace of the runs if Kubeflow is multi-user."""

    submit_again: NonNegativeInt = 3
    """Number of times that `infoxlm submit` resubmits a run after temporary failures (exit code 75)."""

    pool: Pool = Pool()
    steps: Steps = Steps()
    ray: RayConfig = RayConfig()

    _check_image = field_validator("image")(check_image)

    @model_validator(mode="after")
    def _check_pool(self) -> Self:
        """Check that the settings of the Ray pods fit the pool."""
        if _parse_bytes(self.ray.shared_memory) > _parse_bytes(self.pool.memory):
            raise ValueError(
                f"ray.shared_memory ({self.ray.shared_memory}) is part of pool.memory ({self.pool.memory}): lower it"
            )
        if self.pool.accelerator in self.ray.devices:
            raise ValueError(f"ray.devices: {self.pool.accelerator} is pool.accelerator: set its number in pool.gpus")
        return self

    def make_parameters(self) -> dict[str, Any]:
        """Return the pipeline parameters that depend on the cluster: `store`, `image` and `cluster`.

        Raises:
            ConfigError: the image is still the example file's placeholder.
        """
        _, _, digest = self.image.rpartition(":")
        is_placeholder = set(digest) == {"0"}  # configs/cluster.yaml has a digest of zeros
        if is_placeholder:
            raise ConfigError(
                f"image: {self.image} is a placeholder: replace it by the digest that `docker push` printed"
            )
        cluster: dict[str, Any] = {"image": self.image, **self.ray.model_dump(mode="json", exclude_none=True)}
        cluster["pool"] = self.pool.model_dump(mode="json", exclude_none=True)
        cluster["steps"] = self.steps.model_dump(mode="json", exclude_none=True)
        return {"store": self.store, "image": self.image, "cluster": cluster}


def _parse_bytes(quantity: str) -> int:
    """Convert a quantity such as 16Gi to bytes."""
    bytes_per_unit = {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    unit = quantity[-2:]
    return int(quantity.removesuffix(unit)) * bytes_per_unit[unit]
