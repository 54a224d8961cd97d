"""Read the translation units of XML files: TMX, and XLIFF 1.2 and 2.x.

<tu><tuv xml:lang="en-US"><seg>Open</seg></tuv><tuv xml:lang="de"><seg>Öffnen</seg></tuv></tu>
<trans-unit id="1"><source>Open</source><target state="final">Öffnen</target></trans-unit>
<unit id="1"><segment state="final"><source>Open</source><target>Öffnen</target></segment></unit>
    ->  Unit({"en": "Open", "de": "Öffnen"})
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree.ElementTree import Element, ParseError

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import iterparse

from infoxlm_core.corpora import lines
from infoxlm_core.errors import InputError

MAX_DEPTH = 100  # levels of nested elements in a segment
_TRANSLATABLE = ("hi", "sub", "g", "mrk", "pc")
"""Elements of a segment that contain translatable text: highlights and footnotes in TMX, and paired codes in XLIFF. All
other elements contain native codes of a file format."""
_UNFINISHED = ("new", "initial", "needs-translation", "needs-adaptation", "needs-l10n", "needs-review-translation",
               "needs-review-adaptation", "needs-review-l10n")  # fmt: skip
"""Values of XLIFF's `state` for unfinished targets."""
_FINISHED = ("translated", "signed-off", "final")
"""Values of XLIFF 1.2's `state` for targets that are used even in an unapproved unit."""
_LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"


class Unit(NamedTuple):
    """Texts of a translation unit by language, or the reason to drop the unit."""

    texts: dict[str, str]
    dropped: str | None = None


def read_units(path: Path, file_format: str) -> Iterator[Unit]:
    """Yield a file's translation units.

    Args:
        path: TMX or XLIFF file, which may be compressed.
        file_format: `tmx` or `xliff`.

    Raises:
        InputError: the file is not valid in this format, or has entities, which could expand to any size.
    """
    units = _read_tmx(path) if file_format == "tmx" else _read_xliff(path)
    unit_count = 0
    try:
        for unit in units:
            unit_count += 1
            yield unit
    # LookupError: unknown encoding; ValueError: too deeply nested segment
    except (ParseError, DefusedXmlException, LookupError, ValueError) as error:
        name = file_format.upper()
        raise InputError(f"{path}: no valid {name} after unit {unit_count} ({error}): export it again") from None


def _read_tmx(path: Path) -> Iterator[Unit]:
    for unit, _ in _iterate_elements(path, ("tu",)):
        texts: dict[str, str] = {}
        for variant in unit.findall("{*}tuv"):  # in any namespace
            language = _parse_language(variant.get(_LANGUAGE) or variant.get("lang"))
            # The first of several variants, such as en-US and en-GB, is used.
            texts.setdefault(language, _extract_text(variant.find("{*}seg")))
        yield Unit(texts)


def _read_xliff(path: Path) -> Iterator[Unit]:
    """Yield a unit for each <trans-unit> in version 1.2, or each <segment> in version 2."""
    for unit, ancestors in _iterate_elements(path, ("trans-unit", "unit")):
        source_language = _find_attribute(ancestors, ("source-language", "srcLang"))
        target_language = _find_attribute(ancestors, ("target-language", "trgLang"))
        segments = [child for child in unit if _local_name(child) == "segment"] or [unit]
        for segment in segments:
            yield _read_segment(unit, segment, source_language, target_language)


def _read_segment(unit: Element, segment: Element, source_language: str | None, target_language: str | None) -> Unit:
    """Read an XLIFF segment.

    Args:
        unit: element that contains the segment.
        segment: element with the texts; in XLIFF 1.2, the unit itself.
        source_language: default language of the source text.
        target_language: default language of the target text.
    """
    children = {_local_name(child): child for child in segment}
    source = children.get("source")
    target = children.get("target")
    if source is None or target is None:
        return Unit({})  # counted as a unit without translation
    state = target.get("state") or segment.get("state")  # in XLIFF 1.2 or 2.x, respectively
    if state in _UNFINISHED:
        return Unit({}, "unfinished")
    if unit.get("approved") == "no" and state not in _FINISHED:
        return Unit({}, "unapproved")
    texts = {_parse_language(source.get(_LANGUAGE) or source_language): _extract_text(source)}
    # If both sides name the same language, keep only the source. The unit then has no translation.
    texts.setdefault(_parse_language(target.get(_LANGUAGE) or target_language), _extract_text(target))
    return Unit(texts)


def _iterate_elements(path: Path, names: Sequence[str]) -> Iterator[tuple[Element, list[Element]]]:
    """Yield each element that has one of the names, together with its ancestors from the root down."""
    ancestors: list[Element] = []
    with lines.unpack(path) as file:
        for event, element in iterparse(file, events=("start", "end")):
            if event == "start":
                ancestors.append(element)
                continue
            ancestors.pop()
            if _local_name(element) in names:
                yield element, ancestors
                # Free the memory of the element and its siblings. Ancestors stay: their attributes may name languages.
                del ancestors[-1][:]


def _find_attribute(ancestors: Sequence[Element], names: Sequence[str]) -> str | None:
    """Return the first matching attribute of the innermost element that has any of the attributes, or None."""
    for element in reversed(ancestors):
        for name in names:
            if element.get(name):
                return element.get(name)
    return None


def _local_name(element: Element) -> str:
    """Return an element's name without its namespace."""
    return str(element.tag).rpartition("}")[2]


def _parse_language(locale: str | None) -> str:
    """Return the language of a locale: "en" for "EN-us"."""
    return re.split("[-_]", (locale or "").lower())[0]


def _extract_text(segment: Element | None, depth: int = 0) -> str:
    """Return a segment's text without native codes (<ph>, <bpt>, …)."""
    if segment is None:
        return ""
    if depth > MAX_DEPTH:
        raise ValueError(f"a segment has elements nested {depth} levels deep")
    texts = [segment.text or ""]
    for child in segment:
        if _local_name(child) in _TRANSLATABLE:
            texts.append(_extract_text(child, depth + 1))
        texts.append(child.tail or "")
    return "".join(texts)
