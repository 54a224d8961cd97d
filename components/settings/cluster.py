"""Where a run takes place on a cluster: the file that a platform engineer fills in, and the part that steps receive.

One file, such as configs/cluster.yaml, has everything that depends on the cluster. `ClusterFile.parameters` returns the
parameters of a pipeline that come from it. The parameter `cluster` is a `ClusterConfig`: a step that trains starts a
RayJob from it. If `cluster` is empty, the step trains in its own process.
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

_DIGEST = re.compile(r"[^\s@]+@sha256:([0-9a-f]{64})")


def by_digest(image: str) -> str:
    """Check that an image is named by its content; a tag may be another image tomorrow."""
    if not _DIGEST.fullmatch(image):
        raise ValueError(f"{image!r} is no image by digest: write name@sha256:…, as `docker push` prints it")
    return image


class RayConfig(StageConfig):
    """How a training becomes a RayJob, apart from its image and its GPUs."""

    service_account: KubernetesName = "infoxlm-ray"
    """Of the Ray pods: it needs no right in Kubernetes, only what reading and writing the store takes."""

    environment: dict[Variable, str] = Field(default_factory=dict)
    """Constants for the Ray pods; MLFLOW_* and AWS_ENDPOINT_URL* of the step are passed on anyway."""

    environment_from: list[KubernetesName] = Field(default_factory=list)
    """Secrets of the namespace whose entries become environment variables; with web identity none is needed."""

    queue: KubernetesName | None = None
    """Kueue's LocalQueue that admits the job; none: it starts at once."""

    priority_class: KubernetesName | None = None
    """Kubernetes' PriorityClass of the Ray pods; none: the cluster's default."""

    start_seconds: PositiveInt = 3600
    """How long to wait for GPUs before the step gives up. The time in Kueue's `queue` does not count."""

    run_seconds: PositiveInt = 14 * 86_400
    """How long one job may hold them. A training goes on from its checkpoint when the step is tried again."""

    min_workers: NonNegativeInt = 0
    """With how few workers a pre-training goes on when a node is lost and no other comes within 5 minutes; 0: it waits.

    For spot nodes: as many as have a GPU, no fewer than these. Losses are the same but for rounding. It is whole again
    after the next loss, or with the next job. Its worker pods do not save first when they must go, with notice or
    without, nor when the job is deleted: steps since the last checkpoint are made again.
    """

    grace_seconds: PositiveInt = 120
    """How long a Ray pod that must go may still run: twice the time that saving takes."""

    disk: Bytes | None = None
    """Of a Ray pod (`ephemeral-storage`): shards and checkpoints pass through it; twice their size.

    A pod that asks for none is evicted first when the disk of its node is full.
    """

    devices: dict[DeviceName, PositiveInt] = Field(default_factory=dict)
    """What a pod with GPUs asks for beside them, as Kubernetes calls it: {rdma/hca: 8}, {vpc.amazonaws.com/efa: 32}.

    Without a network of RDMA gradients go between nodes over TCP, which takes longer than a step.
    """

    shared_memory: Bytes = "16Gi"
    """What /dev/shm of a worker pod holds, part of its memory."""

    head_cpu: Cores = "2"
    """CPU cores of the head pod: 2, or 500m."""

    head_memory: Bytes = "8Gi"
    """The head trains nothing; it runs the program that starts the workers."""

    head_node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes on which the head may run; none: any."""

    retries: NonNegativeInt = 3
    """How often a job that ended with "try again" (exit code 75) is started anew."""

    @field_validator("environment")
    @classmethod
    def _no_secrets(cls, environment: dict[str, str]) -> dict[str, str]:
        for name in environment:
            if is_secret(name):
                raise ValueError(
                    f"{name} would stand in every manifest: put it into a Secret, named in environment_from"
                )
        return environment


class Toleration(StageConfig):
    """A taint of nodes that pods tolerate, with the names that Kubernetes gives to its fields."""

    key: str | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    tolerationSeconds: NonNegativeInt | None = None


class Pool(StageConfig):
    """The machines that train: what one worker pod requests, and where it may run."""

    accelerator: str = "nvidia.com/gpu"
    """The extended resource that a GPU is to Kubernetes."""

    gpus: NonNegativeInt = 1
    """GPUs of one worker pod, a training worker each; 0: pods without GPUs, one training worker each."""

    cpu: Cores = "8"
    """CPU cores of one worker pod: 8, or 7500m."""

    memory: Bytes = "64Gi"
    """Memory of one worker pod, `ray.shared_memory` included: Mi, Gi or Ti."""

    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes that train; none: any."""

    tolerations: list[Toleration] = Field(default_factory=list)
    """As in a pod: {key, operator, value, effect}."""

    def split(self, num_workers: int) -> tuple[int, int]:
        """Return how many pods a training with so many workers takes, and how many GPUs each pod has.

        Fewer workers than `gpus` share one pod with one GPU each.

        Raises:
            ConfigError: there are no workers, or they do not fill whole pods.
        """
        gpus = min(self.gpus, num_workers)
        pods, rest = divmod(num_workers, max(gpus, 1))
        if num_workers < 1 or rest:
            raise ConfigError(
                f"num_workers ({num_workers}) must be 1 or more, and a multiple of pool.gpus, the GPUs of one pod "
                f"({self.gpus}), if there are more workers than that: change one of them"
            )
        return pods, gpus


