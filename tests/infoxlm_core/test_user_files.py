"""Files of users are checked before they are opened, and their content before it is used."""

import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import TypedDict

from infoxlm_core import user_files
from infoxlm_core.errors import DataCorrupt, EncodingError, InputError, StorageFull, StorageUnavailable


class Sizes(TypedDict):
    """The expected structure of a JSON file."""

    name: str
    sizes: list[int]


@pytest.mark.item("B12")
def test_path_that_is_no_regular_file_is_refused_before_it_is_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    os.mkfifo("pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "directory").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")

        for name, message in (
            ("pipe", "is a named pipe"),
            ("zero", "is a device"),
            ("directory", "is a directory"),
            ("socket", "is a socket"),
            ("loop", "symbolic links form no loop"),
            ("nothing", "no such file"),
            ("a" * 300, "give a shorter name"),
            ("zero\0byte", "no such file"),
        ):
            with pytest.raises(InputError, match=message):
                user_files.read_bytes(tmp_path / name, 10)


@pytest.mark.item("S11")
def test_file_larger_than_the_limit_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 10)

    assert user_files.read_bytes(tmp_path / "a", 10) == b"x" * 10
    with pytest.raises(InputError, match="has 10 bytes, more than 9"):
        user_files.read_bytes(tmp_path / "a", 9)


@pytest.mark.item("B18")
@pytest.mark.parametrize(
    "content",
    [
        *("[]", "{}", "5", "null", '"x"', "{", "", "[" * 9999, '{"a":' * 9999, "\xff"),
        *('{"name": "a", "sizes": [1.5]}', '{"name": 5, "sizes": []}', '{"name": "a", "sizes": true}'),
        '{"name": "a", "sizes": [1]}{',
    ],
)
def test_json_of_unexpected_structure_is_refused_with_file_and_remedy(tmp_path, content):
    (tmp_path / "a.json").write_text(content, encoding="latin-1")

    with pytest.raises(DataCorrupt, match=r"a\.json cannot be read .*: make it again$") as refusal:
        user_files.read_json(tmp_path / "a.json", Sizes, "make it again", DataCorrupt)
    assert len(str(refusal.value)) < 400, "the content of the file is repeated"


def test_valid_json_is_read_exactly_with_extra_keys_where_allowed(tmp_path):
    @user_files.allow_extra_keys
    class Facts(TypedDict):
        facts: dict[str, Any]

    facts = '{"a": 1, "b": 1.0, "c": 0.1, "d": 1e-320, "e": 123456789012345678901234567890, "ü": [null, true]}'
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + f'{{"facts": {facts}, "more": 2}}'.encode())

    content = user_files.read_json(tmp_path / "a.json", Facts, "")

    assert content["more"] == 2
    assert repr(content["facts"]) == (
        "{'a': 1, 'b': 1.0, 'c': 0.1, 'd': 1e-320, 'e': 123456789012345678901234567890, 'ü': [None, True]}"
    )


def test_text_that_is_not_utf_8_is_refused_with_line_and_byte():
    assert user_files.decode(b"\xef\xbb\xbfein\nT\xc3\xa4g", "standard input") == "ein\nTäg"
    with pytest.raises(EncodingError, match="standard input:2:4: not UTF-8"):
        user_files.decode(b"gut\nsch\xe9n", "standard input")


@pytest.mark.item("F10")
@pytest.mark.parametrize(
    ("number", "error_class", "message"),
    [
        (errno.EACCES, InputError, "store/x: Permission denied: change its permissions"),
        (errno.EROFS, InputError, "store/x: Read-only file system: give a path that can be written"),
        (errno.ENOSPC, StorageFull, "no space left"),
        (errno.EDQUOT, StorageFull, "no space left"),
        (errno.EIO, StorageUnavailable, "store/x: the storage fails"),
        (errno.ESTALE, StorageUnavailable, "store/x: the storage fails"),
    ],
)
def test_error_of_the_operating_system_is_translated_with_path_and_remedy(number, error_class, message):
    error = user_files.translate_error(OSError(number, os.strerror(number), "store/x"))

    assert type(error) is error_class
    assert message in str(error)


def test_full_disk_is_recognised_in_the_message_of_a_library():
    error = RuntimeError("(sqlite3.OperationalError) database or disk is full")

    assert isinstance(user_files.translate_error(error, Path("store")), StorageFull)


@pytest.mark.parametrize("error", [ValueError("x"), FileNotFoundError(errno.ENOENT, "No such file", "x"), OSError("x")])
def test_error_that_a_user_cannot_fix_is_not_translated(error):
    assert user_files.translate_error(error) is None
