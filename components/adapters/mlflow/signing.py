"""Signatures of models: created when a model is registered, verified before it becomes champion and before each use.

A signature covers every file of the model's folder and lies beside the folder, so any registry keeps it. The platform
mounts the keys as files; without a key nothing is signed or verified:

    INFOXLM_SIGNING_KEY    elliptic-curve key (PEM) that signs models when they are registered
    INFOXLM_VERIFYING_KEY  its public key (PEM); if set, a model without a valid signature is refused
"""

import os
from pathlib import Path

from infoxlm_core.errors import InputError, SignatureInvalid

FILE = "signature.json"
SIGNING, VERIFYING = "INFOXLM_SIGNING_KEY", "INFOXLM_VERIFYING_KEY"


def sign(model: Path, signature: Path) -> None:
    """Sign all files of a folder if INFOXLM_SIGNING_KEY is set.

    Raises:
        InputError: the key cannot be used.
    """
    key = os.environ.get(SIGNING)
    if not key:
        return
    from model_signing import signing

    try:
        signing.Config().use_elliptic_key_signer(private_key=key).sign(model, signature)
    except (OSError, TypeError, ValueError) as error:
        raise InputError(f"{SIGNING}={key}: {_reason(error)}: give an elliptic-curve key without password") from None


def verify(model: Path, signature: Path, name: str) -> None:
    """Verify the signature of a folder if INFOXLM_VERIFYING_KEY is set.

    Args:
        model: folder with the signed files.
        signature: the signature file.
        name: name of the model, for messages.

    Raises:
        InputError: the key cannot be read.
        SignatureInvalid: the signature is missing, belongs to another key, or does not fit the files.
    """
    key = os.environ.get(VERIFYING)
    if not key:
        return
    if not Path(key).is_file():
        raise InputError(f"{VERIFYING}={key}: no such file: give a public key (PEM)")
    if not signature.is_file():
        raise SignatureInvalid(f"{name} is not signed: set {SIGNING} where models are registered, register it again")
    from model_signing import verifying

    try:
        verifying.Config().use_elliptic_key_verifier(public_key=key).verify(model, signature)
    except Exception as error:  # the library has no common class for its errors about forged files
        raise SignatureInvalid(f"{name}: {_reason(error)}: it is not what was signed with {key}") from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
