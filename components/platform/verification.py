"""Whether an artifact is what its manifest says: hashed when it is read, and when it is found after it was touched."""

import contextlib
import json
from pathlib import Path
from typing import Any

from infoxlm_core import manifests
from infoxlm_core.errors import DataCorrupt


def verify(directory: Path, kind: str) -> dict[str, Any]:
    """Compare an artifact with its manifest; hash it only if a file was touched since that was done last."""
    state = state_of(directory)
    marker = marker_of(directory)
    known = False
    with contextlib.suppress(OSError):  # one that may not be read says nothing
        known = marker.is_file() and marker.read_bytes() == state.encode()
    found = manifests.read(directory, kind, made_with=f"the stage that makes {kind}", check=lambda _: not known)
    if not known:
        note(directory, state)
    return found


def note_copy(partial: Path, final: Path) -> None:
    """Remember what is in a copy without a manifest of ours, before it moves to its place: no copy lacks this."""
    marker_of(final).parent.mkdir(exist_ok=True)
    noted = {"content": manifests.digest_files(partial), "state": state_of(partial, but="")}
    manifests.write_atomically(marker_of(final), json.dumps(noted))


def is_as_noted(directory: Path) -> bool:
    """Whether a copy is what `note_copy` saw; hash it only if a file was touched since that was done last."""
    try:
        noted = json.loads(marker_of(directory).read_bytes())
        state = state_of(directory, but="")
        if noted["state"] == state:
            return True
        if noted["content"] != manifests.digest_files(directory):
            return False
    except (FileNotFoundError, ValueError, LookupError, TypeError):  # made by older code, or the note is damaged
        return False
    note(directory, json.dumps(noted | {"state": state}))
    return True


def state_of(directory: Path, but: str = manifests.NAME) -> str:
    """A digest of what the file system says of all files but the manifest, which has a digest of its own."""
    found = [(path.relative_to(directory), path.stat()) for path in sorted(directory.rglob("*")) if path.is_file()]
    return manifests.digest(
        [
            (str(path), said.st_size, said.st_mtime_ns, said.st_ctime_ns, said.st_ino)
            for path, said in found
            if path.name != but
        ]
    )


def marker_of(directory: Path) -> Path:
    """The file that says in which state an artifact was when every byte of it was compared last."""
    return directory.parent.parent / "verified" / f"{directory.parent.name}-{directory.name}"


def note(directory: Path, state: str) -> None:
    """Remember that every byte was right in this state."""
    with contextlib.suppress(OSError):  # in a store that we may only read, all is compared each time
        marker_of(directory).parent.mkdir(exist_ok=True)
        manifests.write_atomically(marker_of(directory), state)


def hash_what_is_read(directory: Path) -> None:
    """Compare what will be read; token shards, and the text that becomes such, are compared by their own readers."""
    kind = ""
    with contextlib.suppress(DataCorrupt):  # `read` says what is wrong
        kind = manifests.load(directory)["kind"]
    manifests.read(
        directory,
        kind,
        made_with="the stage that makes it",
        check=lambda path: kind != "shards" and not (kind == "corpus" and path.parts[0] in ("mono", "pairs")),
    )
