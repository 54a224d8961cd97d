"""Damage to a valid file: what disks, editors, other programs and people with bad intentions do to it.

`choose(n)` draws a number from 0 to n - 1.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

Choose = Callable[[int], int]

STRANGE = (
    b"", b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\n", b"\r", b"\t", b'"', b"'", b"\\", b"\\ud800", b"<", b"%", b"&",
    b"{{", b"-1", b"0", b"1.5", b"9" * 19, b"9" * 400, b"1e999", b"-1e999", b"NaN", b"null", b"true", b"no", b"[]",
    b"{}", b'"x"', b"!!python/object/apply:os.system", b"&a", b"*a", b"../../x", b"/dev/zero", b"$\\frac{$", b"=1+1",
    "ä\u202e\u2028\ufffe".encode(), b"[" * 3000, b'{"a":' * 3000, b"((((" * 500, b"x" * 70_000,
)  # fmt: skip
VALUES: Sequence[Any] = (
    None, True, False, 0, -1, 1.5, 2**31, 2**53 + 1, 2**63, 10**30, -(10**30), 1e308, float("nan"), float("inf"), "",
    "x", "5", "../../x", "/etc/passwd", "a\0b", "\n", "x" * 5000, "\ud800", [], {}, [[]], [None], {"": None},
    {"a": {"b": 1}}, [1, "x", None], list(range(2000)),
)  # fmt: skip
HUGE = (2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1, 0, 1, 100)
_WORD = re.compile(rb"[\w.+-]+")


def mutate(content: bytes, others: Sequence[bytes], choose: Choose) -> bytes:
    """The content with one to four kinds of damage; `others` are further examples, of which parts come in."""
    for _ in range(1 + choose(4)):
        content = _KINDS[choose(len(_KINDS))](content, others, choose)
    return content[: 1 << 20]


def _span(content: bytes, choose: Choose) -> tuple[int, int]:
    begin = choose(len(content) + 1)
    return begin, min(len(content), begin + 1 + choose(64))


def _flip(content: bytes, others: Sequence[bytes], choose: Choose) -> bytes:
    if not content:
        return content
    at = choose(len(content))
    return content[:at] + bytes([content[at] ^ 1 << choose(8)]) + content[at + 1 :]


def _overwrite(content: bytes, others: Sequence[bytes], choose: Choose) -> bytes:
    begin, end = _span(content, choose)
    return content[:begin] + bytes([choose(256)]) * (end - begin) + content[end:]


def _cut(content: bytes, others: Sequence[bytes], choose: Choose) -> bytes:
    return content[: choose(len(content) + 1)]


def _drop(content: bytes, others: Sequence[bytes], choose: Choose) -> bytes:
    begin, end = _span(content, choose)
    return content[:begin] + content[end:]


def _repeat(content: bytes, others: Sequence[bytes], choose: Choose) -> bytes:
    begin, end = _span(content, choose)
    return content[:end] + content[begin:end] * (1 + choose(100)) + content[end:]


def _insert(content: bytes, others: Sequence[bytes], choose: Choose) -> bytes:
    at = choose(len(content) + 1)
    return content[:at] + STRANGE[choose(len(STRANGE))] + content[at:]


def _replace_word(content: bytes, others: Sequence[bytes], choose: Choose) -> bytes:
    words = list(_WORD.finditer(content, 0, 1 << 16))
    if not words:
        return content
    word = words[choose(len(words))]
    return content[: word.start()] + STRANGE[choose(len(STRANGE))] + content[word.end() :]


def _splice(content: bytes, others: Sequence[bytes], choose: Choose) -> bytes:
    other = others[choose(len(others))] if others else content
    return content[: choose(len(content) + 1)] + other[choose(len(other) + 1) :]


def _huge(content: bytes, others: Sequence[bytes], choose: Choose) -> bytes:
    """A binary number: of entries, of bytes, an offset."""
    at, size = choose(len(content) + 1), (1, 2, 4, 8)[choose(4)]
    value = HUGE[choose(len(HUGE))] % (1 << 8 * size)
    return content[:at] + value.to_bytes(size, ("little", "big")[choose(2)]) + content[at + size :]


def _change_value(content: bytes, others: Sequence[bytes], choose: Choose) -> bytes:
    """JSON that stays JSON: a value of another type or size, or a key that is missing, more or another."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return _replace_word(content, others, choose)
    places: list[tuple[Any, Any]] = []
    _list_places(found, places)
    if not places or not choose(20):
        return json.dumps(VALUES[choose(len(VALUES))]).encode()
    holder, key = places[choose(len(places))]
    match choose(8):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[str(VALUES[choose(len(VALUES))])[:100]] = holder.pop(key)
        case 2:
            source, name = places[choose(len(places))]
            copied = json.dumps(source[name])
            holder[key] = json.loads(copied)
        case 3:
            holder[key] = [holder[key]]
        case _:
            holder[key] = VALUES[choose(len(VALUES))]
    return json.dumps(found).encode()


def _list_places(value: Any, places: list[tuple[Any, Any]]) -> None:
    if len(places) < 500 and isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            _list_places(value[key], places)


_KINDS = (
    _flip, _overwrite, _cut, _drop, _repeat, _insert, _replace_word, _splice, _huge,
    _change_value, _change_value, _change_value,
)  # fmt: skip
