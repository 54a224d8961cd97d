"""Work for other processes, some of which kills them. This module is light, because every worker imports it."""

import os
import signal
from pathlib import Path

import pyarrow as pa

from infoxlm_core.corpora.parallel import ItemFunction
from infoxlm_core.errors import InputError
from tests.helpers.files import Folder


class DeadlyFolder(Folder):
    """Kills a worker that is about to report the first task of one of three phases, if its parent is named "deadly"."""

    def put(self, name: str, content: str | bytes) -> None:
        marker = self.directory.parent / f"killed-in-{Path(name).stem}"
        victims = [f"done/{phase}-000000.json" for phase in ("clean_part", "find_duplicates", "write_tables")]
        if self.directory.parent.name == "deadly" and name in victims and not marker.exists():
            marker.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        super().put(name, content)


def die_once(chunk: pa.Table, function: ItemFunction, chosen: str, marker: Path) -> pa.Table:
    if chosen in str(chunk.to_pydict()) and not marker.exists():
        marker.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    return function(chunk)


def add_process(chunk: pa.Table) -> pa.Table:
    return chunk.append_column("who", pa.array([os.getpid()] * len(chunk), pa.int64()))


def refuse(chunk: pa.Table) -> pa.Table:
    raise InputError("x.tsv:7: no such thing: mend it")


def die(chunk: pa.Table) -> pa.Table:
    os.kill(os.getpid(), signal.SIGKILL)
    return chunk
