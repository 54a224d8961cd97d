"""Read gettext catalogs, the translated messages of programs.

A row consists of a message id and its translation. If the id is symbolic, its English text replaces it.

    msgid "Save the file"  msgstr "Datei speichern"  ->  Row(("en", "de"), ("Save the file", "Datei speichern"), …)
"""

import re
import struct
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from gettext import c2py
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import polib

from infoxlm_core import user_files
from infoxlm_core.corpora import lines
from infoxlm_core.corpora.lines import MAX_LINE, MAX_RATIO, Row
from infoxlm_core.errors import InputError, one_line

MAX_CATALOG = 64 << 20  # bytes
MAX_ENTRIES = 100_000  # files of an archive
MAX_PATH = 4096  # bytes; polib never takes a longer string for a path
NEVER = 9  # rank of locales that are not read
_IS_CATALOG = re.compile(r"[^/]/LC_MESSAGES/[^/]+\.[mp]o$|/[a-z]{2,3}([_@-]\w+)*\.po$")
IDENTIFIER = re.compile(r"[\w.:-]*_[\w.:-]*")  # a symbolic id, such as label_foo

Readers = dict[str, Callable[[], list[polib.POEntry]]]
"""Name of a file in a folder or archive -> function that reads its messages."""


class _Catalog(NamedTuple):
    """The messages of a language."""

    name: str  # of its file
    rank: int  # of its locale
    messages: list[polib.POEntry]


def read(languages: Sequence[str], pivot: str, path: Path) -> Iterator[Row]:
    """Yield a row for each message of each language in a folder, wheel or zip.

    The pivot is the language of the message ids. The line of a row is the number of the message in its catalog.

    Raises:
        InputError: there is no catalog, or a catalog cannot be read.
    """
    readers = _list_catalogs(path)
    domains = _group_by_domain(readers, {*languages, pivot})
    for domain in sorted(domains):
        locales_of_language = domains[domain]
        english = _read_english(locales_of_language.get(pivot, {}), pivot, readers)
        for language in languages:
            if language == pivot:
                continue
            catalog = _choose_catalog(locales_of_language.get(language, {}), language, readers)
            for number, message in enumerate(catalog.messages, start=1):
                english_text = english.get((message.msgctxt, message.msgid))
                source = _find_default_text(message.comment) or english_text or message.msgid
                reason = _find_reason_to_skip(message)
                if reason is None and source == message.msgid and IDENTIFIER.fullmatch(source):
                    reason = "no_source_text"
                yield Row((pivot, language), (source, message.msgstr), catalog.name, number, reason)


