"""Manifests list exactly the files of an artifact, and files are written completely or not at all."""

import errno
import io
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from infoxlm_core import manifests, user_files
from infoxlm_core.errors import DataCorrupt, InputError


@pytest.mark.item("B11")
@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../a", "a/../../b", "..", "a//b", "a/", "", ".", "./a", "a\0b", "//a"]
)
def test_name_that_leads_out_of_its_directory_is_refused_in_one_line(tmp_path, name):
    with pytest.raises(InputError, match="the file name leads out of its directory") as refusal:
        manifests.join_inside(tmp_path, name)

    assert str(refusal.value).isprintable()


@pytest.mark.item("S10")
def test_manifest_that_names_a_file_outside_its_directory_is_refused(tmp_path):
    (tmp_path / "outside").write_text("x")
    content = {"kind": "corpus", "files": {"../outside": {"size": 1, "sha256": "x"}}, "facts": {}}
    artifact = tmp_path / "artifact"
    artifact.mkdir()
    (artifact / "manifest.json").write_text(json.dumps(content | {"digest": manifests.digest(content)}))

    with pytest.raises(DataCorrupt, match=r"\.\./outside: the file name leads out of its directory"):
        manifests.load_verified(artifact, "corpus", producer="prepare")


@pytest.mark.item("P5")
@pytest.mark.parametrize("name", ["mono/de/more.parquet", ".more.parquet", "model-2.safetensors", "mono/fr"])
def test_artifact_with_a_file_that_its_manifest_does_not_list_is_refused(tmp_path, name):
    (tmp_path / "mono/de").mkdir(parents=True)
    (tmp_path / "mono/de/one.parquet").write_text("x")
    manifests.write(tmp_path, "corpus")
    if name == "mono/fr":
        (tmp_path / name).symlink_to(tmp_path / "mono/de")
    else:
        (tmp_path / name).write_text("y")

    message = rf"/{name} is not listed in .*/manifest\.json: move it out of this directory"
    with pytest.raises(DataCorrupt, match=message):
        manifests.load_verified(tmp_path, "corpus", producer="prepare")


def test_files_that_readers_ignore_may_be_added(tmp_path):
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder/model.safetensors").write_text("x")
    manifests.write(tmp_path / "encoder", "encoder")
    manifests.write(tmp_path, "pretrained")
    for name in ("encoder/README.md", ".manifest.json.lock", ".git/config", ".cache/huggingface/download/x.metadata"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    assert list(manifests.load_verified(tmp_path, "pretrained", producer="pretrain")["files"]) == [
        "encoder/model.safetensors"
    ]


def share_barrier(new_barrier) -> None:
    """Give a process of the pool the barrier at which all processes wait for each other."""
    global barrier
    barrier = new_barrier


def write_repeatedly(path: Path, letter: str) -> None:
    for _ in range(50):
        barrier.wait(timeout=60)
        manifests.write_atomically(path, letter * 10_000)


@pytest.mark.item("P11")
def test_processes_that_write_the_same_file_do_not_disturb_each_other(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(4, spawn, initializer=share_barrier, initargs=(spawn.Barrier(4),)) as pool:
        for writer in [pool.submit(write_repeatedly, tmp_path / "file", letter) for letter in "abcd"]:
            writer.result(timeout=120)

    assert (tmp_path / "file").read_text() in {letter * 10_000 for letter in "abcd"}
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_failed_write_leaves_no_temporary_file(tmp_path):
    (tmp_path / "file").mkdir()

    with pytest.raises(IsADirectoryError):
        manifests.write_atomically(tmp_path / "file", "content")

    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_files_can_be_written_in_directories_that_must_not_be_listed(tmp_path, monkeypatch):
    real_open = os.open
    unreadable_paths = (tmp_path, tmp_path / "directory", tmp_path / "unreadable")  # directories: as with mode 0o711

    def open_or_refuse(path, flags, *arguments, **options) -> int:
        if path in unreadable_paths:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real_open(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", open_or_refuse)

    manifests.make_directory(tmp_path / "directory")
    manifests.write_atomically(tmp_path / "directory/file", "content")

    assert (tmp_path / "directory/file").read_text() == "content"
    with pytest.raises(PermissionError):  # only directories are skipped
        manifests.sync_file(tmp_path / "unreadable")


def test_atomically_written_file_has_the_permissions_of_the_umask(tmp_path):
    previous_umask = os.umask(0o027)
    try:
        manifests.write_atomically(tmp_path / "file", "content")
    finally:
        os.umask(previous_umask)

    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("link_target", [None, "nowhere", "final"])
def test_directory_cannot_be_moved_onto_a_file_or_link(tmp_path, link_target):
    (tmp_path / "new").mkdir()
    final = tmp_path / "final"
    if link_target:
        final.symlink_to(link_target)
    else:
        final.write_text("x")

    with pytest.raises(InputError, match=r"final is not a directory: remove it"):
        manifests.move_into_place(tmp_path / "new", final, manifests.NAME)


@pytest.mark.item("B12")
@pytest.mark.parametrize("unreadable_file", ["a", manifests.NAME])
def test_file_without_read_permission_is_not_reported_as_damaged(tmp_path, monkeypatch, unreadable_file):
    (tmp_path / "a").write_text("x")
    manifests.write(tmp_path, "corpus")
    real_open = io.open

    def open_or_refuse(path, *arguments, **options):
        if path == tmp_path / unreadable_file:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real_open(path, *arguments, **options)

    monkeypatch.setattr(io, "open", open_or_refuse)

    with pytest.raises(InputError, match=f"{unreadable_file}: Permission denied: change its permissions"):
        manifests.load_verified(tmp_path, "corpus", "x")


def test_error_of_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def fail(*_) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)

    with pytest.raises(OSError, match="No space") as failure:
        manifests.write_atomically(tmp_path / "file", "content")

    message = str(user_files.translate_error(failure.value, "s3://elsewhere"))
    assert message.startswith(f"{tmp_path}/file: no space left")
