"""A preparation whose driver or workers are killed continues to equal bytes, and partitions do not change its rows."""

import json
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infoxlm_core.config import PreparationConfig
from infoxlm_core.corpora.parallel import Work
from infoxlm_core.corpora.phases import clean
from infoxlm_core.stages import preparation
from tests.helpers.files import Folder
from tests.toys.raw_text import raw_text_config, write_raw_text

PHASES = ("reserve", "read", "clean", "label", "unite", "offer", "reduce", "write")
SINGLE = ("reserve", "unite")
"""Phases of one task."""
FORK = multiprocessing.get_context("fork")


class DeadlyFolder(Folder):
    """Kills the process that is about to report a task, the first time that it is reported."""

    def __init__(self, folder: Path, records: Iterable[str]):
        super().__init__(str(folder))
        self.records = frozenset(records)

    def put(self, name: str, content: str | bytes) -> None:
        marker = self.directory.parent / f"killed-in-{Path(name).stem}"
        if name in self.records and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().put(name, content)


class CountingFolder(Folder):
    """Counts how often each task is reported."""

    def __init__(self, folder: Path):
        super().__init__(str(folder))
        self.reports: Counter[str] = Counter()

    def put(self, name: str, content: str | bytes) -> None:
        self.reports[name] += name.startswith("done/")
        super().put(name, content)


def in_forks(work: Work, numbers: Iterable[int]) -> Iterator[Any]:
    """Run each task in a process of its own, and again if it is killed; return its record."""
    task, job = work.args
    for number in numbers:
        exit_codes = []
        while exit_codes[-1:] != [0]:
            process = FORK.Process(target=work, args=(number,))
            process.start()
            process.join()
            exit_codes.append(process.exitcode)
        assert exit_codes in ([0], [-signal.SIGKILL, 0])
        yield json.loads(job.files.read(f"done/{task.__name__}-{number:06}.json"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module", autouse=True)
def small_parts() -> Iterator[None]:
    """Cut toy text into many parts. Forked processes inherit the limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clean, "PART_ROWS", 500)
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> PreparationConfig:
    text = write_raw_text(tmp_path_factory.mktemp("text"))
    return raw_text_config(text, labelled_share=0.15, held_out_share=0.1, evaluation_sets=(str(text / "tests"),))


@pytest.fixture(scope="module")
def expected(config, tmp_path_factory) -> dict[str, bytes]:
    """The files that a preparation without an interruption and with one partition writes."""
    folder = tmp_path_factory.mktemp("expected")
    preparation.prepare(config, folder / "out", Folder(str(folder / "work")))
    return contents(folder / "out")


@pytest.fixture
def many_partitions(monkeypatch) -> None:
    monkeypatch.setattr(preparation, "PARTS_OF_PARTITION", 6)


def test_a_driver_killed_once_in_each_phase_continues_to_equal_bytes(config, expected, many_partitions, tmp_path):
    records = {phase: f"done/{phase}-{0 if phase in SINGLE else 1:06}.json" for phase in PHASES}
    deadly = DeadlyFolder(tmp_path / "work", records.values())
    for phase in PHASES:
        driver = FORK.Process(target=preparation.prepare, args=(config, tmp_path / "out", deadly))
        driver.start()
        driver.join()
        assert driver.exitcode == -signal.SIGKILL
        assert (tmp_path / f"killed-in-{Path(records[phase]).stem}").exists()
    finished = {entry.name for entry in deadly.entries() if entry.name.startswith("done/")}

    files = CountingFolder(str(tmp_path / "work"))
    preparation.prepare(config, tmp_path / "out", files)

    assert finished.isdisjoint(name for name, count in files.reports.items() if count)
    assert contents(tmp_path / "out") == expected


def test_a_worker_killed_in_each_phase_changes_no_byte(config, expected, many_partitions, tmp_path):
    phases = [phase for phase in PHASES if phase != "reserve"]  # which has no workers
    files = DeadlyFolder(tmp_path / "work", [f"done/{phase}-000000.json" for phase in phases])

    preparation.prepare(config, tmp_path / "out", files, in_forks)

    killed = {path.name for path in tmp_path.glob("killed-in-*")}
    assert killed == {f"killed-in-{phase}-000000" for phase in phases}
    assert contents(tmp_path / "out") == expected
