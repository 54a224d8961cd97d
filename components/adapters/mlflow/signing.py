"""Signatures of models: created when a model is registered, verified before it becomes champion and before each use.

A signature covers every file of the model's folder. It is a file beside the folder, so any registry keeps it. The
platform mounts the keys as files; without a key nothing is signed or verified:

    INFOXLM_SIGNING_KEY    elliptic-curve key (PEM) that signs models when they are registered
    INFOXLM_VERIFYING_KEY  its public key (PEM); if set, a model without a valid signature is refused
"""

import os
from pathlib import Path

from infoxlm_core.errors import InputError, SignatureInvalid, one_line

FILE = "signature.json"
SIGNING_KEY = "INFOXLM_SIGNING_KEY"
VERIFYING_KEY = "INFOXLM_VERIFYING_KEY"


def sign(model: Path, signature: Path) -> None:
    """Sign all files of a folder if INFOXLM_SIGNING_KEY is set.

    Raises:
        InputError: the key cannot be used.
    """
    key_path = os.environ.get(SIGNING_KEY)
    if not key_path:
        return
    from model_signing import signing

    try:
        signing.Config().use_elliptic_key_signer(private_key=key_path).sign(model, signature)
    except (OSError, TypeError, ValueError) as error:
        raise InputError(
            f"{SIGNING_KEY}={key_path}: {one_line(error)}: give an elliptic-curve key without password"
        ) from None


def verify(model: Path, signature: Path, name: str) -> None:
    """Verify the signature of the folder `model` if INFOXLM_VERIFYING_KEY is set. Error messages contain `name`.

    Raises:
        InputError: the key cannot be read.
        SignatureInvalid: the signature is missing, belongs to another key, or does not fit the files.
    """
    key_path = os.environ.get(VERIFYING_KEY)
    if not key_path:
        return
    if not Path(key_path).is_file():
        raise InputError(f"{VERIFYING_KEY}={key_path}: no such file: give a public key (PEM)")
    if not signature.is_file():
        raise SignatureInvalid(f"{name} is not signed: register it again with {SIGNING_KEY} set")
    from model_signing import verifying

    try:
        verifying.Config().use_elliptic_key_verifier(public_key=key_path).verify(model, signature)
    except Exception as error:  # the library has no common class for its errors about forged files
        raise SignatureInvalid(f"{name} does not match its signature by {key_path}: {one_line(error)}") from None