class Steps(StageConfig):
    """What a step that does not train requests, and a pod of Ray Data if there are such."""

    cpu: Cores = "4"
    """CPU cores: 4, or 500m."""

    memory: Bytes = "16Gi"
    """Mi, Gi or Ti."""


class ClusterConfig(RayConfig):
    """What a step that may start a RayJob is told: the parameter `cluster` of a pipeline."""

    image: str
    """The image of the Ray pods, by digest: name@sha256:…"""

    pool: Pool = Pool()
    steps: Steps = Steps()

    _image = field_validator("image")(by_digest)

    def for_text(self) -> Self:
        """Return this config with worker pods for text: as large as a step, without GPUs, on any node."""
        pool = Pool(gpus=0, cpu=self.steps.cpu, memory=self.steps.memory)
        return self.model_copy(update={"pool": pool, "min_workers": 0})


class ClusterFile(StageConfig):
    """One YAML file: everything that depends on the cluster and on nothing else."""

    image: str
    """The one image of all steps and Ray pods, by digest."""

    store: Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*://[^/\s]+(/[^/\s]+)*$")]
    """Where artifacts and checkpoints are, where every machine sees them: s3://bucket/prefix."""

    pipeline_root: Annotated[str, Field(pattern=r"^[a-z0-9]+://[^\s]+$")]
    """Where Kubeflow keeps its own small files."""

    service_account: KubernetesName = "infoxlm-runner"
    """Of the steps: it may create RayJobs."""

    experiment: str = "infoxlm"
    """In Kubeflow and in MLflow."""

    namespace: KubernetesName | None = None
    """Of the runs, where Kubeflow has many users; with one user there is none to name."""

    submit_again: NonNegativeInt = 3
    """How often `infoxlm submit` starts a run anew that ended with "try again" (exit code 75)."""

    pool: Pool = Pool()
    steps: Steps = Steps()
    ray: RayConfig = RayConfig()

    _image = field_validator("image")(by_digest)

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if _bytes(self.ray.shared_memory) > _bytes(self.pool.memory):
            raise ValueError(
                f"ray.shared_memory ({self.ray.shared_memory}) is part of pool.memory ({self.pool.memory}): lower it"
            )
        if self.pool.accelerator in self.ray.devices:
            raise ValueError(f"ray.devices: {self.pool.accelerator} is pool.accelerator: say how many in pool.gpus")
        return self

    def parameters(self) -> dict[str, Any]:
        """The parameters of a pipeline that say where it runs.

        Raises:
            ConfigError: the image is still the placeholder.
        """
        if set(self.image.rpartition(":")[2]) == {"0"}:
            raise ConfigError(
                f"image: {self.image} is a placeholder: put the digest that pushing your image has printed"
            )
        parts = {name: getattr(self, name).model_dump(mode="json", exclude_none=True) for name in ("pool", "steps")}
        ray = self.ray.model_dump(mode="json", exclude_none=True)
        return {"store": self.store, "image": self.image, "cluster": {"image": self.image, **ray, **parts}}


def _bytes(quantity: str) -> int:
    return int(quantity[:-2]) << {"Mi": 20, "Gi": 30, "Ti": 40}[quantity[-2:]]
