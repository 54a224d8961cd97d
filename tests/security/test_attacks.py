"""Each hand-written attack on a reader ends as expected: it is read, or refused in one line with the right error."""

import errno
import functools
import os
from pathlib import Path

import pytest

from infoxlm_core import user_files
from infoxlm_core.config import CorpusSource, PreparationConfig
from infoxlm_core.corpora import evaluation_sets, formats
from infoxlm_core.errors import InputError
from infoxlm_core.model.huggingface import fairseq
from infoxlm_core.run_file import load
from infoxlm_core.stages import preparation
from infoxlm_core.tasks.classification.files import find_labelled_files
from infoxlm_core.tasks.classification.table import read_labelled
from infoxlm_core.tasks.classification.task import ClassificationConfig
from infoxlm_core.tasks.named_entities.files import find_tagged_files
from infoxlm_core.tasks.question_answering.files import read_training
from infoxlm_core.training.fingerprint import digest_inputs
from tests.fuzz.targets import TARGETS, attack
from tests.security.attacks import ATTACKS, po


@pytest.mark.item("B18", "S11")
@pytest.mark.parametrize("target", sorted({row.target for row in ATTACKS}))
def test_every_attack_on_a_reader_ends_as_expected(target, tmp_path):
    valid_content, *_ = TARGETS[target].examples(tmp_path)
    failures = []
    for row in ATTACKS:
        if row.target != target:
            continue
        content = row.content(valid_content) if callable(row.content) else row.content
        error = attack(target, tmp_path, content)
        expected_type = row.error or type(None)
        if type(error) is not expected_type or row.word not in str(error or ""):
            failures.append(f"{row.name}: {type(error).__name__}: {error}, expected {row.error}: {row.word}")

    assert failures == []
    assert attack(target, tmp_path, valid_content) is None


def read_corpus(kind: str, path: Path) -> list:
    source = CorpusSource.parse(
        {"name": "x", "format": kind, "path": str(path), "languages": ["de"] * (kind == "text")}
    )
    return list(formats.read_rows(source, ["en", "de"], "en", [path]))


READERS = {
    **{
        kind: lambda path, kind=kind: read_corpus(kind, path)
        for kind in ("text", "tmx", "xliff", "jsonl", "parquet", "gettext")
    },
    "labelled": lambda path: read_labelled(ClassificationConfig(data=str(path)), None),
    "questions": lambda path: read_training([str(path)]),
    "config": load,
    "fairseq": lambda path: fairseq.convert(path, path.parent / "new"),
}
FILE_NAMES = {
    "labelled": "x-en.csv",
    "questions": "x.en.json",
    "config": "x.yaml",
    "fairseq": "x.pt",
    "gettext": "x.whl",
}


@pytest.mark.parametrize("reader", READERS)
def test_pipes_devices_and_missing_files_are_refused_before_they_are_opened(reader, tmp_path):
    path = tmp_path / FILE_NAMES.get(reader, "x.txt")
    for kind in ("pipe", "device", "link to itself", "missing"):
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "link to itself":
            path.symlink_to(path.name)
        with pytest.raises(InputError):
            READERS[reader](path)


FOLDER_READERS = {
    "gettext": lambda path: read_corpus("gettext", path),
    "digest of a corpus": lambda path: preparation.digest_sources(
        PreparationConfig.parse(
            {"languages": ["en"], "corpora": [{"name": "x", "format": "gettext", "path": str(path)}]}
        )
    ),
    "test sets": evaluation_sets.list_files,
    "labelled": find_labelled_files,
    "questions": lambda path: read_training([str(path / "locked")]),
    "named entities": find_tagged_files,
    "digest of data": lambda path: digest_inputs([str(path)]),
}


@pytest.mark.item("B12")
@pytest.mark.parametrize("reader", FOLDER_READERS)
def test_a_folder_without_permission_is_not_treated_as_empty(reader, tmp_path, monkeypatch):
    for name in ("de/LC_MESSAGES/x.po", "train-en.tsv", "locked/x.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(po())
    for name in ("scandir", "listdir"):  # permissions of files do not stop root, who may run the tests
        monkeypatch.setattr(os, name, functools.partial(list_unless_locked, getattr(os, name)))

    with pytest.raises((InputError, PermissionError), match=r"locked.*Permission denied|Permission denied.*locked"):
        FOLDER_READERS[reader](tmp_path)
    assert user_files.list_tree(tmp_path / "x.txt") == user_files.list_tree(Path("a\0b")) == []


def list_unless_locked(list_folder, path="."):
    if Path(path).name == "locked":
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return list_folder(path)
