"""The stage as a whole: what is written where, that every row is accounted for, and that nothing leaks."""

import dataclasses
import functools
import json
import random
import unicodedata
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infoxlm_core import manifests
from infoxlm_core.config import PreparationConfig
from infoxlm_core.corpora import evaluation_sets
from infoxlm_core.corpora.phases import clean, compare, reserve
from infoxlm_core.corpora.phases.job import Job
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


def tsv(path: Path, pairs) -> dict:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    return {"name": path.stem, "format": "tsv", "path": str(path), "languages": ["en", "de"]}


def text(path: Path, lines, language="de") -> dict:
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return {"name": path.stem, "format": "text", "path": str(path), "languages": [language]}


def messages_in_three_languages(path: Path) -> tuple[dict, pa.Table]:
    """Write a corpus of 144 messages; return its description and the table."""
    table = pa.table({
        "en": [f"Please open the {a} window of {b}" for a in NUMBERS for b in NUMBERS],
        "de": [f"Bitte das {a}. Fenster von {b} öffnen" for a in ZAHLEN for b in ZAHLEN],
        "fr": [f"Veuillez ouvrir la fenêtre {a} de {b}" for a in NOMBRES for b in NOMBRES],
    })  # fmt: skip
    pq.write_table(table, path)
    return {"name": path.stem, "format": "parquet", "path": str(path)}, table


def prepare(tmp_path: Path, *corpora: dict, **fields) -> dict:
    config = PreparationConfig(languages=("en", "de", "fr"), corpora=corpora, **fields)
    return preparation.prepare(config, tmp_path / "out", Folder(mkdtemp(dir=tmp_path)))


def rows(tmp_path: Path, name: str) -> list[tuple[str, ...]]:
    table = pq.read_table(tmp_path / "out" / f"{name}.parquet")
    return list(zip(*table.to_pydict().values(), strict=True))


def entry(report: dict, corpus: str, kind: str, language: str = "de") -> dict:
    (found,) = (f for f in report["files"] if (f["corpus"], f["kind"], f["language"]) == (corpus, kind, language))
    return found


def test_pairs_become_pairs_and_two_monolingual_corpora(tmp_path):
    report = prepare(tmp_path, tsv(tmp_path / "a.tsv", PAIRS))

    assert rows(tmp_path, "pairs/en-de/a") == PAIRS
    assert rows(tmp_path, "mono/en/a") == [(source,) for source, _ in PAIRS]
    assert rows(tmp_path, "mono/de/a") == [(target,) for _, target in PAIRS]
    assert report == json.loads((tmp_path / "out/report.json").read_text())
    assert preparation.facts(report)["pairs"] == {"en-de": 144}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["mono", "pairs", "report.json"]


@pytest.mark.item("P15")
def test_every_row_is_kept_or_dropped_for_a_counted_reason(tmp_path):
    bad = [
        ("", "leer"),
        ("Same text", "Same text"),
        ("Short", "Ein viel zu langer Text für dieses eine Wort"),
        PAIRS[0],
    ]
    near = [(PAIRS[1][0].upper() + "!", PAIRS[1][1] + " 7")]

    report = prepare(tmp_path, tsv(tmp_path / "a.tsv", PAIRS + bad + near))

    assert entry(report, "a", "pairs") | {"file": ""} == {
        "corpus": "a", "language": "de", "kind": "pairs", "file": "", "read": 149, "kept": 144,
        "dropped": {"duplicate": 1, "empty": 1, "length_ratio": 1, "near_duplicate": 1, "untranslated": 1},
    }  # fmt: skip
    assert all(f["read"] == f["kept"] + sum(f["dropped"].values()) for f in report["files"])


@pytest.mark.item("B02")
def test_the_length_of_a_pair_is_judged_by_the_median_of_its_languages(tmp_path):
    digits = ["ศูนย์", "หนึ่ง", "สอง", "สาม", "สี่", "ห้า", "หก", "เจ็ด", "แปด", "เก้า"]
    thai = [(f"Open window {NUMBERS[a]} of {NUMBERS[b]}", f"เปิดหน้าต่างหมายเลข{digits[a]}จาก{digits[b]}")
            for a in range(10) for b in range(10)]  # fmt: skip
    long = ("Do not close it", "ห้ามปิดหน้าต่างนี้โดยเด็ดขาด")  # 5.6 times the bytes, 1.7 times the median
    cut = ("Please open the window that was closed yesterday evening", "กรุณาเปิด")  # 0.5 times, 0.16
    corpora = [
        {"name": "a", "format": "tsv", "path": str(tmp_path / "a.tsv"), "languages": ["en", "th"]},
        tsv(tmp_path / "b.tsv", PAIRS),
    ]
    tsv(tmp_path / "a.tsv", [*thai, long, cut])

    report = preparation.prepare(
        PreparationConfig(languages=("en", "de", "th"), corpora=corpora),
        tmp_path / "out",
        Folder(str(tmp_path / "work")),
    )

    assert rows(tmp_path, "pairs/en-th/a") == [*thai, long]
    assert entry(report, "a", "pairs", "th")["dropped"] == {"length_ratio": 1}
    assert entry(report, "b", "pairs")["dropped"] == {}


