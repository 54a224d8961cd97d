"""Signatures of models: made when one is registered, checked before one becomes champion and whenever one is used.

A signature covers every file of the model's folder and lies beside it, so it travels with the model through any
registry. The keys are files that the platform mounts; they are no parameters, and without them nothing is signed:

    INFOXLM_SIGNING_KEY    an elliptic-curve key (PEM); what is registered is signed with it
    INFOXLM_VERIFYING_KEY  its public key (PEM); where this is set, what is not signed with it is refused
"""

import logging
import os
from pathlib import Path

from infoxlm_core.errors import InputError, SignatureInvalid

logger = logging.getLogger(__name__)

FILE = "signature.json"
SIGNING, VERIFYING = "INFOXLM_SIGNING_KEY", "INFOXLM_VERIFYING_KEY"


def sign(model: Path, signature: Path) -> None:
    """Sign all files of a folder, if there is a key for it.

    Raises:
        InputError: the key cannot be used.
    """
    if not (key := os.environ.get(SIGNING)):
        return
    from model_signing import signing

    try:
        signing.Config().use_elliptic_key_signer(private_key=key).sign(model, signature)
    except (OSError, TypeError, ValueError) as error:
        raise InputError(f"{SIGNING}={key}: {_reason(error)}: give an elliptic-curve key without password") from None


def verify(model: Path, signature: Path, name: str) -> None:
    """Check the signature of a folder, if there is a key for it.

    Args:
        model: folder with the signed files.
        signature: file that was made when it was signed.
        name: what people call the model.

    Raises:
        InputError: the key cannot be read.
        SignatureInvalid: there is no signature, it is of another key, or the files are not those that were signed.
    """
    if not (key := os.environ.get(VERIFYING)):
        return
    if not Path(key).is_file():
        raise InputError(f"{VERIFYING}={key}: no such file: give a public key (PEM)")
    if not signature.is_file():
        raise SignatureInvalid(f"{name} is not signed: set {SIGNING} where models are registered, register it again")
    from model_signing import verifying

    try:
        verifying.Config().use_elliptic_key_verifier(public_key=key).verify(model, signature)
    except Exception as error:  # what the library says of a forged file is not one class
        raise SignatureInvalid(f"{name}: {_reason(error)}: it is not what was signed with {key}") from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
