"""Read gettext catalogs, the translated messages of programs.

A row is a message id (or the English text behind a symbolic id) and its translation:

    msgid "Save the file"  msgstr "Datei speichern"  ->  Row(("en", "de"), ("Save the file", "Datei speichern"), …)
"""

import re
import struct
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from gettext import c2py
from pathlib import Path, PurePosixPath

import polib

from infoxlm_core import outside
from infoxlm_core.corpora.lines import MAX_LINE, MAX_RATIO, Row
from infoxlm_core.errors import InputError, one_line

MAX_CATALOG = 64 << 20  # bytes
MAX_ENTRIES = 100_000  # files of an archive
MAX_PATH = 4096  # bytes; a longer string is never taken for a path
NEVER = 9  # rank of locales that are not read
_IS_CATALOG = re.compile(r"[^/]/LC_MESSAGES/[^/]+\.[mp]o$|/[a-z]{2,3}([_@-]\w+)*\.po$")
IDENTIFIER = re.compile(r"[\w.:-]*_[\w.:-]*")  # such as label_foo: a key, not English text

Members = dict[str, Callable[[], bytes]]  # name of a file in a folder or archive -> function that reads it


def read(languages: Sequence[str], pivot: str, path: Path) -> Iterator[Row]:
    """Yield a row for each message of each language in a folder, wheel or zip; its line is the number of the message.

    The pivot is the language of the message ids.

    Raises:
        InputError: there is no catalog, or a catalog cannot be read.
    """
    members = _catalogs(path)
    domains = _group_by_domain(members, {*languages, pivot})
    for domain in sorted(domains):
        locales_of_language = domains[domain]
        english = _read_english(locales_of_language.get(pivot, {}), pivot, members, path)
        for language in languages:
            if language == pivot:
                continue
            entries, _, name = _choose(locales_of_language.get(language, {}), language, members, path)
            for number, entry in enumerate(entries, start=1):
                source = _default_text(entry.comment) or english.get((entry.msgctxt, entry.msgid)) or entry.msgid
                reason = _reason_to_skip(entry)
                if reason is None and source == entry.msgid and IDENTIFIER.fullmatch(source):
                    reason = "no_source_text"
                yield Row((pivot, language), (source, entry.msgstr), name, number, reason)


