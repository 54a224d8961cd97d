"""The stage as a whole: what is written where, that every row is accounted for, and that nothing leaks."""

import dataclasses
import functools
import json
import random
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infoxlm_core import manifests
from infoxlm_core.config import PreparationConfig
from infoxlm_core.corpora import evaluation_sets
from infoxlm_core.corpora.phases import clean, deduplicate
from infoxlm_core.errors import CorpusTooSmall, EncodingError, EvaluationLeak, InputError
from infoxlm_core.stages import preparation
from tests.helpers.files import Folder

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
ZAHLEN = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf"]
NOMBRES = ["un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf", "dix", "onze", "douze"]
PAIRS = [
    (f"Open window {a} of {b}", f"Fenster {c} von {d} öffnen")
    for a, c in zip(NUMBERS, ZAHLEN, strict=True)
    for b, d in zip(NUMBERS, ZAHLEN, strict=True)
]


def write_tsv(path: Path, pairs: Iterable[tuple[str, str]], target: str = "de") -> dict:
    """Write a corpus of English pairs and return its source in the config."""
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    return {"name": path.stem, "format": "tsv", "path": str(path), "languages": ["en", target]}


def write_text(path: Path, lines: Iterable[str], language: str = "de") -> dict:
    """Write a monolingual corpus and return its source in the config."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return {"name": path.stem, "format": "text", "path": str(path), "languages": [language]}


def write_messages(path: Path) -> tuple[dict, list[dict[str, str]]]:
    """Write a corpus of 144 messages in three languages; return its source and the messages."""
    table = pa.table({
        "en": [f"Please open the {a} window of {b}" for a in NUMBERS for b in NUMBERS],
        "de": [f"Bitte das {a}. Fenster von {b} öffnen" for a in ZAHLEN for b in ZAHLEN],
        "fr": [f"Veuillez ouvrir la fenêtre {a} de {b}" for a in NOMBRES for b in NOMBRES],
    })  # fmt: skip
    pq.write_table(table, path)
    return {"name": path.stem, "format": "parquet", "path": str(path)}, table.to_pylist()


def prepare(folder: Path, *corpora: dict, languages: tuple[str, ...] = ("en", "de", "fr"), **fields) -> dict:
    """Prepare corpora in `folder / "out"` and return the report."""
    config = PreparationConfig(languages=languages, corpora=corpora, **fields)
    return preparation.prepare(config, folder / "out", Folder(mkdtemp(dir=folder)))


def read_rows(folder: Path, name: str) -> list[tuple[str, ...]]:
    table = pq.read_table(folder / "out" / f"{name}.parquet")
    return list(zip(*table.to_pydict().values(), strict=True))


def read_training_text(folder: Path) -> set[str]:
    """Return all sentences of the training tables."""
    paths = [*(folder / "out/mono").rglob("*.parquet"), *(folder / "out/pairs").rglob("*.parquet")]
    return {text for path in paths for column in pq.read_table(path).columns for text in column.to_pylist()}


def find_dropped(report: dict, corpus: str, kind: str) -> dict[str, int]:
    """Return how many rows of a corpus were dropped for each reason."""
    [file] = [file for file in report["files"] if (file["corpus"], file["kind"]) == (corpus, kind)]
    return file["dropped"]


def test_pairs_become_pairs_and_two_monolingual_corpora(tmp_path):
    report = prepare(tmp_path, write_tsv(tmp_path / "a.tsv", PAIRS))

    assert read_rows(tmp_path, "pairs/en-de/a") == PAIRS
    assert read_rows(tmp_path, "mono/en/a") == [(source,) for source, _ in PAIRS]
    assert read_rows(tmp_path, "mono/de/a") == [(target,) for _, target in PAIRS]
    assert report == json.loads((tmp_path / "out/report.json").read_text())
    assert preparation.build_facts(report)["pairs"] == {"en-de": 144}
    assert "reserved" not in preparation.build_facts(report)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["mono", "pairs", "report.json"]


@pytest.mark.item("P15")
def test_every_row_is_kept_or_dropped_for_a_counted_reason(tmp_path):
    unusable = [
        ("", "leer"),
        ("Same text", "Same text"),
        ("Short", "Ein viel zu langer Text für dieses eine Wort"),
        PAIRS[0],
        (f"{PAIRS[1][0].upper()}!", f"{PAIRS[1][1]} 7"),
    ]

    report = prepare(tmp_path, write_tsv(tmp_path / "a.tsv", PAIRS + unusable))

    assert [file for file in report["files"] if file["kind"] == "pairs"] == [{
        "corpus": "a", "language": "de", "kind": "pairs", "file": "a.tsv", "read": 149, "kept": 144,
        "dropped": {"duplicate": 1, "empty": 1, "length_ratio": 1, "near_duplicate": 1, "untranslated": 1},
    }]  # fmt: skip
    assert all(file["read"] == file["kept"] + sum(file["dropped"].values()) for file in report["files"])


@pytest.mark.item("B02")
def test_length_ratio_of_a_pair_is_relative_to_the_median_of_its_languages(tmp_path):
    digits = ["ศูนย์", "หนึ่ง", "สอง", "สาม", "สี่", "ห้า", "หก", "เจ็ด", "แปด", "เก้า"]
    thai = [(f"Open window {NUMBERS[a]} of {NUMBERS[b]}", f"เปิดหน้าต่างหมายเลข{digits[a]}จาก{digits[b]}")
            for a in range(10) for b in range(10)]  # fmt: skip
    long = ("Do not close it", "ห้ามปิดหน้าต่างนี้โดยเด็ดขาด")  # 5.6 times the bytes, 1.7 times the median
    truncated = ("Please open the window that was closed yesterday evening", "กรุณาเปิด")  # 0.5 times, 0.16
    corpora = (write_tsv(tmp_path / "a.tsv", [*thai, long, truncated], "th"), write_tsv(tmp_path / "b.tsv", PAIRS))

    report = prepare(tmp_path, *corpora, languages=("en", "de", "th"))

    assert read_rows(tmp_path, "pairs/en-th/a") == [*thai, long]
    assert find_dropped(report, "a", "pairs") == {"length_ratio": 1}
    assert find_dropped(report, "b", "pairs") == {}


@pytest.mark.parametrize(("untranslated_rows", "share"), [(30, None), (60, "5.7%")])
def test_filter_that_drops_much_of_a_language_is_logged_and_reported(tmp_path, caplog, untranslated_rows, share):
    pairs = [(f"{source} {word}", f"{target} {wort}") for source, target in PAIRS
             for word, wort in zip(NUMBERS, ZAHLEN, strict=True)]  # fmt: skip
    untranslated = [(source, source) for source, _ in pairs[:untranslated_rows]]

    report = prepare(tmp_path, write_tsv(tmp_path / "a.tsv", [*pairs[:1000], *untranslated]))

    warning = (
        f"pairs: the filter untranslated drops {share} of de, more than 5%: check its setting and the files of these "
        "languages"
    )
    assert report["warnings"] == ([warning] if share else [])
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == report["warnings"]


@pytest.mark.item("B06")
def test_first_of_duplicates_in_several_corpora_is_kept(tmp_path):
    first = write_tsv(tmp_path / "b.tsv", PAIRS)
    second = write_tsv(tmp_path / "a.tsv", [*PAIRS[:5], ("A b", "C d")])

    report = prepare(tmp_path, first, second)

    assert read_rows(tmp_path, "pairs/en-de/b") == PAIRS
    assert read_rows(tmp_path, "pairs/en-de/a") == [("A b", "C d")]
    assert find_dropped(report, "a", "pairs") == {"duplicate": 5}


@pytest.mark.item("B05")
def test_held_out_sentences_are_removed_from_the_training_text_in_every_spelling(tmp_path):
    long = (f"{' '.join(NUMBERS)} thirteen fourteen", f"{' '.join(ZAHLEN)} dreizehn vierzehn")
    joined = ("Open it without a key.", "Ohne\u200cSchlüssel öffnen.")  # in Persian, a joiner may stand for a space
    held_out = [*PAIRS[:40], long, joined]
    training = PAIRS[40:]
    leaks = [
        held_out[0],
        (held_out[1][0].upper(), "Etwas ganz anderes"),
        ("Something else entirely", unicodedata.normalize("NFD", held_out[2][1])),
        (f"  {held_out[3][0].replace(' ', chr(0xA0))}\u200e", "Noch etwas anderes"),
        ("Something without a key", "Ohne Schlüssel öffnen"),
    ]
    thirteen_words = (
        f"Now {' '.join(NUMBERS)} thirteen",
        "Jetzt eins und zwei und drei und vier und fünf und so weiter bis zwölf",
    )
    monolingual = [held_out[4][1], held_out[5][1].casefold(), "Dieser Satz bleibt", "Dieser Satz bleibt nicht"]

    report = prepare(
        tmp_path,
        write_tsv(tmp_path / "train.tsv", [*training, *leaks, thirteen_words]),
        write_text(tmp_path / "mono.txt", monolingual),
        write_tsv(tmp_path / "test.tsv", [*held_out, held_out[0]]),
        write_text(tmp_path / "heldmono.txt", ["Dieser Satz bleibt nicht"]),
        held_out=("test", "heldmono"),
    )

    assert read_rows(tmp_path, "pairs/en-de/train") == training
    assert read_rows(tmp_path, "mono/de/mono") == [("Dieser Satz bleibt",)]
    assert read_rows(tmp_path, "held_out/en-de/test") == held_out
    assert read_rows(tmp_path, "held_out_mono/de/heldmono") == [("Dieser Satz bleibt nicht",)]
    assert find_dropped(report, "train", "pairs") == {"held_out": 5, "overlap": 1}
    assert find_dropped(report, "mono", "mono") == {"held_out": 3}
    assert find_dropped(report, "test", "held_out") == {"duplicate": 1}
    assert not (tmp_path / "out/mono/de/test.parquet").exists()


@pytest.mark.item("B05")
@pytest.mark.parametrize("overlap", [13, 0])
def test_text_of_test_sets_is_removed_from_the_training_text(tmp_path, overlap):
    rng = random.Random(1)
    test_texts = [" ".join(rng.choices(ZAHLEN, k=16)) + "." for _ in range(60)]
    test_folder = tmp_path / "sets"
    test_folder.mkdir()
    (test_folder / "test.deu").write_text("\n".join(test_texts[:40]), encoding="utf-8")
    paragraphs = [{"context": " ".join(test_texts[40:]), "qas": []}]
    (test_folder / "test.de.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    copies = [
        *test_texts[:10],
        *(text.upper() for text in test_texts[10:15]),
        *(unicodedata.normalize("NFD", text.replace(" ", "  ")) for text in test_texts[15:20]),
    ]
    quotations = [f"Er sagte {text.removesuffix('.')} und ging" for text in test_texts[20:40]]  # of 16 words
    quotations += [f"Also {' '.join(text.split()[1:14])} oder nicht" for text in test_texts[40:]]  # of 13 words
    other_text = [" ".join(rng.choices(ZAHLEN, k=16)) for _ in range(200)]
    other_text += [" ".join(text.split()[:12]) for text in test_texts[:20]]  # 12 words are a phrase and no copy

    report = prepare(
        tmp_path,
        write_text(tmp_path / "m.txt", [*copies, *quotations, *other_text]),
        evaluation_sets=(str(test_folder),),
        cleaning={"min_identified_characters": 1000},
        overlap=overlap,
    )

    rows = [text for (text,) in read_rows(tmp_path, "mono/de/m")]
    if overlap:
        assert rows == other_text
        assert find_dropped(report, "m", "mono") == {"evaluation_set": 20, "overlap": 40}
    else:
        assert rows == [*quotations, *other_text]
    digests = {name: evaluation_sets.digest(test_folder / name) for name in ("test.de.json", "test.deu")}
    assert {file["file"]: file["sha256"] for file in report["evaluation_sets"]} == digests
    assert preparation.build_facts(report)["reserved"] == sorted(digests.values())


@pytest.mark.item("B05")
def test_held_out_sentence_that_remains_in_the_training_text_stops_the_stage(tmp_path, monkeypatch):
    corpora = (write_tsv(tmp_path / "train.tsv", PAIRS), write_tsv(tmp_path / "test.tsv", PAIRS[7:8]))

    def find_no_reasons(job, part, rows):
        return np.zeros(len(rows), np.uint8)

    monkeypatch.setattr(deduplicate, "find_reasons", find_no_reasons)
    with pytest.raises(EvaluationLeak, match=r"pairs/en-de/train\.parquet row 8 is reserved for evaluation"):
        prepare(tmp_path, *corpora, held_out=("test",))
    assert list((tmp_path / "out").iterdir()) == []


def test_share_of_the_messages_is_held_out_in_all_languages_with_near_duplicates(tmp_path):
    corpus, messages = write_messages(tmp_path / "a.parquet")
    near_duplicates = [(f"PLEASE open the {a} window of {b}!", f"Öffne {a}. von {b}") for a in NUMBERS for b in NUMBERS]
    other_pairs = [(f"Another window, number {n}", message["de"]) for n, message in enumerate(messages)]

    report = prepare(
        tmp_path,
        corpus,
        write_tsv(tmp_path / "b.tsv", near_duplicates + other_pairs),
        write_text(tmp_path / "m.txt", [message["fr"].upper() for message in messages], "fr"),
        held_out_share=0.2,
    )

    sources = {source for source, _ in read_rows(tmp_path, "held_out/en-de/a")}
    held_out = [message for message in messages if message["en"] in sources]
    assert 15 <= len(held_out) <= 45  # about 0.2 of 144
    for language in ("de", "fr"):
        pairs = [(message["en"], message[language]) for message in held_out]
        assert read_rows(tmp_path, f"held_out/en-{language}/a") == pairs
    near_sources = {source for source, _ in read_rows(tmp_path, "held_out/en-de/b")}
    assert near_sources == {f"PLEASE{source[6:]}!" for source in sources}
    # The other pairs with the same German sides cannot be held out, and are dropped.
    assert find_dropped(report, "b", "pairs") == {"held_out_share": len(held_out), "held_out": len(held_out)}
    training_text = {text.casefold().rstrip("!") for text in read_training_text(tmp_path)}
    assert training_text.isdisjoint(text.casefold() for message in held_out for text in message.values())


def test_labelled_test_messages_are_the_same_in_all_languages_and_in_no_training_text(tmp_path):
    corpus, messages = write_messages(tmp_path / "a.parquet")
    shared_pairs = [(message["en"], message["de"]) for message in messages[:72]]  # of two corpora, so without label

    prepare(tmp_path, corpus, write_tsv(tmp_path / "b.tsv", shared_pairs), labelled_share=0.3)

    labelled = read_rows(tmp_path, "labelled")
    test_texts = {text for text, _, _, split in labelled if split == "test"}
    training_texts = {text for text, _, _, split in labelled if split == "train"}
    test_messages = [message for message in messages if message["en"] in test_texts]
    assert 10 <= len(test_messages) <= 35  # about 0.3 of 72
    assert test_texts == {text for message in test_messages for text in message.values()}
    assert {label for _, label, _, _ in labelled} == {"a"}
    assert {source for source, _ in shared_pairs}.isdisjoint(test_texts | training_texts)
    assert training_texts
    assert test_texts.isdisjoint(training_texts | read_training_text(tmp_path))


def test_short_spellings_bring_no_training_text_into_the_labelled_test_set(tmp_path):
    long = [(f"Pick {a} of {b}......", f"Nimm {c} von {d}") for a, c in zip(NUMBERS, ZAHLEN, strict=True)
            for b, d in zip(NUMBERS, ZAHLEN, strict=True)]  # fmt: skip
    short = [(source.rstrip("."), target.replace("Nimm", "Wähle")) for source, target in long]
    other_sources = [(f"Something else, {source}", target) for source, target in short]
    corpora = (
        write_tsv(tmp_path / "a.tsv", [*long, *short, *other_sources]),
        write_tsv(tmp_path / "b.tsv", PAIRS),
    )

    prepare(tmp_path, *corpora, labelled_share=0.3)

    test_texts = {text for text, label, _, split in read_rows(tmp_path, "labelled") if split == "test" and label == "a"}
    assert len(test_texts) > 20
    assert test_texts.isdisjoint(read_training_text(tmp_path))


@pytest.mark.parametrize(("pairs", "corpora"), [([("Open", "Auf"), ("Close", "Zu")], "a"), (PAIRS, "none")])
def test_labelled_text_with_fewer_than_two_labels_is_refused(tmp_path, pairs, corpora):
    sources = (write_tsv(tmp_path / "a.tsv", PAIRS), write_tsv(tmp_path / "b.tsv", pairs))
    config = PreparationConfig(languages=("en", "de"), corpora=sources, labelled_share=0.2)
    preparation.prepare(config, tmp_path / "out", Folder(str(tmp_path / "work")))

    with pytest.raises(CorpusTooSmall, match=rf"but has them from \d \({corpora}\)\. .*: set labelled_share to 0"):
        preparation.check_labels(config, tmp_path / "out")


@pytest.mark.item("F14")
def test_preparing_again_writes_the_same_bytes_and_removes_old_files(tmp_path):
    corpora = (write_tsv(tmp_path / "a.tsv", PAIRS), write_tsv(tmp_path / "b.tsv", PAIRS[:9]))
    digests = []
    for _ in range(2):
        prepare(tmp_path, *corpora, labelled_share=0.2, held_out=("b",))
        digests.append(manifests.write(tmp_path / "out", "corpus")["digest"])
        (tmp_path / "out/pairs/en-xx").mkdir()
        (tmp_path / "out/pairs/en-xx/old.parquet").write_bytes(b"left by an older attempt")

    assert digests[0] == digests[1]


@pytest.mark.item("B01")
def test_few_invalid_lines_are_counted_and_many_refuse_the_file(tmp_path):
    lines = [f"Satz {a} {b} {c} {d}" for a in ZAHLEN for b in ZAHLEN for c in ZAHLEN for d in ZAHLEN][:9993]
    corpora = (write_tsv(tmp_path / "p.tsv", PAIRS), write_text(tmp_path / "m.txt", lines))
    with (tmp_path / "m.txt").open("ab") as file:
        file.write(b"kaputt \xff\n" * 7)

    assert find_dropped(prepare(tmp_path, *corpora), "m", "mono") == {"invalid_utf8": 7}

    with (tmp_path / "m.txt").open("ab") as file:
        file.write(b"kaputt \xff\n" * 4)
    with pytest.raises(EncodingError, match=r"m\.txt:9994:8: .* \(11 of 10004 lines"):
        prepare(tmp_path, *corpora)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.item("B07")
def test_file_in_another_language_than_the_config_says_is_refused(tmp_path):
    russian = [f"Предложение номер {number} на русском языке" for number in range(500)]
    german = [f"Satz {number} hier" for number in range(900)]

    with pytest.raises(InputError, match=r"m\.txt .*500 of 1400 rows are not in the language expected \(de\)"):
        prepare(tmp_path, write_text(tmp_path / "m.txt", russian + german))


@pytest.mark.item("B13")
@pytest.mark.parametrize(
    ("content", "fields", "message"),
    [
        ("", {}, r"is empty: replace it"),
        ("Same text\tSame text\n", {}, r"none of its 1 rows can be used \(untranslated 1\)"),
        ("one column only\n" * 9, {}, r"corpus b: none of its 9 rows .* \(missing_column 9"),
        ("Open it\tÖffne es\n", {"held_out_share": 1e-6}, r"held_out_share \(1e-06\) holds out none of 145 pairs"),
        ("Open it\tÖffne es\n", {"held_out_share": 1}, r"remains \(held_out_share 145\): .* lower held_out_share"),
        ("Open it\tÖffne es\n", {"labelled_share": 1, "held_out_share": 0.9}, r"labelled \d+\): .* and labelled_share"),
    ],
)
def test_corpus_with_too_little_text_is_refused(tmp_path, content, fields, message):
    usable = write_tsv(tmp_path / "a.tsv", PAIRS)
    small = write_tsv(tmp_path / "b.tsv", [])
    (tmp_path / "b.tsv").write_text(content)

    with pytest.raises(CorpusTooSmall, match=message):
        prepare(tmp_path, usable, small, **fields)


def test_corpus_without_the_languages_of_the_run_is_refused_only_if_it_names_them(tmp_path, caplog):
    (tmp_path / "b/sv/LC_MESSAGES").mkdir(parents=True)
    write_text(tmp_path / "b/sv/LC_MESSAGES/b.po", ['msgid "Open the file"', 'msgstr "Öppna filen"'])
    swedish = {"name": "b", "format": "gettext", "path": str(tmp_path / "b")}
    usable = write_tsv(tmp_path / "a.tsv", PAIRS)

    report = prepare(tmp_path, usable, swedish)

    assert preparation.build_facts(report)["pairs"] == {"en-de": 144}
    assert "read b: it has no rows in the languages of this run" in caplog.messages
    with pytest.raises(CorpusTooSmall, match="corpus b: none of its 0 rows can be used"):
        prepare(tmp_path, usable, swedish | {"languages": ["en", "de"]})


def test_missing_or_changed_corpus_is_refused_and_not_removed(tmp_path):
    corpus = write_tsv(tmp_path / "a.tsv", PAIRS)
    digest = manifests.file_sha256(tmp_path / "a.tsv")

    prepare(tmp_path, corpus | {"sha256": digest})
    with pytest.raises(InputError, match=f"has sha256 {digest}, expected 000.*: check the config"):
        prepare(tmp_path, corpus | {"sha256": "0" * 64})
    (tmp_path / "a.tsv").unlink()  # fails if it was removed
    with pytest.raises(InputError, match="no such file or directory: check the path of the corpus"):
        prepare(tmp_path, corpus)


@pytest.mark.item("B08")
def test_rows_are_read_in_order_into_parts_of_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(clean, "PART_ROWS", 3)
    monkeypatch.setattr(clean, "PART_CHARACTERS", 60)
    long_line = f"Eine lange Zeile {'mit vielen Worten ' * 4}"
    lines = [*(f"Zeile {number} der Datei" for number in range(4)), long_line, "Ende"]
    config = PreparationConfig(languages=("de",), pivot="de", corpora=(write_text(tmp_path / "a.txt", lines),))

    preparation.prepare(config, tmp_path / "out", Folder(str(tmp_path / "work")))

    parts = [pq.read_table(path)["texts"].to_pylist() for path in sorted((tmp_path / "work/raw").iterdir())]
    assert [len(part) for part in parts] == [3, 2, 1]
    assert [row[0] for part in parts for row in part] == lines


def test_worker_without_the_files_of_the_driver_is_refused(tmp_path):
    config = PreparationConfig(languages=("en", "de"), corpora=(write_tsv(tmp_path / "a.tsv", PAIRS),))

    def run_on_another_node(work: functools.partial, numbers: Iterable[int]) -> Iterator[dict]:
        task, job = work.args
        local_job = dataclasses.replace(job, files=Folder(str(tmp_path / "another disk")))
        return map(functools.partial(work.func, task, local_job), numbers)

    with pytest.raises(InputError, match=r"another disk.* is missing on .*: give a store that all nodes share"):
        preparation.prepare(config, tmp_path / "out", Folder(str(tmp_path / "work")), run_on_another_node)
