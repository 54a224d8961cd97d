"""After a power cut at any moment, what was said to be saved is there, and nothing is there that is not whole."""

import json
from pathlib import Path

import pytest
import torch

from components.platform import artifact_files, artifacts
from infoxlm_core import manifests
from infoxlm_core.training import checkpoints as saving
from infoxlm_core.training import tracker
from infoxlm_core.training.fingerprint import Fingerprint
from tests.helpers import power


@pytest.fixture
def disk(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    with power.recorded(tmp_path / "disk", monkeypatch.setattr) as found:
        yield found


def checkpoints(run: Path) -> saving.Checkpoints:
    return saving.Checkpoints(run, Fingerprint(), every=1, keep=2)


@pytest.mark.item("F04")
def test_checkpoints_and_their_curves(disk, tmp_path, record_property):
    curves = tracker.FileTracker(disk.root / "run/metrics.jsonl")
    for step in range(1, 13):
        curves.log(step, {"loss": 1 / step})
        curves.sync()
        checkpoints(disk.root / "run").save(saving.Checkpoint(step, {"w": torch.full((9,), float(step))}, {}))
        disk.say(step)

    cuts = 0
    for said, left in disk.remains(tmp_path):
        found = checkpoints(left / "run").load_newest()
        assert bool(found) >= bool(said)
        if found:
            assert found.step >= max(said, default=0)
            assert torch.equal(found.tensors["w"], torch.full((9,), float(found.step)))
            assert len(tracker.read(left / "run/metrics.jsonl")) >= found.step
        cuts += 1
    assert cuts > 500
    record_property("figure", f"{cuts} cut points")


def build(output: Path) -> dict:
    for name in ("a", "deep/b"):
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_text(name * 100)
    return {}


@pytest.mark.item("F04")
def test_artifacts_of_a_store(disk, tmp_path, record_property):
    for key in ("1" * 16, "2" * 16):
        artifacts.get_or_build(str(disk.root), "corpus", key, build)
        disk.say(key)

    cuts = 0
    for said, left in disk.remains(tmp_path):
        for key in ("1" * 16, "2" * 16):
            found = artifacts.lookup(str(left), "corpus", key)  # refuses what is not whole
            assert found or key not in said
        cuts += 1
    assert cuts > 30
    record_property("figure", f"{cuts} cut points")


def test_a_copy_of_an_artifact(disk, tmp_path):
    made = artifacts.get_or_build(str(tmp_path / "store"), "corpus", "1" * 16, build)
    artifact_files.pull(str(made), disk.root / "copy")
    disk.say("copy")

    for said, left in disk.remains(tmp_path):
        if said or (left / "copy").exists():
            manifests.read(left / "copy", "corpus", made_with="a copy")


def test_small_files_are_old_or_new(disk, tmp_path):
    for number in range(5):
        manifests.write_atomically(disk.root / "lease.json", json.dumps({"number": number}))
        disk.say(number)

    for said, left in disk.remains(tmp_path):
        if said or (left / "lease.json").exists():
            assert json.loads((left / "lease.json").read_bytes())["number"] >= max(said, default=0)


def test_a_file_that_is_not_synced_before_its_name_is_noticed(disk, tmp_path):
    (disk.root / "new").write_text("text")
    (disk.root / "new").rename(disk.root / "file")
    manifests.sync_file(disk.root)
    disk.say("file")

    assert {(left / "file").read_text() for said, left in disk.remains(tmp_path) if said} == {""}
