"""Read translated program messages from gettext catalogs.

A row consists of a message id and its translation. English text replaces symbolic ids. If the pivot is another language
with a catalog of its own, the pivot's translations replace the ids.

    msgid "Save the file"  msgstr "Datei speichern"  ->  Row(("en", "de"), ("Save the file", "Datei speichern"), …)
"""

import re
import struct
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from gettext import c2py
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import polib

from infoxlm_core import user_files
from infoxlm_core.corpora import lines
from infoxlm_core.corpora.lines import Row, limit_unpacked_bytes
from infoxlm_core.errors import InputError, one_line

MAX_CATALOG = 64 << 20  # bytes
MAX_ENTRIES = 100_000  # files in an archive
MAX_PATH = 4096  # bytes of the longest path
LANGUAGE_OF_IDS = "en"  # by convention; some projects have symbolic ids, and a few have ids in another language
LAST_MAIN_RANK = 1  # locales with higher ranks are regional variants
NEVER = 9  # rank of locales to skip
_IS_CATALOG = re.compile(r"[^/]/LC_MESSAGES/[^/]+\.[mp]o$|/[a-z]{2,3}([_@-]\w+)*\.po$")
_OTHER_LINE_BOUNDARIES = re.compile("[\v\f\x1c-\x1e\x85\u2028\u2029]")
IDENTIFIER = re.compile(r"[\w.:-]*_[\w.:-]*")  # a symbolic id, such as label_foo


class _Catalog(NamedTuple):
    """Messages of a catalog file."""

    name: str  # file name
    rank: int  # rank of the locale
    messages: list[polib.POEntry]


class _CatalogFiles:
    """Lists and reads the catalog files in a directory, wheel or zip file.

    Raises:
        InputError: no catalog exists, or the archive is damaged or too large.
    """

    def __init__(self, path: Path):
        self.path = path
        self.archive: zipfile.ZipFile | None = None
        if path.is_dir():
            self.names = _list_catalogs_in_directory(path)
        else:
            self.archive = lines.open_zip(path, expected_kind="a directory, wheel or zip file of gettext catalogs")
            self.names = _list_catalogs_in_archive(self.archive, path)
        if not self.names:
            raise InputError(f"{path} contains no catalog <locale>/LC_MESSAGES/<domain>.po or .mo, nor a <locale>.po")

    def read_messages(self, name: str) -> list[polib.POEntry]:
        """Return a catalog's messages. For plural messages, `msgstr` is set to the form for n = 1."""
        content = self._read_content(name)
        try:
            catalog = _parse_catalog(content, name)
            plural_rule = re.search(r"plural\s*=([^;]+)", catalog.metadata.get("Plural-Forms", ""))
            singular_form = c2py(plural_rule[1].strip())(1) if plural_rule else 0  # index of the form for n = 1
        except Exception as error:  # polib's parser may raise any exception
            raise InputError(
                f"{self.path}: {name} is not a readable gettext catalog ({error}): check it with msgfmt -c"
            ) from None
        for message in catalog:
            if message.msgid_plural:
                message.msgstr = message.msgstr_plural.get(singular_form, "")
        return list(catalog)

    def _read_content(self, name: str) -> bytes:
        """Return the content of a catalog file."""
        try:
            if self.archive is None:
                return user_files.read_bytes(self.path / name, MAX_CATALOG)
            return self.archive.read(name)
        # RuntimeError: encrypted file; NotImplementedError: unknown compression
        except (zipfile.BadZipFile, zlib.error, OSError, NotImplementedError, RuntimeError, EOFError) as error:
            raise InputError(
                f"{self.path}: {name} cannot be unpacked ({one_line(error)}): fetch the archive again"
            ) from None


