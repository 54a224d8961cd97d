"""What comes from outside is looked at before it is opened, and has the shape that we expect."""

import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import TypedDict

from infoxlm_core import outside
from infoxlm_core.errors import DataCorrupt, EncodingError, InputError, StorageFull, StorageUnavailable


class Known(TypedDict):
    name: str
    sizes: list[int]


@pytest.mark.item("B12")
def test_what_would_be_waited_for_or_never_ends_is_refused_before_it_is_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    os.mkfifo("pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    (tmp_path / "round").symlink_to("round")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")

        for name, said in (
            ("pipe", "is a named pipe"),
            ("zero", "is a device"),
            ("folder", "is a folder"),
            ("socket", "is a socket"),
            ("round", "symbolic links form no loop"),
            ("nothing", "no such file"),
            ("a" * 300, "give a shorter name"),
            ("zero\0byte", "no such file"),
        ):
            with pytest.raises(InputError, match=said):
                outside.read_bytes(tmp_path / name, 10)


@pytest.mark.item("S11")
def test_a_file_is_read_up_to_its_limit_and_not_beyond(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 10)

    assert outside.read_bytes(tmp_path / "a", 10) == b"x" * 10
    with pytest.raises(InputError, match="has 10 bytes, more than 9"):
        outside.read_bytes(tmp_path / "a", 9)


@pytest.mark.item("B18")
@pytest.mark.parametrize(
    "content",
    [
        *("[]", "{}", "5", "null", '"x"', "{", "", "[" * 9999, '{"a":' * 9999, "\xff"),
        *('{"name": "a", "sizes": [1.5]}', '{"name": 5, "sizes": []}', '{"name": "a", "sizes": true}'),
        '{"name": "a", "sizes": [1]}{',
    ],
)
def test_json_of_another_shape_is_one_error_of_ours_that_names_file_and_remedy(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content, encoding="latin-1")

    with pytest.raises(DataCorrupt, match=r"a\.json cannot be read .*: make it again$") as refusal:
        outside.read_json(path, Known, "make it again", DataCorrupt)
    assert len(str(refusal.value)) < 400, "what was found is not repeated"


def test_json_of_the_right_shape_is_read_as_it_is_and_what_is_more_is_kept_where_asked(tmp_path):
    @outside.allow_extra_keys
    class Open(TypedDict):
        facts: dict[str, Any]

    facts = '{"a": 1, "b": 1.0, "c": 0.1, "d": 1e-320, "e": 123456789012345678901234567890, "ü": [null, true]}'
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + f'{{"facts": {facts}, "more": 2}}'.encode())

    found = outside.read_json(tmp_path / "a.json", Open, "")

    assert found["more"] == 2
    assert repr(found["facts"]) == (
        "{'a': 1, 'b': 1.0, 'c': 0.1, 'd': 1e-320, 'e': 123456789012345678901234567890, 'ü': [None, True]}"
    )


def test_text_that_is_not_utf_8_is_refused_with_line_and_byte_whatever_the_locale_says():
    assert outside.decode(b"\xef\xbb\xbfein\nT\xc3\xa4g", "standard input") == "ein\nTäg"
    with pytest.raises(EncodingError, match="standard input:2:4: not UTF-8"):
        outside.decode(b"gut\nsch\xe9n", "standard input")


@pytest.mark.item("F10")
@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (errno.EACCES, InputError, "store/x: Permission denied: change its permissions"),
        (errno.EROFS, InputError, "store/x: Read-only file system: give a path that can be written"),
        (errno.ENAMETOOLONG, InputError, "File name too long: give a shorter name"),
        (errno.ENOSPC, StorageFull, "no space left"),
        (errno.EDQUOT, StorageFull, "no space left"),
        (errno.EIO, StorageUnavailable, "store/x: the storage fails"),
        (errno.ESTALE, StorageUnavailable, "store/x: the storage fails"),
    ],
)
def test_what_the_operating_system_says_names_the_path_and_the_remedy(number, kind, said):
    found = outside.translate_error(OSError(number, os.strerror(number), "store/x"))

    assert type(found) is kind and said in str(found)


def test_a_fault_of_our_own_is_no_error_of_the_operating_system():
    for error in (ValueError("x"), KeyError("x"), FileNotFoundError(errno.ENOENT, "No such file", "x"), OSError("x")):
        assert outside.translate_error(error) is None


def test_a_full_disk_is_known_by_what_a_library_made_of_it():
    said = "(sqlite3.OperationalError) database or disk is full"

    assert isinstance(outside.translate_error(RuntimeError(said), Path("store")), StorageFull)
