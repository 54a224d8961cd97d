"""Sign models at registration, and verify their signatures before promotion and before each use.

A signature covers every file of the model's directory. The signature is a file beside the directory, so it works with
any registry. The platform mounts the keys as files. Without a key, nothing is signed or verified:

    INFOXLM_SIGNING_KEY    private elliptic-curve key (PEM) for signing models
    INFOXLM_VERIFYING_KEY  public key (PEM) for verifying models; if set, models without a valid signature are refused
"""

import os
from pathlib import Path

from infoxlm_core.errors import InputError, SignatureInvalid, one_line

FILE = "signature.json"
SIGNING_KEY = "INFOXLM_SIGNING_KEY"
VERIFYING_KEY = "INFOXLM_VERIFYING_KEY"


def sign(model: Path, signature: Path) -> None:
    """Sign all files of a directory if INFOXLM_SIGNING_KEY is set.

    Raises:
        InputError: the key is unusable.
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
    """Verify the signature of a model's directory if INFOXLM_VERIFYING_KEY is set.

    Args:
        model: directory of the model.
        signature: signature file.
        name: name of the model for error messages.

    Raises:
        InputError: the key's file does not exist.
        SignatureInvalid: the signature is missing, or does not match the key and the files.
    """
    key_path = os.environ.get(VERIFYING_KEY)
    if not key_path:
        return
    if not Path(key_path).is_file():
        raise InputError(f"{VERIFYING_KEY}={key_path}: no such file: give a public key (PEM)")
    if not signature.is_file():
        raise SignatureInvalid(f"{name} is not signed: delete it and register it again with {SIGNING_KEY} set")
    from model_signing import verifying

    try:
        verifying.Config().use_elliptic_key_verifier(public_key=key_path).verify(model, signature)
    except Exception as error:  # the library has no common base class for its verification errors
        raise SignatureInvalid(f"{name} does not match its signature by {key_path}: {one_line(error)}") from None
