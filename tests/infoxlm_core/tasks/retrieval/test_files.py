"""Files of aligned sentences: every layout gives the same pairs, every broken file one line."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infoxlm_core import languages
from infoxlm_core.errors import InputError, ParallelMismatch
from infoxlm_core.tasks.retrieval.files import SORTED_LINES, read_aligned, read_held_out

ENGLISH = ["a dog", "a cat", "the house"]
GERMAN = ["ein Hund", "eine Katze", "das Haus"]
CHINESE = ["狗", "猫", "房子"]


def write(path: Path, lines: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


LAYOUTS = {
    "LASER": {
        "tatoeba.deu-eng.deu": GERMAN, "tatoeba.deu-eng.eng": ENGLISH,
        "tatoeba.cmn-eng.cmn": CHINESE, "tatoeba.cmn-eng.eng": ENGLISH, "README.md": ["about"],
    },
    "XTREME": {"de-en.de": GERMAN, "de-en.en": ENGLISH, "zh-en.zh": CHINESE, "zh-en.en": ENGLISH},
    "Moses": {
        "my.set.en-de.en": ENGLISH, "my.set.en-de.de": GERMAN, "my.set.en-de.ids": ["1"],
        "my.set.en-zh.en": ENGLISH, "my.set.en-zh.zh": CHINESE, "my.set.de-fr.de": GERMAN,
    },
    "tables": {
        "en-de.tsv": [f"{a}\t{b}" for a, b in zip(ENGLISH, GERMAN, strict=True)],
        "zh-en.tsv": [f"{b}\t{a}" for a, b in zip(ENGLISH, CHINESE, strict=True)],
    },
    "FLORES": {"eng_Latn.dev": ENGLISH, "deu_Latn.dev": GERMAN, "zho_Hans.dev": CHINESE, "README": ["about"]},
    "NTREX": {
        "newstest2019-src.eng.txt": ENGLISH, "newstest2019-ref.eng-GB.txt": ENGLISH, "LICENSE": ["mine"],
        "newstest2019-ref.deu.txt": GERMAN, "newstest2019-ref.zho-CN.txt": CHINESE,
        "newstest2019-ref-2.deu.txt": ["another translation"],
    },
    "plain": {"en.txt": ENGLISH, "de.txt": GERMAN, "zh.txt": CHINESE},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_pairs(tmp_path, layout):
    for name, lines in LAYOUTS[layout].items():
        write(tmp_path / name, lines)

    found = read_aligned(tmp_path, "en", ["de", "zh"])

    assert [languages.two_letters(code) for code in found] == ["zh", "de"]  # as in the paper's Table 2
    assert list(found.values()) == [(ENGLISH, CHINESE), (ENGLISH, GERMAN)]
    assert list(read_aligned(tmp_path, "en")) == list(found)  # there is nothing else


def test_held_out_text_of_a_prepared_corpus_is_a_set_too(tmp_path):
    path = tmp_path / "held_out/en-de/one.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"source": ENGLISH, "target": GERMAN}), path)

    assert read_aligned(tmp_path, "en") == {"de": (ENGLISH, GERMAN)}
    with pytest.raises(InputError, match=r"has pairs of en, not of fr\. Set pivot: en"):
        read_aligned(tmp_path, "fr")


@pytest.mark.item("B03")
def test_only_a_line_feed_ends_a_line(tmp_path):
    write(tmp_path / "en.txt", ["a\u2028dog", "a\x0bcat\x85"])
    write(tmp_path / "de.txt", ["ein Hund\r", "eine Katze"])

    assert read_aligned(tmp_path, "en")["de"] == (["a\u2028dog", "a\x0bcat\x85"], ["ein Hund", "eine Katze"])


def broken(folder: Path, name: str) -> None:
    """A pair of files with one defect."""
    write(folder / "x.en-de.en", ENGLISH)
    path = write(folder / "x.en-de.de", GERMAN)
    match name:
        case "file":
            write(path, [])
        case "side":
            path.unlink()
        case "twice":
            write(folder / "y.de-en.de", GERMAN)
            write(folder / "y.de-en.en", ENGLISH)


@pytest.mark.parametrize(
    ("defect", "said"),
    [
        ("file", r"x\.en-de\.de is empty. Give one sentence a line"),
        ("side", r"x\.en-de\.en: x\.en-de\.de is missing beside it. Give both files"),
        ("twice", r"has de twice \(x\.en-de\.de, y\.de-en\.de\). Keep one set per folder"),
    ],
)
def test_a_broken_set_is_refused_in_one_line(tmp_path, defect, said):
    broken(tmp_path, defect)

    with pytest.raises(InputError, match=said) as refusal:
        read_aligned(tmp_path, "en")

    assert "\n" not in str(refusal.value)


def test_a_folder_without_a_set_and_a_missing_folder_are_refused(tmp_path):
    write(tmp_path / "notes.md", ["nothing"])

    with pytest.raises(InputError, match=r"has no aligned files of en and another language. Give NAME\.de-en\.de"):
        read_aligned(tmp_path, "en")
    with pytest.raises(InputError, match="no such folder"):
        read_aligned(tmp_path / "nowhere", "en")


def test_xtreme_s_sorted_english_is_refused_since_nobody_can_tell_which_line_is_which(tmp_path):
    english = sorted(f"sentence {number}" for number in range(SORTED_LINES))
    write(tmp_path / "de-en.en", english)
    write(tmp_path / "de-en.de", [f"Satz {number}" for number in range(SORTED_LINES)])

    with pytest.raises(ParallelMismatch, match=r"de-en\.en is in alphabetical order, by which XTREME hides"):
        read_aligned(tmp_path, "en")

    (tmp_path / "de-en.en").rename(tmp_path / "mine.de-en.en")  # somebody's own glossary may be sorted
    (tmp_path / "de-en.de").rename(tmp_path / "mine.de-en.de")
    assert len(read_aligned(tmp_path, "en")["de"][0]) == SORTED_LINES


def test_a_held_out_folder_that_is_not_named_after_a_pair_of_languages_is_refused(tmp_path):
    path = tmp_path / r"held_out/en-$\frac{$/one.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"source": ["Hello"], "target": ["Hallo"]}), path)

    with pytest.raises(InputError, match="does not have columns source and target of a pair such as en-de"):
        read_held_out(tmp_path)