@pytest.mark.parametrize(("untranslated", "share"), [(30, None), (60, "5.7%")])
def test_a_filter_that_drops_much_of_a_language_is_named_in_the_log_and_in_the_report(
    tmp_path, caplog, untranslated, share
):
    pairs = [(f"{source} {word}", f"{target} {wort}") for source, target in PAIRS
             for word, wort in zip(NUMBERS, ZAHLEN, strict=True)]  # fmt: skip
    same = [(source, source) for source, _ in pairs[:untranslated]]

    report = prepare(tmp_path, tsv(tmp_path / "a.tsv", [*pairs[:1000], *same]))

    warning = (
        f"pairs: the filter untranslated drops {share} of de, more than 5%: check its setting and the files of these "
        "languages"
    )
    assert report["warnings"] == ([warning] if share else [])
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == report["warnings"]


@pytest.mark.item("B06")
def test_of_duplicates_in_several_corpora_the_first_stays(tmp_path):
    report = prepare(tmp_path, tsv(tmp_path / "b.tsv", PAIRS), tsv(tmp_path / "a.tsv", [*PAIRS[:5], ("A b", "C d")]))

    assert len(rows(tmp_path, "pairs/en-de/b")) == 144
    assert rows(tmp_path, "pairs/en-de/a") == [("A b", "C d")]
    assert entry(report, "a", "pairs")["dropped"] == {"duplicate": 5}


@pytest.mark.item("B05")
def test_no_form_of_a_held_out_sentence_stays_in_the_training_text(tmp_path):
    held, rest = PAIRS[:40], PAIRS[40:]
    planted = [
        held[0],
        (held[1][0].upper(), "Etwas ganz anderes"),
        ("Something else entirely", unicodedata.normalize("NFD", held[2][1])),
        (f"  {held[3][0].replace(' ', chr(0xA0))}\u200e", "Noch etwas anderes"),
    ]
    mono = [held[4][1], held[5][1].casefold(), "Dieser Satz bleibt", "Dieser Satz bleibt nicht"]

    report = prepare(
        tmp_path,
        tsv(tmp_path / "train.tsv", rest + planted),
        text(tmp_path / "mono.txt", mono),
        tsv(tmp_path / "test.tsv", held + held[:1]),
        text(tmp_path / "heldmono.txt", ["Dieser Satz bleibt nicht"]),
        held_out=("test", "heldmono"),
    )

    assert rows(tmp_path, "pairs/en-de/train") == rest
    assert rows(tmp_path, "mono/de/mono") == [("Dieser Satz bleibt",)]
    assert rows(tmp_path, "held_out/en-de/test") == held
    assert entry(report, "train", "pairs")["dropped"] == {"held_out": 4}
    assert entry(report, "mono", "mono")["dropped"] == {"held_out": 3}
    assert entry(report, "test", "held_out")["dropped"] == {"duplicate": 1}
    assert rows(tmp_path, "held_out_mono/de/heldmono") == [("Dieser Satz bleibt nicht",)]
    assert not (tmp_path / "out/mono/de/test.parquet").exists()


