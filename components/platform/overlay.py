"""Local code: a step runs with the `infoxlm_core` of somebody's checkout instead of the image's, without a new image.

    STORE/code/SHA256.zip     the package as `infoxlm submit --with-local-code` has sent it

The digest is a parameter of the run, so whoever may write the store cannot put other code under it. It is part of the
name of every artifact (`keys.artifact_key`), and what is made so never becomes champion (`mlflow/champion.py`).
`components` and `pipelines` stay the image's: they talk to Kubernetes and to the registry.

All this must happen before anything of `infoxlm_core` is imported, so nothing of it is imported here, and the archive
is fetched by a process of its own:

    python -m components.platform.overlay fetch STORE DIGEST [JOB]
    python -m components.platform.overlay run MODULE …        of a RayJob: MODULE with the code that the pod is told
"""

import atexit
import difflib
import hashlib
import importlib
import importlib.machinery
import io
import logging
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from components.settings import environment

if TYPE_CHECKING:
    from components.platform.tracking import Run

PACKAGE = "infoxlm_core"
LARGEST = 4 * 1024 * 1024
"""Bytes of all files; the package has less than one million."""
POLICY, FORBIDDEN = "INFOXLM_LOCAL_CODE", "forbidden"
"""Environment variable of the namespace, and the value with which every step refuses local code."""
_SUFFIXES = (".py", ".yaml", ".j2")  # what the wheel has
_DIGEST = re.compile("sha256:[0-9a-f]{64}")
_SHOWN = 10

logger = logging.getLogger(__name__)


def pack(package: Path) -> bytes:
    """The sources of a package, and its data, as a zip archive that is the same bytes wherever and whenever it is made.

    Raises:
        InputError: they are more than `LARGEST`.
    """
    found = _read(package)
    if (size := sum(map(len, found.values()))) > LARGEST:
        from infoxlm_core.errors import InputError

        largest = max(found, key=lambda name: len(found[name]))
        raise InputError(f"{package}: {size} bytes of code, more than {LARGEST}: move {largest} elsewhere")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:  # compressed, it would depend on the library
        for name, content in found.items():
            entry = zipfile.ZipInfo(f"{PACKAGE}/{name}")  # of 1980, owned by nobody
            entry.create_system, entry.external_attr = 3, 0o644 << 16
            archive.writestr(entry, content)
    return packed.getvalue()


def digest_of(content: bytes) -> str:
    """What names an archive."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def place_of(digest: str) -> str:
    """Where in the store an archive is."""
    return f"code/{digest.removeprefix('sha256:')}.zip"


def send(store: str, content: bytes) -> str:
    """Put an archive into the store, whatever was at its place; return its digest.

    Raises:
        InputError, StorageUnavailable: the store refuses, or does not answer.
    """
    from components.adapters import storage

    storage.open(store).put(place_of(digest_of(content)), content)
    return digest_of(content)


def use(store: str, digest: str, job: str = "") -> None:
    """Let this process, and those it starts, import `infoxlm_core` from an archive of the store.

    An archive of what the image has anyway changes nothing, the names of artifacts least of all.

    Args:
        store: directory, or s3://bucket/prefix.
        digest: of the archive; empty: the image's code is used.
        job: the RayJob that this is; it then gets the outcome.

    Raises:
        SystemExit: it cannot be had; why stands in the log and in the store.
    """
    if not digest:
        return
    content = _cached(digest)
    if digest_of(content) != digest or os.environ.get(POLICY) == FORBIDDEN:
        command = [sys.executable, "-m", "components.platform.overlay", "fetch", store, digest, job]
        if code := subprocess.run(command).returncode:  # noqa: S603
            sys.exit(code)
        content = _cached(digest)
    address = f"{store}/{place_of(digest)}"
    if os.environ.get(environment.OVERLAY) != address and not is_edited(digest):  # else another process has compared
        return
    if PACKAGE in sys.modules:
        raise RuntimeError(f"{PACKAGE} is loaded already: local code comes first")
    folder = tempfile.mkdtemp(prefix="infoxlm-code-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        archive.extractall(folder)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    os.environ[environment.OVERLAY] = address
    importlib.import_module(PACKAGE)  # now its modules come from here, even if Ray puts other folders before


def is_edited(digest: str) -> bool:
    """Whether there is local code, and it is not what the image has anyway."""
    installed = _installed()
    return bool(digest) and not (installed and digest_of(pack(installed)) == digest)


def use_as_told() -> None:
    """Do the same in a Ray worker, which is told by its environment; Ray calls it before anything else is imported."""
    try:
        use(*_told())
    except SystemExit as error:
        raise RuntimeError("the local code cannot be had: see the log of this worker") from error


def differences() -> dict[str, str]:
    """What of the code that is used is unlike the image's: file -> unified diff."""
    installed, used = _installed(), sys.modules[PACKAGE].__file__
    before, after = _read(installed) if installed else {}, _read(Path(str(used)).parent)
    changed = {}
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            old, new = (side.get(name, b"").decode(errors="replace").splitlines() for side in (before, after))
            lines = difflib.unified_diff(old, new, f"a/{PACKAGE}/{name}", f"b/{PACKAGE}/{name}", lineterm="")
            changed[name] = "".join(f"{line}\n" for line in lines)
    return changed