def _group_by_domain(names: Iterable[str], languages: set[str]) -> dict[tuple[str, str], dict[str, dict[str, str]]]:
    """Return the catalogs to read: (folder, domain) -> language -> locale -> name of the file."""
    domains: dict[tuple[str, str], dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for name in sorted(names):  # a .po replaces a .mo: it also has fuzzy flags and default texts
        folder, locale, domain = _split_name(name)
        language = re.split("[-_.@]", locale.lower())[0]
        if language in languages and _rank_locale(locale, language) < NEVER:
            domains[folder, domain][language][locale] = name
    return domains


def _read_english(name_by_locale: dict[str, str], pivot: str, readers: Readers) -> dict[tuple[str | None, str], str]:
    """Return the English text of messages with symbolic ids, by context and id. Regional variants are not used."""
    catalog = _choose_catalog(name_by_locale, pivot, readers)
    if catalog.rank > 1:
        return {}
    texts = {}
    for message in catalog.messages:
        if _find_reason_to_skip(message) is None:
            texts[message.msgctxt, message.msgid] = message.msgstr
    return texts


def _choose_catalog(name_by_locale: dict[str, str], language: str, readers: Readers) -> _Catalog:
    """Return the catalog of a language's best locale, with the most translations if several locales are equally good.

    Args:
        name_by_locale: locale -> name of its catalog.
        language: the language of these locales.
        readers: the catalogs of the corpus.
    """
    best_rank = min((_rank_locale(locale, language) for locale in name_by_locale), default=NEVER)
    best_catalog = _Catalog("", best_rank, [])
    most_translations = -1
    for locale, name in name_by_locale.items():
        if _rank_locale(locale, language) != best_rank:
            continue
        messages = readers[name]()
        translation_count = sum(_find_reason_to_skip(message) is None for message in messages)
        if translation_count > most_translations:
            most_translations = translation_count
            best_catalog = _Catalog(name, best_rank, messages)
    return best_catalog


def _list_catalogs(path: Path) -> Readers:
    """Return the name and the reader of each catalog in a folder, wheel or zip. Raise InputError if there is none."""
    files = _list_folder(path) if path.is_dir() else _list_archive(path)
    readers: Readers = {}
    for name, read_content in files:
        readers[name] = partial(_read_messages, path, name, read_content)
    if not readers:
        raise InputError(f"{path} contains no catalog <locale>/LC_MESSAGES/<domain>.po or .mo, nor a <locale>.po")
    return readers


def _list_folder(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield the name of each catalog in a folder and a function that reads its content."""
    for file in user_files.list_tree(path):
        if file.suffix in (".po", ".mo") and _IS_CATALOG.search(f"/{file}"):
            yield str(file.relative_to(path)), partial(user_files.read_bytes, file, MAX_CATALOG)


def _list_archive(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield the name of each catalog in a wheel or zip and a function that reads it. Refuse damaged and huge files."""
    archive = lines.open_zip(path, "a folder, wheel or zip file of gettext catalogs")
    if len(archive.infolist()) > MAX_ENTRIES:
        raise InputError(f"{path} lists {len(archive.infolist()):,} files, more than {MAX_ENTRIES:,}: refused")
    for info in archive.infolist():
        if not _IS_CATALOG.search(f"/{info.filename}"):
            continue
        if info.file_size > min(MAX_CATALOG, MAX_RATIO * info.compress_size + MAX_LINE):
            raise InputError(f"{path}: DecompressionLimit: {info.filename} has {info.file_size} bytes: refused")
        yield info.filename, partial(archive.read, info)


def _split_name(name: str) -> tuple[str, str, str]:
    """Return the folder, locale and domain of `…/<locale>/LC_MESSAGES/<domain>.po`, or of `…/<locale>.po`."""
    *folders, file_name = PurePosixPath(name).parts
    stem = file_name[:-3]  # without .po or .mo
    if len(folders) > 1 and folders[-1] == "LC_MESSAGES":
        return "/".join(folders[:-2]), folders[-2], stem
    return "/".join(folders), stem, ""


def _rank_locale(locale: str, language: str) -> int:
    """Return the rank of a locale, 0 for the best, or `NEVER`. The language `zh` means simplified Chinese."""
    variant = re.sub(r"^[a-z]+[-_.@]?", "", locale.lower())
    if language == "zh":
        return {"hans": 0, "cn": 0, "": 1}.get(variant, NEVER)
    return {"": 0, language: 1, "us": 1}.get(variant, 2)  # de, then de_DE, en_US, then de_Formal, de_AT …


def _read_messages(path: Path, name: str, read_content: Callable[[], bytes]) -> list[polib.POEntry]:
    """Return the messages of the catalog `name` in `path`. `msgstr` of a plural message is its form for n = 1."""
    try:
        content = read_content()
    except (zipfile.BadZipFile, zlib.error, OSError, NotImplementedError, RuntimeError, EOFError) as error:
        raise InputError(f"{path}: {name} cannot be unpacked ({one_line(error)}): fetch the archive again") from None
    try:
        binary = content + b"\0"  # polib opens the file if the content is a path; no path has a zero byte
        if name.endswith(".mo"):
            _check_strings(content)
            catalog = polib.mofile(binary)
        else:
            text = content.decode(polib.detect_encoding(binary, binary_mode=True))
            catalog = polib.pofile(text + "\n" * MAX_PATH)
        plural_rule = re.search(r"plural\s*=([^;]+)", catalog.metadata.get("Plural-Forms", ""))
        singular_form = c2py(plural_rule[1].strip())(1) if plural_rule else 0  # number of the form for n = 1
    except Exception as error:  # polib's parser may raise any exception
        raise InputError(
            f"{path}: {name} is not a readable gettext catalog ({error}): check it with msgfmt -c"
        ) from None
    for message in catalog:
        if message.msgid_plural:
            message.msgstr = message.msgstr_plural.get(singular_form, "")
    return list(catalog)


def _check_strings(content: bytes) -> None:
    """Raise ValueError or struct.error if a .mo file is truncated, which polib does not detect."""
    is_big_endian = content[:4] == b"\x95\x04\x12\xde"
    byte_order = ">" if is_big_endian else "<"
    # The header has the number of strings, and where the tables of the ids and of their translations start.
    count, *table_starts = struct.unpack_from(f"{byte_order}3I", content, 8)
    for start in table_starts:
        for length, offset in struct.iter_unpack(f"{byte_order}2I", content[start : start + 8 * count]):
            if offset + length > len(content):
                raise ValueError(f"its string at byte {offset} ends after the end of the file")


def _find_reason_to_skip(message: polib.POEntry) -> str | None:
    """Return why a message has no usable translation, or None."""
    if message.obsolete:
        return "obsolete"
    if message.flags and "fuzzy" in message.flags:
        return "fuzzy"
    return None if message.msgstr else "empty"


def _find_default_text(comment: str | None) -> str:
    """Return the English text in the comment of a message with a symbolic id: `Default: "…"`, on one or more lines."""
    if not comment or not comment.startswith('Default: "'):
        return ""
    quoted_texts = []
    for line in comment.removeprefix("Default:").splitlines():
        text = line.strip()
        if len(text) > 2 and text[0] == text[-1] == '"':
            quoted_texts.append(text[1:-1])
    return "".join(quoted_texts).replace('\\"', '"')
