"""Manifests: names that stay inside, and files that appear whole."""

import errno
import io
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from infoxlm_core import manifests, outside
from infoxlm_core.errors import DataCorrupt, InputError

LEADING_OUT = ["/etc/passwd", "../a", "a/../../b", "..", "a//b", "a/", "", ".", "./a", "a\0b", "//a"]


@pytest.mark.item("B11")
@pytest.mark.parametrize("name", LEADING_OUT)
def test_a_name_from_outside_that_leads_out_of_its_folder_is_refused_in_one_line(tmp_path, name):
    with pytest.raises(InputError, match="the file name leads out of its folder") as refused:
        manifests.join_inside(tmp_path, name)

    assert str(refused.value).isprintable()


@pytest.mark.item("S10")
def test_a_manifest_that_names_a_file_outside_its_directory_is_refused(tmp_path):
    (tmp_path / "outside").write_text("x")
    (tmp_path / "it").mkdir()
    (tmp_path / "it/inside").write_text("x")
    written = manifests.write(tmp_path / "it", "corpus")
    files = {"../outside": written["files"]["inside"]}
    content = {"kind": "corpus", "files": files, "facts": {}}
    (tmp_path / "it/manifest.json").write_text(json.dumps(content | {"digest": manifests.digest(content)}))

    with pytest.raises(DataCorrupt, match=r"\.\./outside: the file name leads out of its folder"):
        manifests.read(tmp_path / "it", "corpus", producer="prepare")


@pytest.mark.item("P5")
@pytest.mark.parametrize("name", ["mono/de/more.parquet", ".more.parquet", "model-2.safetensors", "mono/fr"])
def test_what_is_put_beside_the_named_files_is_refused_before_a_reader_takes_it_in(tmp_path, name):
    artifact = tmp_path / "it"
    (artifact / "mono/de").mkdir(parents=True)
    (artifact / "mono/de/one.parquet").write_text("x")
    manifests.write(artifact, "corpus")
    if name == "mono/fr":
        (artifact / name).symlink_to(artifact / "mono/de")
    else:
        (artifact / name).write_text("y")

    with pytest.raises(
        DataCorrupt, match=rf"/{name} is not listed in .*/manifest\.json: move it out of this directory"
    ):
        manifests.read(artifact, "corpus", producer="prepare")


def test_what_no_reader_looks_at_may_lie_beside(tmp_path):
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder/model.safetensors").write_text("x")
    manifests.write(tmp_path / "encoder", "encoder")
    manifests.write(tmp_path, "pretrained")
    for name in ("encoder/README.md", ".manifest.json.lock", ".git/config", ".cache/huggingface/download/x.metadata"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    assert list(manifests.read(tmp_path, "pretrained", producer="pretrain")["files"]) == ["encoder/model.safetensors"]


def _meet(barrier) -> None:
    global together
    together = barrier


def _write(path: Path, letter: str) -> None:
    for _ in range(50):
        together.wait(timeout=60)
        manifests.write_atomically(path, letter * 10_000)


@pytest.mark.item("P11")
def test_processes_that_write_a_file_at_once_do_not_disturb_each_other(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(4, spawn, initializer=_meet, initargs=(spawn.Barrier(4),)) as pool:
        for written in [pool.submit(_write, tmp_path / "file", letter) for letter in "abcd"]:
            written.result(timeout=120)

    assert (tmp_path / "file").read_text() in {letter * 10_000 for letter in "abcd"}
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_could_not_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "file").mkdir()

    with pytest.raises(IsADirectoryError):
        manifests.write_atomically(tmp_path / "file", "content")

    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_may_be_entered_and_not_listed_may_hold_ours(tmp_path, monkeypatch):
    opened = os.open

    def refusing(path, flags, *more, **named) -> int:  # as a folder of mode 0o711 does to all but root
        if path in (tmp_path, tmp_path / "unreadable"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refusing)

    manifests.make_folder(tmp_path / "store/runs")
    manifests.write_atomically(tmp_path / "unreadable", "content")

    assert (tmp_path / "store/runs").is_dir()
    with pytest.raises(PermissionError):
        manifests.sync_file(tmp_path / "unreadable")  # of a file nothing is left out


def test_a_file_written_atomically_may_be_read_by_whom_the_umask_lets(tmp_path):
    before = os.umask(0o027)
    try:
        manifests.write_atomically(tmp_path / "file", "content")
    finally:
        os.umask(before)

    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("kind", ["file", "link", "round"])
def test_a_name_that_is_taken_by_no_folder_of_ours_is_said_to_be_in_the_way(tmp_path, kind):
    (tmp_path / "new").mkdir()
    final = tmp_path / "final"
    final.write_text("x") if kind == "file" else final.symlink_to({"link": "nowhere", "round": "final"}[kind])

    with pytest.raises(InputError, match=r"final is not a folder: remove it"):
        manifests.move_into_place(tmp_path / "new", final, manifests.NAME)


@pytest.mark.item("B12")
@pytest.mark.parametrize("file", ["a", manifests.NAME])
def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch, file):
    (tmp_path / "a").write_text("x")
    manifests.write(tmp_path, "corpus")
    opened = io.open

    def refusing(path, *more, **named):
        if path == tmp_path / file:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *more, **named)

    monkeypatch.setattr(io, "open", refusing)

    with pytest.raises(InputError, match=f"{file}: Permission denied: change its permissions"):
        manifests.read(tmp_path, "corpus", "x")


def test_a_full_disk_is_named_by_the_file_that_was_written(tmp_path, monkeypatch):
    def full(*_) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(OSError, match="No space") as said:
        manifests.write_atomically(tmp_path / "file", "content")

    assert str(outside.translate_error(said.value, "s3://elsewhere")).startswith(f"{tmp_path}/file: no space left")