def describe() -> str:
    """With what the work of this process is done, in one line."""
    changed, commit = list(differences()), os.environ.get("INFOXLM_COMMIT", "unknown")
    more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
    return (
        f"made with local code {environment.local_code()}, based on commit {commit}; files that differ "
        f"({len(changed)}): {', '.join(changed[:_SHOWN])}{more}"
    )


def record(run: "Run") -> None:
    """Tell the log and a run of the tracker which local code this is, and what it changes."""
    logger.info("%s", describe())
    run.log_params({"local_code": environment.local_code()})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "diff.txt")
        path.write_text("".join(differences().values()), encoding="utf-8")
        run.log_artifacts(path, "local_code")


def add_to_card(path: Path) -> None:
    """Let a model card say so too, if this process runs with local code."""
    if environment.local_code():
        card = path.read_text(encoding="utf-8").rstrip("\n")
        path.write_text(f"{card}\n\n## Local code\n\nThis model was {describe()}.\n", encoding="utf-8")


def _read(package: Path) -> dict[str, bytes]:
    """The files of a package that are code or its data, by name."""
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*") if path.suffix in _SUFFIXES}
    return {name: files[name].read_bytes() for name in sorted(files) if files[name].is_file()}


def _cached(digest: str) -> bytes:
    path = environment.cache() / place_of(digest)
    return path.read_bytes() if path.is_file() else b""


def _installed() -> Path | None:
    """The package that would be imported, were it not for the archive."""
    overlaid = environment.local_code() and PACKAGE in sys.modules
    used = Path(str(sys.modules[PACKAGE].__file__)).parents[1] if overlaid else None
    elsewhere = [path for path in sys.path if Path(path or ".").absolute() != used]
    spec = importlib.machinery.PathFinder.find_spec(PACKAGE, elsewhere)
    return Path(spec.origin).parent if spec and spec.origin else None


def _told() -> tuple[str, str]:
    """Store and digest, as the environment says."""
    return os.environ.get(environment.OVERLAY, "").rpartition("/code/")[0], environment.local_code()


def _fetch(store: str, digest: str, job: str = "") -> None:
    """Bring an archive onto this machine, with its digest verified."""
    from components.adapters import storage
    from components.platform import runtime
    from infoxlm_core import manifests
    from infoxlm_core.errors import DataCorrupt, InputError

    with runtime.ending_clearly(store, "local code", outcome_of=job):
        if os.environ.get(POLICY) == FORBIDDEN:
            raise InputError(f"it is forbidden here ({POLICY} of the namespace): submit without --with-local-code")
        if not _DIGEST.fullmatch(digest):
            raise InputError(f"local_code: {digest!r:.80} is no digest: give sha256:…, as `infoxlm submit` does")
        found = storage.open(store).get(place_of(digest))
        if found is None:
            raise InputError(f"{store}/{place_of(digest)} is not there: submit again, --with-local-code")
        if (other := digest_of(found[0])) != digest:
            raise DataCorrupt(f"{store}/{place_of(digest)} has digest {other}, not that of its name: submit again")
        path = environment.cache() / place_of(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        manifests.write_atomically(path, found[0])


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "fetch":
        _fetch(*rest)
    else:
        use(*_told(), job=Path(rest[-1]).stem)
        sys.argv[1:] = rest[1:]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
