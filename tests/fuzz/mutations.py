"""Damage a valid file as disks, editors, other programs and attackers do.

`choose(n)` draws a number from 0 to n - 1. `examples` are valid contents, of which some mutations insert parts.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

Choose = Callable[[int], int]

STRANGE_TEXTS = (
    b"", b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\n", b"\r", b"\t", b'"', b"'", b"\\", b"\\ud800", b"<", b"%", b"&",
    b"{{", b"-1", b"0", b"1.5", b"9" * 19, b"9" * 400, b"1e999", b"-1e999", b"NaN", b"null", b"true", b"no", b"[]",
    b"{}", b'"x"', b"!!python/object/apply:os.system", b"&a", b"*a", b"../../x", b"/dev/zero", b"$\\frac{$", b"=1+1",
    "ä\u202e\u2028\ufffe".encode(), b"[" * 3000, b'{"a":' * 3000, b"((((" * 500, b"x" * 70_000,
)  # fmt: skip
STRANGE_VALUES: Sequence[Any] = (
    None, True, False, 0, -1, 1.5, 2**31, 2**53 + 1, 2**63, 10**30, -(10**30), 1e308, float("nan"), float("inf"), "",
    "x", "5", "../../x", "/etc/passwd", "a\0b", "\n", "x" * 5000, "\ud800", [], {}, [[]], [None], {"": None},
    {"a": {"b": 1}}, [1, "x", None], list(range(2000)),
)  # fmt: skip
LARGE_NUMBERS = (2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1, 0, 1, 100)
_WORD = re.compile(rb"[\w.+-]+")


def mutate(content: bytes, examples: Sequence[bytes], choose: Choose) -> bytes:
    """Return the content with one to four kinds of damage, of which some insert parts of the other examples."""
    for _ in range(1 + choose(4)):
        mutation = _MUTATIONS[choose(len(_MUTATIONS))]
        content = mutation(content, examples, choose)
    return content[: 1 << 20]


def _choose_span(content: bytes, choose: Choose) -> tuple[int, int]:
    """Return the begin and the end of a random part of the content, of at most 64 bytes."""
    begin = choose(len(content) + 1)
    return begin, min(len(content), begin + 1 + choose(64))


def _flip(content: bytes, examples: Sequence[bytes], choose: Choose) -> bytes:
    if not content:
        return content
    index = choose(len(content))
    return content[:index] + bytes([content[index] ^ 1 << choose(8)]) + content[index + 1 :]


def _overwrite(content: bytes, examples: Sequence[bytes], choose: Choose) -> bytes:
    begin, end = _choose_span(content, choose)
    return content[:begin] + bytes([choose(256)]) * (end - begin) + content[end:]


def _cut(content: bytes, examples: Sequence[bytes], choose: Choose) -> bytes:
    return content[: choose(len(content) + 1)]


def _drop(content: bytes, examples: Sequence[bytes], choose: Choose) -> bytes:
    begin, end = _choose_span(content, choose)
    return content[:begin] + content[end:]


def _repeat(content: bytes, examples: Sequence[bytes], choose: Choose) -> bytes:
    begin, end = _choose_span(content, choose)
    return content[:end] + content[begin:end] * (1 + choose(100)) + content[end:]


def _insert(content: bytes, examples: Sequence[bytes], choose: Choose) -> bytes:
    index = choose(len(content) + 1)
    return content[:index] + STRANGE_TEXTS[choose(len(STRANGE_TEXTS))] + content[index:]


def _replace_word(content: bytes, examples: Sequence[bytes], choose: Choose) -> bytes:
    words = list(_WORD.finditer(content, 0, 1 << 16))
    if not words:
        return content
    word = words[choose(len(words))]
    return content[: word.start()] + STRANGE_TEXTS[choose(len(STRANGE_TEXTS))] + content[word.end() :]


def _splice(content: bytes, examples: Sequence[bytes], choose: Choose) -> bytes:
    example = examples[choose(len(examples))] if examples else content
    return content[: choose(len(content) + 1)] + example[choose(len(example) + 1) :]


def _write_large_number(content: bytes, examples: Sequence[bytes], choose: Choose) -> bytes:
    """Overwrite bytes with a large binary number, which a reader may take for a size or an offset."""
    index = choose(len(content) + 1)
    size = (1, 2, 4, 8)[choose(4)]
    value = LARGE_NUMBERS[choose(len(LARGE_NUMBERS))] % (1 << 8 * size)
    return content[:index] + value.to_bytes(size, ("little", "big")[choose(2)]) + content[index + size :]


def _change_value(content: bytes, examples: Sequence[bytes], choose: Choose) -> bytes:
    """Change, delete, rename, copy or wrap one value of a JSON document. Replace a word if it is not JSON."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return _replace_word(content, examples, choose)
    entries: list[tuple[Any, Any]] = []
    _collect_entries(document, entries)
    if not entries or not choose(20):
        return json.dumps(STRANGE_VALUES[choose(len(STRANGE_VALUES))]).encode()
    container, key = entries[choose(len(entries))]
    match choose(8):
        case 0:
            del container[key]
        case 1 if isinstance(container, dict):
            container[str(STRANGE_VALUES[choose(len(STRANGE_VALUES))])[:100]] = container.pop(key)
        case 2:
            source, source_key = entries[choose(len(entries))]
            copied = json.dumps(source[source_key])
            container[key] = json.loads(copied)
        case 3:
            container[key] = [container[key]]
        case _:
            container[key] = STRANGE_VALUES[choose(len(STRANGE_VALUES))]
    return json.dumps(document).encode()


def _collect_entries(value: Any, entries: list[tuple[Any, Any]]) -> None:
    """Append (container, key) for the values of a JSON document at all levels, up to 500 of them."""
    if len(entries) < 500 and isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            entries.append((value, key))
            _collect_entries(value[key], entries)


_MUTATIONS = (
    _flip, _overwrite, _cut, _drop, _repeat, _insert, _replace_word, _splice, _write_large_number,
    _change_value, _change_value, _change_value,
)  # fmt: skip