@pytest.mark.item("B05")
def test_nothing_of_a_test_set_stays_in_the_training_text_and_the_corpus_says_of_which(tmp_path):
    rng = random.Random(1)
    tests = [" ".join(rng.choices(ZAHLEN, k=16)) + "." for _ in range(60)]
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets/test.deu").write_text("\n".join(tests[:40]), encoding="utf-8")
    paragraphs = [{"context": " ".join(tests[40:]), "qas": []}]
    (tmp_path / "sets/test.de.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    planted = [
        *tests[:10],
        *(text.upper() for text in tests[10:15]),
        *(unicodedata.normalize("NFD", text.replace(" ", "  ")) for text in tests[15:20]),
        *(f"Er sagte {text.removesuffix('.')} und ging" for text in tests[20:40]),  # 16 words of it
        *(f"Also {' '.join(text.split()[1:14])} oder nicht" for text in tests[40:]),  # 13 words
    ]
    free = [" ".join(rng.choices(ZAHLEN, k=16)) for _ in range(200)]
    free += [" ".join(text.split()[:12]) for text in tests[:20]]  # 12 words: a phrase, no copy
    sets = {"evaluation_sets": (str(tmp_path / "sets"),), "cleaning": {"min_identified_characters": 1000}}

    report = prepare(tmp_path, text(tmp_path / "m.txt", planted + free), **sets)

    assert [row[0] for row in rows(tmp_path, "mono/de/m")] == free
    assert entry(report, "m", "mono")["dropped"] == {"evaluation_set": 20, "overlap": 40}
    files = {name: evaluation_sets.digest(tmp_path / "sets" / name) for name in ("test.de.json", "test.deu")}
    assert {one["file"]: one["sha256"] for one in report["evaluation_sets"]} == files
    assert preparation.facts(report)["reserved"] == sorted(files.values())
    assert "reserved" not in preparation.facts(prepare(tmp_path, tsv(tmp_path / "a.tsv", PAIRS)))
    kept = prepare(tmp_path, text(tmp_path / "m.txt", planted + free), **sets, overlap=0)
    assert entry(kept, "m", "mono")["dropped"] == {"evaluation_set": 20}


@pytest.mark.item("B05")
def test_training_text_that_shares_words_in_a_row_with_a_held_out_sentence_is_left_out(tmp_path):
    long = " ".join(ZAHLEN), " ".join(NUMBERS)
    held = tsv(tmp_path / "test.tsv", [(f"{long[1]} thirteen fourteen", f"{long[0]} dreizehn vierzehn")])
    near = (f"Now {long[1]} thirteen", "Jetzt eins und zwei und drei und vier und fünf und so weiter bis zwölf")

    report = prepare(tmp_path, tsv(tmp_path / "a.tsv", [*PAIRS, near]), held, held_out=("test",))

    assert rows(tmp_path, "pairs/en-de/a") == PAIRS
    assert entry(report, "a", "pairs")["dropped"] == {"overlap": 1}


@pytest.mark.item("B05")
def test_a_held_out_sentence_that_survives_stops_the_stage(tmp_path, monkeypatch):
    corpora = tsv(tmp_path / "train.tsv", PAIRS), tsv(tmp_path / "test.tsv", PAIRS[7:8])

    def find_no_reasons(job, part, rows):
        return np.zeros(len(rows), np.uint8)

    monkeypatch.setattr(compare, "find_reasons", find_no_reasons)
    with pytest.raises(EvaluationLeak, match=r"pairs/en-de/train\.parquet row 8 is reserved for evaluation"):
        prepare(tmp_path, *corpora, held_out=("test",))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_share_of_one_corpus_is_held_out_in_all_languages_with_its_near_duplicates(tmp_path):
    corpus, table = messages_in_three_languages(tmp_path / "a.parquet")
    near = [(f"PLEASE open the {a} window of {b}!", f"Öffne {a}. von {b}") for a in NUMBERS for b in NUMBERS]
    near += [(f"Another window, number {n}", german) for n, german in enumerate(table["de"].to_pylist())]

    report = prepare(
        tmp_path,
        corpus,
        tsv(tmp_path / "b.tsv", near),
        text(tmp_path / "m.txt", [french.upper() for french in table["fr"].to_pylist()], "fr"),
        held_out_share=0.2,
    )

    chosen = {source for source, _ in rows(tmp_path, "held_out/en-de/a")}
    assert 15 <= len(chosen) <= 45  # about 0.2 of 144
    for language in ("de", "fr"):
        pairs = [(row["en"], row[language]) for row in table.to_pylist() if row["en"] in chosen]
        assert rows(tmp_path, f"held_out/en-{language}/a") == pairs
    assert {source for source, _ in rows(tmp_path, "held_out/en-de/b")} == {f"PLEASE{s[6:]}!" for s in chosen}
    counts = entry(report, "b", "pairs")["dropped"]
    assert counts == {"held_out_share": len(chosen), "held_out": len(chosen)}  # the other half has their German texts
    held_out_messages = [row for row in table.to_pylist() if row["en"] in chosen]
    held_out = {text.casefold().rstrip("!") for row in held_out_messages for text in row.values()}
    for path in [*(tmp_path / "out/mono").rglob("*.parquet"), *(tmp_path / "out/pairs").rglob("*.parquet")]:
        for column in pq.read_table(path).to_pydict().values():
            assert held_out.isdisjoint(text.casefold().rstrip("!") for text in column)


