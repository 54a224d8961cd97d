"""`near_duplicates: minhash` drops long rows that share most of their text with an earlier row."""

import importlib.metadata
from pathlib import Path
from pydoc_data import topics

import pyarrow.parquet as pq
import pytest

from infoxlm_core.config import PreparationConfig
from infoxlm_core.corpora.parallel import in_process, in_processes
from infoxlm_core.errors import InputError
from infoxlm_core.stages import preparation
from tests.helpers.files import Folder


def read_paragraphs() -> list[str]:
    """Return unlike paragraphs of Python's reference with 250 to 900 letters."""
    paragraphs = (" ".join(text.split()) for topic in topics.topics.values() for text in topic.split("\n\n"))
    return [text for text in dict.fromkeys(paragraphs) if 250 <= sum(map(str.isalpha, text)) <= 900][:150:3]


def change_word(text: str) -> str:
    words = text.split()
    words[len(words) // 2] = "unaltered"
    return " ".join(words)


def write_lines(path: Path, lines: list[str]) -> dict:
    path.write_text("".join(f"{line}\n" for line in lines))
    return {"name": path.stem, "format": "text", "path": str(path), "languages": ["en"]}


def prepare(folder: Path, corpora: list[dict], near_duplicates: str, parallel_map=in_process) -> dict:
    config = PreparationConfig.parse({
        "languages": ["en"], "corpora": corpora, "cleaning": {"near_duplicates": near_duplicates}
    })  # fmt: skip
    return preparation.prepare(config, folder / "out", Folder(str(folder / "work")), parallel_map)


def read_rows(folder: Path, corpus: str) -> list[str]:
    return pq.read_table(folder / f"out/mono/en/{corpus}.parquet")["text"].to_pylist()


@pytest.mark.item("B06")
def test_similar_long_rows_are_dropped_and_the_first_is_kept(tmp_path):
    paragraphs = read_paragraphs()
    copies = [change_word(text) for text in paragraphs]
    short = "This sentence is short enough to be kept beside a sentence that is similar to it"
    corpora = [
        write_lines(tmp_path / "first.txt", [*paragraphs[:30], *copies[:10], short, f"{short} today"]),
        write_lines(tmp_path / "second.txt", [*copies[10:30], *paragraphs[30:]]),
    ]
    switched_off = prepare(tmp_path / "off", corpora, "same_letters")

    report = prepare(tmp_path / "on", corpora, "minhash")
    prepare(tmp_path / "processes", corpora, "minhash", in_processes(2))

    assert switched_off["totals"]["mono"] == {"kept": 82, "read": 82}
    assert report["totals"]["mono"] == {"kept": 52, "read": 82, "similar": 30}
    assert read_rows(tmp_path / "on", "first") == [*paragraphs[:30], short, f"{short} today"]
    assert read_rows(tmp_path / "on", "second") == paragraphs[30:]
    for name in ("mono/en/first.parquet", "mono/en/second.parquet", "report.json"):
        assert (tmp_path / "on/out" / name).read_bytes() == (tmp_path / "processes/out" / name).read_bytes()


def test_similar_pairs_are_dropped_and_their_sides_remain_sentences(tmp_path):
    [source, target, *_] = read_paragraphs()
    table = tmp_path / "pairs.tsv"
    table.write_text(f"{source}\t{target}\n{change_word(source)}\t{target}\n")
    pairs = {"name": "pairs", "format": "tsv", "path": str(table), "languages": ["en", "fr"]}
    config = PreparationConfig.parse({
        "languages": ["en", "fr"], "corpora": [pairs],
        "cleaning": {"near_duplicates": "minhash", "min_identified_characters": 10_000},
    })  # fmt: skip

    report = preparation.prepare(config, tmp_path / "out", Folder(str(tmp_path / "work")))

    assert report["totals"]["pairs"] == {"kept": 1, "read": 2, "similar": 1}
    assert report["languages"]["mono"] == {"en": 2, "fr": 1}


def test_minhash_without_its_library_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.4.1")
    corpus = write_lines(tmp_path / "first.txt", ["A sentence."])

    with pytest.raises(InputError, match=r"needs rensa 0\.5\.0: install infoxlm-pipeline\[fuzzy\]"):
        prepare(tmp_path, [corpus], "minhash")


def test_the_version_of_the_library_is_part_of_the_key_only_if_it_is_used():
    corpora = [{"name": "first", "format": "text", "path": "first.txt", "languages": ["en"]}]
    config = PreparationConfig.parse({"languages": ["en"], "corpora": corpora})
    with_minhash = config.model_copy(
        update={"cleaning": config.cleaning.model_copy(update={"near_duplicates": "minhash"})}
    )

    assert "rensa" not in config.result_fields()
    assert "near_duplicates" not in config.result_fields()["cleaning"]
    assert with_minhash.result_fields()["rensa"] == "0.5.0"
    assert with_minhash.result_fields()["cleaning"]["near_duplicates"] == "minhash"
