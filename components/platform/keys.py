"""Names of artifacts: each is a digest of everything that decides the artifact's content."""

from infoxlm_core import manifests
from infoxlm_core.config import StageConfig
from infoxlm_core.training.fingerprint import digest_inputs, digest_inputs_by_role

__all__ = ["artifact_key", "digest_inputs", "digest_inputs_by_role"]


def artifact_key(kind: str, config: StageConfig, *inputs: str) -> str:
    """Return the name of an artifact: a digest of kind, version of the kind, config, and digests of the inputs."""
    decisive = [kind, manifests.VERSIONS[kind], config.result_fields(), inputs]
    return manifests.digest(decisive).removeprefix("sha256:")[:16]