def test_a_share_that_holds_out_nothing_is_refused(tmp_path):
    with pytest.raises(CorpusTooSmall, match=r"held_out_share \(1e-06\) holds out none of 144 pairs"):
        prepare(tmp_path, tsv(tmp_path / "a.tsv", PAIRS), held_out_share=1e-6)


def test_labelled_messages_are_the_same_in_all_languages_and_in_no_training_text(tmp_path):
    corpus, table = messages_in_three_languages(tmp_path / "a.parquet")
    both = [(row["en"], row["de"]) for row in table.slice(0, 72).to_pylist()]  # in two corpora: of neither

    prepare(tmp_path, corpus, tsv(tmp_path / "b.tsv", both), labelled_share=0.3)

    labelled = rows(tmp_path, "labelled")
    test = {
        language: {t for t, _, found, split in labelled if (found, split) == (language, "test")}
        for language in ("en", "de", "fr")
    }
    chosen = [row for row in table.to_pylist() if row["en"] in test["en"]]
    assert 10 <= len(chosen) <= 35  # about 0.3 of 72
    assert test == {language: {row[language] for row in chosen} for language in ("en", "de", "fr")}
    assert {label for _, label, _, _ in labelled} == {"a"}
    assert not {source for source, _ in both} & {t for t, *_ in labelled}
    train = {t for t, _, _, split in labelled if split == "train"}
    assert train and not train & set.union(*test.values())
    for path in [*(tmp_path / "out/mono").rglob("*.parquet"), *(tmp_path / "out/pairs").rglob("*.parquet")]:
        for column in pq.read_table(path).to_pydict().values():
            assert not set(column) & set.union(*test.values())


@pytest.mark.parametrize(("other", "corpora"), [([("Open", "Auf"), ("Close", "Zu")], "a"), (PAIRS, "none")])
def test_labelled_text_of_fewer_than_two_corpora_is_refused(tmp_path, other, corpora):
    sources = (tsv(tmp_path / "a.tsv", PAIRS), tsv(tmp_path / "b.tsv", other))
    config = PreparationConfig(languages=("en", "de"), corpora=sources, labelled_share=0.2)
    preparation.prepare(config, tmp_path / "out", Folder(str(tmp_path / "work")))

    with pytest.raises(CorpusTooSmall, match=f"labelled_share .* but has those of {corpora} .*: set it to 0"):
        preparation.check_labels(config, tmp_path / "out")


@pytest.mark.item("F14")
def test_preparing_again_gives_the_same_bytes_and_leaves_nothing_old(tmp_path):
    corpora = tsv(tmp_path / "a.tsv", PAIRS), tsv(tmp_path / "b.tsv", PAIRS[:9])
    digests = []
    for _ in range(2):
        prepare(tmp_path, *corpora, labelled_share=0.2, held_out=("b",))
        digests.append(manifests.write(tmp_path / "out", "corpus")["digest"])
        (tmp_path / "out/pairs/en-xx").mkdir()
        (tmp_path / "out/pairs/en-xx/old.parquet").write_bytes(b"left by an older attempt")

    assert digests[0] == digests[1]


@pytest.mark.item("B01")
def test_few_invalid_lines_are_counted_and_many_refuse_the_file_with_nothing_left(tmp_path):
    words = [f"Satz {a} {b} {c} {d}" for a in ZAHLEN for b in ZAHLEN for c in ZAHLEN for d in ZAHLEN][:9993]
    corpus = text(tmp_path / "m.txt", words)
    pair = tsv(tmp_path / "p.tsv", PAIRS)
    with (tmp_path / "m.txt").open("ab") as file:
        file.write(b"kaputt \xff\n" * 7)

    assert entry(prepare(tmp_path, corpus, pair), "m", "mono")["dropped"] == {"invalid_utf8": 7}

    with (tmp_path / "m.txt").open("ab") as file:
        file.write(b"kaputt \xff\n" * 4)
    with pytest.raises(EncodingError, match=r"m\.txt:9994:8: .* 11 of 10004"):
        prepare(tmp_path, pair, corpus)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.item("B07")
def test_a_file_in_another_language_than_promised_is_refused(tmp_path):
    lines = [f"Предложение номер {n} на русском языке" for n in range(500)] + [f"Satz {n} hier" for n in range(900)]

    with pytest.raises(InputError, match=r"m\.txt .*500 of 1400 rows are not in the language expected \(de\)"):
        prepare(tmp_path, text(tmp_path / "m.txt", lines))


@pytest.mark.item("B13")
@pytest.mark.parametrize("pairs", [[], [("Same text", "Same text")]])
def test_too_little_text_is_refused(tmp_path, pairs):
    with pytest.raises(CorpusTooSmall, match="have=0 need=1"):
        prepare(tmp_path, tsv(tmp_path / "a.tsv", pairs))


