"""Write raw text in every layout, with all that preparation removes: duplicates, leaks, quotations, broken lines."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from infoxlm_core.config import PreparationConfig
from tests.toys.text import messages, write_catalogs

RUSSIAN = [f"Откройте {a} страницу в {b}" for a in ("новую", "старую", "большую") for b in ("архиве", "окне", "сети")]
SPOILT = [("", "leer"), ("Same text", "Same text"), ("Short", "Ein viel zu langer Text für ein Wort"), messages(0)[0]]
TABLE = {"format": "tsv", "languages": ("en", "de")}


def write_raw_text(folder: Path) -> Path:
    """Write catalogs, tables, aligned files and monolingual text that share many sentences; return the folder."""
    german, french = messages(0), messages(1)
    write_catalogs(folder, {"first": 300, "second": 150})
    near = [(f"{a.upper()}!", f"{b} {number}") for number, (a, b) in enumerate(german[150:200])]
    write_pairs(folder / "pairs.tsv", [*german[:150], *SPOILT, *near, *german[100:200]])
    write_pairs(folder / "more.tsv", [*german[140:260], *german[140:150]])
    write_pairs(folder / "kept.tsv", german[60:90])
    columns = {"en": [a for a, _ in german], "de": [b for _, b in german], "fr": [b for _, b in french]}
    pq.write_table(pa.table(columns).slice(250, 300), folder / "many.parquet")
    rows = [{name: column[row] for name, column in columns.items()} for row in range(500, 700)]
    rows += [{"fr": f"Fermez la {text[8:]}"} for text in columns["fr"][700:760]]
    (folder / "lines.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for language in ("en", "fr"):
        (folder / f"moses.{language}").write_text("".join(f"{text}\n" for text in columns[language][650:900]))
    quoted = [f"{german[row][1]}, {german[row + 1][1]}" for row in range(0, 120, 3)]  # over 13 words of other corpora
    lines = [*columns["de"][:80], *quoted, *columns["de"][880:990], *columns["de"][900:920]]
    (folder / "de.txt").write_text("".join(f"{line}\n" for line in lines))
    (folder / "ru.txt").write_bytes("".join(f"{line}\n" for line in RUSSIAN * 2).encode() + b"\xd0 broken\n" * 3)
    (folder / "tests").mkdir()
    longer = [f"Heute {line}" for line in quoted[5:12]]
    test_lines = [*quoted[20:30], *longer, *columns["de"][300:310]]
    (folder / "tests/test.de").write_text("".join(f"{line}\n" for line in test_lines))
    return folder


def write_pairs(path: Path, pairs: list[tuple[str, str]]) -> None:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))


def raw_text_config(folder: Path | str, **fields: Any) -> PreparationConfig:
    """Return a config that reads all files of `write_raw_text`; the corpus `pairs` has two sources."""
    tables = (("pairs", "pairs"), ("kept", "kept"), ("pairs", "more"))
    texts = ("de", "ru")
    return PreparationConfig.parse({
        "languages": ("en", "de", "fr", "ru"),
        "corpora": [
            *({"name": name, "format": "gettext", "path": f"{folder}/{name}"} for name in ("first", "second")),
            *({"name": name, "path": f"{folder}/{file}.tsv", **TABLE} for name, file in tables),
            {"name": "many", "format": "parquet", "path": f"{folder}/many.parquet"},
            {"name": "lines", "format": "jsonl", "path": f"{folder}/lines.jsonl"},
            {"name": "moses", "format": "moses", "path": (f"{folder}/moses.fr", f"{folder}/moses.en"),
             "languages": ("fr", "en")},
            *({"name": f"{n}text", "format": "text", "path": f"{folder}/{n}.txt", "languages": (n,)} for n in texts),
        ],
        "held_out": ("kept",), "cleaning": {"max_invalid_utf8": 0.5},
    } | fields)  # fmt: skip
