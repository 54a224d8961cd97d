"""A preparation that is killed continues after its finished tasks and writes the same bytes."""

import multiprocessing
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from infoxlm_core.corpora.phases import clean
from infoxlm_core.stages import preparation
from tests.helpers.files import Folder
from tests.toys.raw_text import raw_text_config, write_raw_text

PHASES = (
    "reserve_test_sets", "read_source", "clean_part", "choose_labelled_test_set", "merge_reserved_digests",
    "write_keys", "find_duplicates", "write_tables",
)  # fmt: skip
PHASES_OF_ONE_TASK = ("reserve_test_sets", "merge_reserved_digests")
FORK = multiprocessing.get_context("fork")


class KillingFolder(Folder):
    """Kills the process that is about to write one of the given records for the first time."""

    def __init__(self, folder: Path, records: Iterable[str]):
        super().__init__(str(folder))
        self.records = frozenset(records)

    def put(self, name: str, content: str | bytes) -> None:
        marker = self.directory.parent / f"killed-in-{Path(name).stem}"
        if name in self.records and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().put(name, content)


class RecordingFolder(Folder):
    """Remembers the names of the files that are written."""

    def __init__(self, folder: Path):
        super().__init__(str(folder))
        self.written_names: set[str] = set()

    def put(self, name: str, content: str | bytes) -> None:
        self.written_names.add(name)
        super().put(name, content)


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_preparation_killed_once_in_each_phase_writes_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(clean, "PART_ROWS", 500)  # many parts; forked processes inherit the limit
    (tmp_path / "text").mkdir()
    text = write_raw_text(tmp_path / "text")
    config = raw_text_config(text, labelled_share=0.15, held_out_share=0.1, evaluation_sets=(str(text / "tests"),))
    preparation.prepare(config, tmp_path / "uninterrupted", Folder(str(tmp_path / "other work")))
    monkeypatch.setattr(preparation, "PARTS_OF_PARTITION", 6)  # partitions do not change the result either
    records = {phase: f"done/{phase}-{0 if phase in PHASES_OF_ONE_TASK else 1:06}.json" for phase in PHASES}
    killing_folder = KillingFolder(tmp_path / "work", records.values())
    for phase in PHASES:
        driver = FORK.Process(target=preparation.prepare, args=(config, tmp_path / "out", killing_folder))
        driver.start()
        driver.join()
        assert driver.exitcode == -signal.SIGKILL
        assert (tmp_path / f"killed-in-{Path(records[phase]).stem}").exists()
    finished_records = {entry.name for entry in killing_folder.entries() if entry.name.startswith("done/")}

    recording_folder = RecordingFolder(tmp_path / "work")
    preparation.prepare(config, tmp_path / "out", recording_folder)

    assert finished_records.isdisjoint(recording_folder.written_names), "finished tasks ran again"
    assert read_files(tmp_path / "out") == read_files(tmp_path / "uninterrupted")