@pytest.mark.item("B13")
def test_a_corpus_that_gives_nothing_beside_others_is_refused_by_name_and_reason(tmp_path):
    text(tmp_path / "b.tsv", ["one column only"] * 9)
    nothing = {"name": "b", "format": "tsv", "path": str(tmp_path / "b.tsv"), "languages": ["en", "de"]}

    with pytest.raises(
        CorpusTooSmall, match=r"corpus b: none of its 9 rows can be used \(have=0 need=1; missing_column 9"
    ):
        prepare(tmp_path, tsv(tmp_path / "a.tsv", PAIRS), nothing)


def test_a_corpus_in_none_of_the_runs_languages_is_only_told_unless_it_is_asked_for_some(tmp_path, caplog):
    (tmp_path / "b/sv/LC_MESSAGES").mkdir(parents=True)
    text(tmp_path / "b/sv/LC_MESSAGES/b.po", ['msgid "Open the file"', 'msgstr "Öppna filen"'])
    other = {"name": "b", "format": "gettext", "path": str(tmp_path / "b")}

    report = prepare(tmp_path, tsv(tmp_path / "a.tsv", PAIRS), other)

    assert preparation.facts(report)["pairs"] == {"en-de": 144}
    assert "read b: it has no rows in the languages of this run" in caplog.messages
    with pytest.raises(CorpusTooSmall, match="corpus b: none of its 0 rows can be used"):
        prepare(tmp_path, tsv(tmp_path / "a.tsv", PAIRS), other | {"languages": ["en", "de"]})


def test_a_corpus_that_is_not_there_or_is_another_is_refused_and_never_removed(tmp_path):
    corpus = tsv(tmp_path / "a.tsv", PAIRS)
    digest = manifests.file_sha256(tmp_path / "a.tsv")

    prepare(tmp_path, corpus | {"sha256": digest})
    with pytest.raises(InputError, match=f"has sha256 {digest}, expected 000.*: check the config"):
        prepare(tmp_path, corpus | {"sha256": "0" * 64})
    assert (tmp_path / "a.tsv").exists()
    (tmp_path / "a.tsv").unlink()
    with pytest.raises(InputError, match="no such file or folder: check the path of the corpus"):
        prepare(tmp_path, corpus)


@pytest.mark.item("B08")
def test_rows_are_collected_in_order_and_in_chunks_of_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(clean, "PART_ROWS", 3)
    monkeypatch.setattr(clean, "PART_CHARACTERS", 60)
    lines = [
        *(f"Zeile {number} der Datei" for number in range(4)),
        f"Eine lange Zeile {'mit vielen Worten ' * 4}",
        "Ende",
    ]
    config = PreparationConfig(languages=("de",), pivot="de", corpora=(text(tmp_path / "a.txt", lines),))

    preparation.prepare(config, tmp_path / "out", Folder(str(tmp_path / "work")))

    parts = [pq.read_table(path)["texts"].to_pylist() for path in sorted((tmp_path / "work/raw").iterdir())]
    assert [len(part) for part in parts] == [3, 2, 1]
    assert [row[0] for part in parts for row in part] == lines


def test_a_worker_that_does_not_share_the_files_of_the_driver_is_refused_with_one_line(tmp_path):
    config = PreparationConfig(languages=("en", "de"), corpora=(tsv(tmp_path / "a.tsv", PAIRS),))

    def run_on_another_node(work, numbers):
        task, job = work.args
        local_job = dataclasses.replace(job, files=Folder(str(tmp_path / "another disk")))
        return map(functools.partial(work.func, task, local_job), numbers)

    with pytest.raises(InputError, match=r"another disk.* is missing on .*: give a store that all nodes share"):
        preparation.prepare(config, tmp_path / "out", Folder(str(tmp_path / "work")), run_on_another_node)


def test_tasks_map_the_digests_of_reserved_text_instead_of_reading_them(tmp_path):
    files = Folder(str(tmp_path))
    for number, name in enumerate(reserve.SETS):
        files.put(f"united/{name}", np.arange(number, dtype=np.uint64).tobytes())
    config = PreparationConfig(languages=("en", "de"), corpora=(tsv(tmp_path / "a.tsv", PAIRS),))
    files.read = None

    reserved = reserve.read_reserved(Job(config, files, None, reserved_digest=str(tmp_path)))

    assert [digests.tolist() for digests in reserved.digests.values()] == [list(range(n)) for n in range(6)]
