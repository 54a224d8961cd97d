"""What was tried by hand against every reader ends as it should: read, or refused in one line of the right class."""

import errno
import functools
import os
from pathlib import Path

import pytest

from infoxlm_core import outside
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
def test_an_attack_ends_in_one_line_of_the_right_class(target, tmp_path):
    (valid, *_), wrong = TARGETS[target].examples(tmp_path), []
    for row in (row for row in ATTACKS if row.target == target):
        found = attack(target, tmp_path, row.content(valid) if callable(row.content) else row.content)
        if type(found) is not (row.error or type(None)) or row.word not in str(found or ""):
            wrong.append(f"{row.name}: {type(found).__name__}: {found}, not {row.error}: {row.word}")

    assert not wrong
    assert attack(target, tmp_path, valid) is None


def _corpus(kind: str, path: Path) -> list:
    source = CorpusSource.parse(
        {"name": "x", "format": kind, "path": str(path), "languages": ["de"] * (kind == "text")}
    )
    return list(formats.read(source, ["en", "de"], "en", [path]))


READERS = {
    **{
        kind: lambda path, kind=kind: _corpus(kind, path)
        for kind in ("text", "tmx", "xliff", "jsonl", "parquet", "gettext")
    },
    "labelled": lambda path: read_labelled(ClassificationConfig(data=str(path)), None),
    "questions": lambda path: read_training([str(path)]),
    "config": load,
    "fairseq": lambda path: fairseq.convert(path, path.parent / "new"),
}
NAMES = {"labelled": "x-en.csv", "questions": "x.en.json", "config": "x.yaml", "fairseq": "x.pt", "gettext": "x.whl"}


@pytest.mark.parametrize("reader", READERS)
def test_what_never_ends_or_is_no_file_is_refused_before_it_is_opened(reader, tmp_path):
    path = tmp_path / NAMES.get(reader, "x.txt")
    for kind in ("pipe", "device", "round", "nothing"):
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind != "nothing":
            path.symlink_to({"device": "/dev/zero", "round": path.name}[kind])
        with pytest.raises(InputError):
            READERS[reader](path)


FOLDERS = {
    "gettext": lambda path: _corpus("gettext", path),
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
@pytest.mark.parametrize("reader", FOLDERS)
def test_a_folder_that_may_not_be_listed_is_not_taken_for_an_empty_one(reader, tmp_path, monkeypatch):
    for name in ("de/LC_MESSAGES/x.po", "train-en.tsv", "locked/x.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(po())
    for name in ("scandir", "listdir"):  # root, as whom tests may run, may list any
        monkeypatch.setattr(os, name, functools.partial(_unless_locked, getattr(os, name)))

    with pytest.raises((InputError, PermissionError), match=r"locked.*Permission denied|Permission denied.*locked"):
        FOLDERS[reader](tmp_path)
    assert outside.list_tree(tmp_path / "x.txt") == outside.list_tree(Path("a\0b")) == []


def _unless_locked(list_it, path="."):
    if Path(path).name == "locked":
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return list_it(path)
