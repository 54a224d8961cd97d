"""Folders of aligned sentences: every layout gives the same pairs, and every broken set is refused."""

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
        "en-de.tsv": [f"{english}\t{german}" for english, german in zip(ENGLISH, GERMAN, strict=True)],
        "zh-en.tsv": [f"{chinese}\t{english}" for english, chinese in zip(ENGLISH, CHINESE, strict=True)],
    },
    "FLORES": {"eng_Latn.dev": ENGLISH, "deu_Latn.dev": GERMAN, "zho_Hans.dev": CHINESE, "README": ["about"]},
    "NTREX": {
        "newstest2019-src.eng.txt": ENGLISH, "newstest2019-ref.eng-GB.txt": ENGLISH, "LICENSE": ["mine"],
        "newstest2019-ref.deu.txt": GERMAN, "newstest2019-ref.zho-CN.txt": CHINESE,
        "newstest2019-ref-2.deu.txt": ["another translation"],
    },
    "one file a language": {"en.txt": ENGLISH, "de.txt": GERMAN, "zh.txt": CHINESE},
}  # fmt: skip


def write(folder: Path, **lines_by_name: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, lines in lines_by_name.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


def write_held_out(corpus: Path, pair: str) -> Path:
    path = corpus / "held_out" / pair / "one.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"source": ENGLISH, "target": GERMAN}), path)
    return corpus


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_pairs(tmp_path, layout):
    write(tmp_path, **LAYOUTS[layout])

    sentences_by_code = read_aligned(tmp_path, "en", ["de", "zh"])

    assert [languages.two_letters(code) for code in sentences_by_code] == ["zh", "de"]  # as in the paper's Table 2
    assert list(sentences_by_code.values()) == [(ENGLISH, CHINESE), (ENGLISH, GERMAN)]
    assert list(read_aligned(tmp_path, "en")) == list(sentences_by_code)  # there is no other language


def test_held_out_pairs_of_a_prepared_corpus_are_an_aligned_set(tmp_path):
    write_held_out(tmp_path, "en-de")

    assert read_aligned(tmp_path, "en") == {"de": (ENGLISH, GERMAN)}
    with pytest.raises(InputError, match=r"has pairs of en, not of fr\. Set pivot: en"):
        read_aligned(tmp_path, "fr")


def test_a_held_out_folder_not_named_after_a_language_pair_is_refused(tmp_path):
    write_held_out(tmp_path, r"en-$\frac{$")

    with pytest.raises(InputError, match="must have the columns source and target, in a directory such as en-de"):
        read_held_out(tmp_path)


@pytest.mark.item("B03")
def test_only_a_line_feed_ends_a_line(tmp_path):
    english = ["a\u2028dog", "a\x0bcat\x85"]
    german = ["ein Hund\r", "eine Katze"]

    write(tmp_path, **{"en.txt": english, "de.txt": german})

    assert read_aligned(tmp_path, "en")["de"] == (english, ["ein Hund", "eine Katze"])


@pytest.mark.parametrize(
    ("lines_by_name", "reason"),
    [
        ({"notes.md": ["nothing"]}, r"has no aligned files of en and another language. Give NAME\.de-en\.de"),
        ({"x.en-de.en": ENGLISH, "x.en-de.de": []}, r"x\.en-de\.de is empty. Give one sentence per line"),
        ({"x.en-de.en": ENGLISH}, r"x\.en-de\.en: x\.en-de\.de is missing beside it. Give both files"),
        ({"x.en-de.en": ENGLISH, "x.en-de.de": GERMAN, "y.de-en.de": GERMAN, "y.de-en.en": ENGLISH},
         r"has de twice \(x\.en-de\.de, y\.de-en\.de\). Keep one set per directory"),
    ],
    ids=["no set", "empty file", "missing side", "language twice"],
)  # fmt: skip
def test_a_broken_set_is_refused(tmp_path, lines_by_name, reason):
    write(tmp_path, **lines_by_name)

    with pytest.raises(InputError, match=reason):
        read_aligned(tmp_path, "en")


def test_sorted_english_of_xtreme_is_refused_but_other_sorted_files_are_read(tmp_path):
    english = sorted(f"sentence {number}" for number in range(SORTED_LINES))
    german = [f"Satz {number}" for number in range(SORTED_LINES)]
    xtreme = write(tmp_path / "xtreme", **{"de-en.en": english, "de-en.de": german})
    glossary = write(tmp_path / "own", **{"my.de-en.en": english, "my.de-en.de": german})

    with pytest.raises(ParallelMismatch, match=r"de-en\.en is in alphabetical order, because XTREME hides"):
        read_aligned(xtreme, "en")
    assert read_aligned(glossary, "en") == {"de": (english, german)}
