"""After a power cut at any moment, everything that was acknowledged exists, and everything that exists is complete."""

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
    with power.recorded(tmp_path / "disk", monkeypatch.setattr) as disk:
        yield disk


def checkpoints(run: Path) -> saving.Checkpoints:
    return saving.Checkpoints(run, Fingerprint(), every=1, keep=2)


@pytest.mark.item("F04")
def test_checkpoints_and_their_curves_survive(disk, tmp_path, record_property):
    curves = tracker.FileTracker(disk.root / "run/metrics.jsonl")
    for step in range(1, 13):
        curves.log(step, {"loss": 1 / step})
        curves.sync()
        checkpoints(disk.root / "run").save(saving.Checkpoint(step, {"w": torch.full((9,), float(step))}, {}))
        disk.acknowledge(step)

    cuts = 0
    for acknowledged, folder in disk.remains(tmp_path):
        newest = checkpoints(folder / "run").load_newest()
        assert bool(newest) >= bool(acknowledged)
        if newest:
            assert newest.step >= max(acknowledged, default=0)
            assert torch.equal(newest.tensors["w"], torch.full((9,), float(newest.step)))
            assert len(tracker.read(folder / "run/metrics.jsonl")) >= newest.step
        cuts += 1
    assert cuts > 500
    record_property("figure", f"{cuts} cut points")


def build(output: Path) -> dict:
    for name in ("a", "deep/b"):
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_text(name * 100)
    return {}


@pytest.mark.item("F04")
def test_artifacts_of_a_store_survive(disk, tmp_path, record_property):
    for key in ("1" * 16, "2" * 16):
        artifacts.get_or_build(str(disk.root), "corpus", key, build)
        disk.acknowledge(key)

    cuts = 0
    for acknowledged, folder in disk.remains(tmp_path):
        for key in ("1" * 16, "2" * 16):
            path = artifacts.lookup(str(folder), "corpus", key)  # refuses an incomplete artifact
            assert path or key not in acknowledged
        cuts += 1
    assert cuts > 30
    record_property("figure", f"{cuts} cut points")


def test_a_copied_artifact_survives(disk, tmp_path):
    made = artifacts.get_or_build(str(tmp_path / "store"), "corpus", "1" * 16, build)
    artifact_files.download(str(made), disk.root / "copy")
    disk.acknowledge("copy")

    for acknowledged, folder in disk.remains(tmp_path):
        if acknowledged or (folder / "copy").exists():
            manifests.load_verified(folder / "copy", "corpus", producer="a copy")


def test_a_small_file_has_its_old_or_its_new_content(disk, tmp_path):
    for number in range(5):
        manifests.write_atomically(disk.root / "lease.json", json.dumps({"number": number}))
        disk.acknowledge(number)

    for acknowledged, folder in disk.remains(tmp_path):
        if acknowledged or (folder / "lease.json").exists():
            assert json.loads((folder / "lease.json").read_bytes())["number"] >= max(acknowledged, default=0)


def test_the_recorder_notices_a_file_that_is_renamed_before_it_is_synced(disk, tmp_path):
    (disk.root / "new").write_text("text")
    (disk.root / "new").rename(disk.root / "file")
    manifests.sync_file(disk.root)
    disk.acknowledge("file")

    contents = {(folder / "file").read_text() for acknowledged, folder in disk.remains(tmp_path) if acknowledged}
    assert contents == {""}