def read_rows(languages: Sequence[str], pivot: str, path: Path) -> Iterator[Row]:
    """Yield the messages of each language from a directory, wheel or zip file.

    A row's line is the message number in its catalog. A message without text in the pivot is a dropped row.

    Raises:
        InputError: no catalog exists, or a catalog cannot be read.
    """
    files = _CatalogFiles(path)
    domains = _group_by_domain(files.names, {*languages, pivot})
    for domain in sorted(domains):
        names_by_language = domains[domain]
        pivot_texts = _read_pivot_texts(files, names_by_language.get(pivot, {}), pivot)
        has_pivot_ids = _has_pivot_ids(pivot_texts, pivot)
        for language in languages:
            if language == pivot:
                continue
            catalog = _choose_catalog(files, names_by_language.get(language, {}), language)
            for number, message in enumerate(catalog.messages, start=1):
                source = pivot_texts.get((message.msgctxt, message.msgid)) or (message.msgid if has_pivot_ids else "")
                if pivot == LANGUAGE_OF_IDS:  # the text in the message's own entry takes precedence
                    source = _find_default_text(message.comment) or source
                reason = _find_reason_to_skip(message)
                # A symbolic id without English text is not a translation's source.
                has_no_source = not source or (source == message.msgid and IDENTIFIER.fullmatch(source))
                if reason is None and has_no_source:
                    reason = "no_source_text"
                yield Row((pivot, language), (source, message.msgstr), catalog.name, number, reason)