def _group_by_domain(members: Members, languages: set[str]) -> dict[tuple[str, str], dict[str, dict[str, str]]]:
    """Return the files to read: (folder, domain) -> language -> locale -> name."""
    domains: dict[tuple[str, str], dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for name in sorted(members):  # a .po replaces a .mo: it also has fuzzy flags and default texts
        folder, locale, domain = _split_name(name)
        language = re.split("[-_.@]", locale.lower())[0]
        if language in languages and _rank(locale, language) < NEVER:
            domains[folder, domain][language][locale] = name
    return domains


def _read_english(
    variants: dict[str, str], pivot: str, members: Members, path: Path
) -> dict[tuple[str | None, str], str]:
    """Return the pivot's own text of messages with symbolic ids, by context and id; none from regional variants."""
    entries, rank, _ = _choose(variants, pivot, members, path)
    if rank > 1:
        return {}
    return {(entry.msgctxt, entry.msgid): entry.msgstr for entry in entries if _reason_to_skip(entry) is None}


def _choose(
    variants: dict[str, str], language: str, members: Members, path: Path
) -> tuple[list[polib.POEntry], int, str]:
    """Return messages, rank and file of a language's best locale; of several, the one with most translations."""
    best = min((_rank(locale, language) for locale in variants), default=NEVER)
    chosen = [name for locale, name in variants.items() if _rank(locale, language) == best]
    candidates = [(_read_messages(name, members, path), name) for name in chosen]
    if not candidates:
        return [], best, ""
    entries, name = max(candidates, key=lambda candidate: sum(_reason_to_skip(entry) is None for entry in candidate[0]))
    return entries, best, name


def _catalogs(path: Path) -> Members:
    """Return name and reader of every catalog `…/<locale>/LC_MESSAGES/<domain>.po` in a folder, wheel or zip."""
    if path.is_dir():
        files = (p for p in outside.list_tree(path) if p.suffix in (".po", ".mo") and _IS_CATALOG.search(f"/{p}"))
        members: Members = {str(p.relative_to(path)): partial(outside.read_bytes, p, MAX_CATALOG) for p in files}
    else:
        try:
            archive = zipfile.ZipFile(outside.check_readable(path))
        except (zipfile.BadZipFile, OSError, NotImplementedError, ValueError) as error:  # another version, bad names
            raise InputError(f"{path} is no folder, wheel or zip of gettext catalogs ({error})") from None
        if len(archive.infolist()) > MAX_ENTRIES:
            raise InputError(f"{path} lists {len(archive.infolist()):,} files, more than {MAX_ENTRIES:,}: refused")
        infos = [info for info in archive.infolist() if _IS_CATALOG.search(f"/{info.filename}")]
        for info in infos:
            if info.file_size > min(MAX_CATALOG, MAX_RATIO * info.compress_size + MAX_LINE):
                raise InputError(f"{path}: DecompressionLimit: {info.filename} has {info.file_size} bytes: refused")
        members = {info.filename: partial(archive.read, info) for info in infos}
    if not members:
        raise InputError(f"{path} holds no catalog <locale>/LC_MESSAGES/<domain>.po or .mo, nor a <locale>.po")
    return members


def _split_name(name: str) -> tuple[str, str, str]:
    """Return folder, locale and domain of `…/<locale>/LC_MESSAGES/<domain>.po`, or of `…/<locale>.po`."""
    *folder, last = PurePosixPath(name).parts
    if len(folder) > 1 and folder[-1] == "LC_MESSAGES":
        return "/".join(folder[:-2]), folder[-2], last[:-3]
    return "/".join(folder), last[:-3], ""


def _rank(locale: str, language: str) -> int:
    """Return the rank of a locale of a language; NEVER excludes it. `zh` means simplified characters."""
    variant = re.sub(r"^[a-z]+[-_.@]?", "", locale.lower())
    if language == "zh":
        return {"hans": 0, "cn": 0, "": 1}.get(variant, NEVER)
    return {"": 0, language: 1, "us": 1}.get(variant, 2)  # de, then de_DE, en_US, then de_Formal, de_AT …


def _read_messages(name: str, members: Members, path: Path) -> list[polib.POEntry]:
    """Return the messages of one catalog; `msgstr` of a plural message is its form for n = 1."""
    content = _read_member(name, members, path)
    try:
        binary = content + b"\0"  # polib opens the file if the content is a path; no path has a zero byte
        if name.endswith(".mo"):
            _check_strings(content)
            catalog = polib.mofile(binary)
        else:
            text = content.decode(polib.detect_encoding(binary, binary_mode=True))
            catalog = polib.pofile(text + "\n" * MAX_PATH)
        rule = re.search(r"plural\s*=([^;]+)", catalog.metadata.get("Plural-Forms", ""))
        singular = c2py(rule[1].strip())(1) if rule else 0
    except Exception as error:  # polib's parser may raise any exception
        raise InputError(
            f"{path}: {name} is not a readable gettext catalog ({error}): check it with msgfmt -c"
        ) from None
    for entry in catalog:
        if entry.msgid_plural:
            entry.msgstr = entry.msgstr_plural.get(singular, "")
    return list(catalog)


def _check_strings(content: bytes) -> None:
    """Raise ValueError or struct.error if a .mo ends within its strings; polib would silently truncate them."""
    order = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}.get(content[:4], "<")
    count, *starts = struct.unpack_from(f"{order}3I", content, 8)
    for start in starts:
        for length, offset in struct.iter_unpack(f"{order}2I", content[start : start + 8 * count]):
            if offset + length > len(content):
                raise ValueError(f"its string at byte {offset} ends after the end of the file")


def _read_member(name: str, members: Members, path: Path) -> bytes:
    try:
        return members[name]()
    except (zipfile.BadZipFile, zlib.error, OSError, NotImplementedError, RuntimeError, EOFError) as error:
        raise InputError(f"{path}: {name} cannot be unpacked ({one_line(error)}): fetch the archive again") from None


def _reason_to_skip(entry: polib.POEntry) -> str | None:
    """Return why a message has no usable translation, or None."""
    if entry.obsolete or "fuzzy" in (entry.flags or ()):
        return "obsolete" if entry.obsolete else "fuzzy"
    return None if entry.msgstr else "empty"


def _default_text(comment: str | None) -> str:
    """Return the English text in the comment of a message with a symbolic id: `Default: "…"`, on several lines."""
    if not comment or not comment.startswith('Default: "'):
        return ""
    lines = [line.strip() for line in comment.removeprefix("Default:").splitlines()]
    return "".join(line[1:-1] for line in lines if len(line) > 2 and line[0] == line[-1] == '"').replace('\\"', '"')
