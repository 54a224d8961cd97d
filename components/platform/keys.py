"""Keys: the name of an artifact is a digest of all that decides its content: config, inputs, version of its stage."""

from typing import Any

from components.settings import environment
from infoxlm_core import manifests
from infoxlm_core.config import StageConfig
from infoxlm_core.training.input_digests import digest_inputs, digest_inputs_by_role

__all__ = ["artifact_key", "digest_inputs", "digest_inputs_by_role"]


def artifact_key(kind: str, config: StageConfig, *inputs: str) -> str:
    """Name of an artifact: a digest of kind and version, config and the digests of its inputs.

    With local code (`overlay`) of that as well: what one edit makes is never taken for what the image or another makes.
    """
    decisive: list[Any] = [kind, manifests.VERSIONS[kind], config.result_fields(), inputs]
    if code := environment.local_code():
        decisive.append(code)
    return manifests.digest(decisive).removeprefix("sha256:")[:16]