def _group_by_domain(names: Iterable[str], languages: set[str]) -> dict[tuple[str, str], dict[str, dict[str, str]]]:
    """Return the file names of the catalogs to read, by (directory, domain), language and locale."""
    domains: dict[tuple[str, str], dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for name in sorted(names):  # .po files replace .mo files, which lack fuzzy flags and default texts
        directory, locale, domain = _split_name(name)
        language = re.split("[-_.@]", locale.lower())[0]
        if language in languages and _rank_locale(locale, language) < NEVER:
            domains[directory, domain][language][locale] = name
    return domains


def _read_pivot_texts(
    files: _CatalogFiles, name_by_locale: dict[str, str], pivot: str
) -> dict[tuple[str | None, str], str]:
    """Return the pivot's texts by message context and id, to replace ids that are symbolic or in another language."""
    catalog = _choose_catalog(files, name_by_locale, pivot)
    if catalog.rank > LAST_MAIN_RANK:  # a regional variant, such as en_AU, has its own spelling
        return {}
    messages = [message for message in catalog.messages if _find_reason_to_skip(message) is None]
    return {(message.msgctxt, message.msgid): message.msgstr for message in messages}


def _has_pivot_ids(pivot_texts: Mapping[tuple[str | None, str], str], pivot: str) -> bool:
    """Return whether a domain's message ids are in the pivot's language, as far as its catalog shows."""
    return pivot == LANGUAGE_OF_IDS or all(text == message_id for (_, message_id), text in pivot_texts.items())


def _choose_catalog(files: _CatalogFiles, name_by_locale: dict[str, str], language: str) -> _Catalog:
    """Return the catalog of a language's best locale. Among equally good locales, prefer the most translations.

    Args:
        files: catalog files of the corpus.
        name_by_locale: mapping from locale to file name.
        language: language of the locales.
    """
    best_rank = min((_rank_locale(locale, language) for locale in name_by_locale), default=NEVER)
    best_names = [name for locale, name in name_by_locale.items() if _rank_locale(locale, language) == best_rank]
    # A generator, so that memory holds only the best catalog so far and the one that is read.
    catalogs = (_Catalog(name, best_rank, files.read_messages(name)) for name in best_names)
    return max(catalogs, key=_count_translations, default=_Catalog("", NEVER, []))


def _count_translations(catalog: _Catalog) -> int:
    return sum(_find_reason_to_skip(message) is None for message in catalog.messages)


def _list_catalogs_in_directory(directory: Path) -> list[str]:
    """Return the names of a directory's catalog files."""
    names = []
    for path in user_files.list_tree(directory):
        if path.suffix in (".po", ".mo") and _IS_CATALOG.search(f"/{path}"):
            names.append(str(path.relative_to(directory)))
    return names


def _list_catalogs_in_archive(archive: zipfile.ZipFile, path: Path) -> list[str]:
    """Return the names of an archive's catalog files. Raise InputError if the archive or a catalog is too large."""
    entries = archive.infolist()
    if len(entries) > MAX_ENTRIES:
        raise InputError(
            f"{path} lists {len(entries):,} files, more than {MAX_ENTRIES:,}: give a directory of catalogs"
        )
    names = []
    for info in entries:
        if not _IS_CATALOG.search(f"/{info.filename}"):
            continue
        if info.file_size > min(MAX_CATALOG, limit_unpacked_bytes(info.compress_size)):
            raise InputError(
                f"{path}: DecompressionLimit: {info.filename} has {info.file_size:,} bytes: if the archive is correct, "
                "unpack it"
            )
        names.append(info.filename)
    return names


def _split_name(name: str) -> tuple[str, str, str]:
    """Split `…/<locale>/LC_MESSAGES/<domain>.po`, or `…/<locale>.po`, into directory, locale and domain."""
    *directories, file_name = PurePosixPath(name).parts
    stem = file_name[:-3]  # without .po or .mo
    if len(directories) > 1 and directories[-1] == "LC_MESSAGES":
        return "/".join(directories[:-2]), directories[-2], stem
    return "/".join(directories), stem, ""


def _rank_locale(locale: str, language: str) -> int:
    """Return a locale's rank: 0 is best, and `NEVER` means to skip the locale. `zh` means simplified Chinese."""
    variant = re.sub(r"^[a-z]+[-_.@]?", "", locale.lower())
    if language == "zh":
        subtags = set(re.split("[-_.@]", variant))  # such as {"hans", "cn"}
        if "hant" not in subtags and not subtags.isdisjoint(("hans", "cn")):
            return 0
        return NEVER if variant else 1
    return {"": 0, language: 1, "us": 1}.get(variant, 2)  # de, then de_DE, en_US, then de_Formal, de_AT …


def _parse_catalog(content: bytes, name: str) -> polib.POFile | polib.MOFile:
    """Parse a catalog file. Damaged files may raise any exception."""
    # polib opens a file if the content could be a path. No path contains a zero byte or is longer than `MAX_PATH`.
    binary_content = content + b"\0"
    if name.endswith(".mo"):
        _check_strings(content)
        return polib.mofile(binary_content)
    text = content.decode(polib.detect_encoding(binary_content, binary_mode=True))
    # polib splits a text at all of Unicode's line boundaries, although only \n and \r end a line of a catalog.
    text = _OTHER_LINE_BOUNDARIES.sub(" ", text)
    return polib.pofile(text + "\n" * MAX_PATH)


def _check_strings(content: bytes) -> None:
    """Raise ValueError or struct.error if a .mo file is truncated. polib does not detect truncation."""
    is_big_endian = content[:4] == b"\x95\x04\x12\xde"
    byte_order = ">" if is_big_endian else "<"
    # After 8 bytes, the header contains the number of strings, and the offsets of the tables of ids and translations.
    count, *table_starts = struct.unpack_from(f"{byte_order}3I", content, 8)
    for start in table_starts:
        for length, offset in struct.iter_unpack(f"{byte_order}2I", content[start : start + 8 * count]):
            if offset + length > len(content):
                raise ValueError(f"the string at byte {offset} extends beyond the end of the file")


def _find_reason_to_skip(message: polib.POEntry) -> str | None:
    """Return the reason to skip a message without a usable translation, or None."""
    if message.obsolete:
        return "obsolete"
    if message.flags and "fuzzy" in message.flags:
        return "fuzzy"
    return None if message.msgstr else "empty"


def _find_default_text(comment: str | None) -> str:
    """Return the text of a comment `Default: "…"`, the English text of a symbolic id. It may span several lines."""
    if not comment or not comment.startswith('Default: "'):
        return ""
    quoted_texts = []
    for line in comment.removeprefix("Default:").splitlines():
        text = line.strip()
        if len(text) > 2 and text[0] == text[-1] == '"':
            quoted_texts.append(text[1:-1])
    return "".join(quoted_texts).replace('\\"', '"')
