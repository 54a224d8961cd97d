"""Aligned sets: every layout gives the same pairs, every broken file one line; retrieval by direction and layer."""

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from infoxlm_core import languages
from infoxlm_core.errors import ConfigError, EncodingError, InputError, ParallelMismatch
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.model.huggingface.any_encoder import load_encoder
from infoxlm_core.tasks.embedding import Place
from infoxlm_core.tasks.retrieval import run
from infoxlm_core.tasks.retrieval.files import SORTED_LINES, read_aligned
from infoxlm_core.tasks.retrieval.settings import RetrievalConfig
from tests.toys.models import save_model

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
    with pytest.raises(InputError, match="has pairs of en, not of the pivot fr: give pivot en"):
        read_aligned(tmp_path, "fr")


def test_another_language_can_be_the_pivot(tmp_path):
    for name, lines in LAYOUTS["plain"].items():
        write(tmp_path / name, lines)

    assert read_aligned(tmp_path, "zh", ["en"]) == {"en": (CHINESE, ENGLISH)}


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
        case "counts":
            write(path, GERMAN[:2])
        case "bytes":
            path.write_bytes("ein Hund\neine K\xe4tze\ndas Haus\n".encode("latin-1"))
        case "line":
            write(path, [GERMAN[0], "  ", GERMAN[2]])
        case "file":
            write(path, [])
        case "side":
            path.unlink()
        case "twice":
            write(folder / "y.de-en.de", GERMAN)
            write(folder / "y.de-en.en", ENGLISH)
        case "columns":
            write(folder / "en-fr.tsv", ["a dog\tun chien", "a cat"])


@pytest.mark.parametrize(
    ("defect", "error", "said"),
    [
        ("counts", ParallelMismatch, r"x\.en-de\.en has 3 lines, .*x\.en-de\.de 2: line i must translate line i"),
        ("bytes", EncodingError, r"x\.en-de\.de:2:7: not UTF-8 from this byte on: convert the file"),
        ("line", InputError, r"x\.en-de\.de:2 is empty: give one sentence a line"),
        ("file", InputError, r"x\.en-de\.de is empty: give one sentence a line"),
        ("side", InputError, r"x\.en-de\.en has no x\.en-de\.de beside it: give both sides"),
        ("twice", InputError, r"holds de twice \(x\.en-de\.de, y\.de-en\.de\): keep one set a folder"),
        ("columns", InputError, r"en-fr\.tsv:2 is not two sentences divided by one tab: 'a cat'"),
    ],
)
def test_a_broken_set_is_refused_in_one_line(tmp_path, defect, error, said):
    broken(tmp_path, defect)

    with pytest.raises(error, match=said) as refusal:
        read_aligned(tmp_path, "en")

    assert "\n" not in str(refusal.value)


def test_a_folder_without_a_set_and_a_missing_folder_are_refused(tmp_path):
    write(tmp_path / "notes.md", ["nothing"])

    with pytest.raises(InputError, match=r"holds no aligned files of en and another language: give NAME\.de-en\.de"):
        read_aligned(tmp_path, "en")
    with pytest.raises(InputError, match="no such folder"):
        read_aligned(tmp_path / "nowhere", "en")


def test_one_language_in_two_files_of_its_own_is_refused(tmp_path):
    for name in ("en.txt", "deu_Latn.dev", "deu_Latn.devtest"):
        write(tmp_path / name, ENGLISH)

    with pytest.raises(InputError, match=r"holds deu_Latn twice \(deu_Latn\.dev, deu_Latn\.devtest\)"):
        read_aligned(tmp_path, "en")


def test_xtreme_s_sorted_english_is_refused_since_nobody_can_tell_which_line_is_which(tmp_path):
    english = sorted(f"sentence {number}" for number in range(SORTED_LINES))
    write(tmp_path / "de-en.en", english)
    write(tmp_path / "de-en.de", [f"Satz {number}" for number in range(SORTED_LINES)])

    with pytest.raises(ParallelMismatch, match=r"de-en\.en is in the order of the alphabet, as XTREME hides"):
        read_aligned(tmp_path, "en")

    (tmp_path / "de-en.en").rename(tmp_path / "mine.de-en.en")  # somebody's own glossary may be sorted
    (tmp_path / "de-en.de").rename(tmp_path / "mine.de-en.de")
    assert len(read_aligned(tmp_path, "en")["de"][0]) == SORTED_LINES


# ---------------------------------------------------------------- languages


def test_the_groups_are_those_of_the_paper_in_its_order():
    table_2 = "ara bul cmn deu ell fra hin rus spa swh tha tur urd vie"
    table_3 = "afr ben est eus fin heb hun ind ita jav jpn kat kaz kor mal mar nld pes por tam tel tgl"
    covered, uncovered = table_2.split(), table_3.split()

    assert languages.choose(set(covered + uncovered), "14", "set") == covered
    assert languages.choose(set(covered + uncovered), "22", "set") == uncovered
    assert languages.choose(set(covered + uncovered), "36", "set") == covered + uncovered
    xtreme = (
        "ar he vi id jv tl eu ml ta te af nl de el bn hi mr ur fa fr it pt es bg ru ja ka ko th sw zh kk tr et fi hu"
    )
    assert set(languages.GROUPS["36"]) == set(xtreme.split())
    assert languages.sort(["ces", "deu", "amh", "ar"]) == ["ar", "deu", "amh", "ces"]


def test_a_language_without_script_or_region_is_preferred_else_the_first_by_name():
    there = {"fra", "fra-CA", "zho_Hant", "zho_Hans", "deu_Latn"}

    assert languages.choose(there, ["fr", "zho", "de"], "set") == ["zho_Hans", "deu_Latn", "fra"]
    with pytest.raises(InputError, match=r"set has no sw, ur \(asked for by languages\): it has zho_Hans"):
        languages.choose(there, ["sw", "fr", "ur"], "set")


# ---------------------------------------------------------------- retrieval

WORDS = [f"{letter}{number}" for letter in "abc" for number in range(10)]


@pytest.fixture
def encoder(tmp_path) -> Path:
    return save_model(tmp_path / "encoder", words=WORDS)


@pytest.fixture
def toy(tmp_path) -> Path:
    """German repeats the English words and adds one; Swahili shares a word with English in half of its pairs."""
    english = [f"a{i} b{j}" for i in range(5) for j in range(4)]
    folder = tmp_path / "toy"
    write(folder / "t.deu-eng.eng", english)
    write(folder / "t.deu-eng.deu", [f"{sentence} c0" for sentence in english])
    write(folder / "t.swh-eng.eng", english)
    write(
        folder / "t.swh-eng.swh",
        [f"c{1 + i % 7} {s.split()[i % 2] if i < 10 else 'c9'}" for i, s in enumerate(english)],
    )
    return folder


def test_scores_are_by_language_direction_vector_and_layer(encoder, toy, tmp_path):
    config = RetrievalConfig(data=str(toy), vectors=("mean@best", "cls@last", "mean_no_special@1"), batch_size=8)

    scores = run.measure(config, encoder, tmp_path / "out").to_dict()

    assert list(scores["languages"]) == ["deu", "swh"] and scores["counts"] == {"deu": 20, "swh": 20}
    assert scores["languages"]["deu"]["mean"] > 0.9 > scores["languages"]["swh"]["mean"]
    for row in scores["languages"].values():
        assert row["mean"] == pytest.approx((row["to_pivot"] + row["from_pivot"]) / 2)
    assert scores["mean"]["to_pivot"] == pytest.approx(
        (scores["languages"]["deu"]["to_pivot"] + scores["languages"]["swh"]["to_pivot"]) / 2
    )
    best = scores["vectors"]["mean@best"]
    assert best["languages"] == scores["languages"] and best["mean"] == scores["mean"]
    assert best["mean"]["mean"] == max(scores["by_layer"]["mean"]["mean"])
    assert best["layer"] == scores["by_layer"]["mean"]["mean"].index(best["mean"]["mean"])  # the lowest of equals
    assert (scores["vectors"]["cls@last"]["pooling"], scores["vectors"]["cls@last"]["layer"]) == ("cls", 2)
    assert scores["vectors"]["cls@last"]["mean"]["mean"] == scores["by_layer"]["cls"]["mean"][2]
    assert set(scores["by_layer"]) == {"mean", "cls"}
    assert all(len(shares) == 3 for shares in scores["by_layer"]["mean"].values())
    assert (scores["task"], scores["transfer_gap"], scores["dev"], scores["mixed"]) == ("retrieval", None, None, None)
    assert json.dumps(scores)


def test_misses_are_written_with_what_was_found_instead(encoder, toy, tmp_path):
    scores = run.measure(RetrievalConfig(data=str(toy), vectors=("mean@1",)), encoder, tmp_path / "out").to_dict()

    rows = pq.read_table(tmp_path / "out/misses.parquet").to_pylist()

    for direction in ("to_pivot", "from_pivot"):
        missed = [row for row in rows if (row["language"], row["direction"]) == ("swh", direction)]
        assert 1 - len(missed) / 20 == pytest.approx(scores["languages"]["swh"][direction])
    assert all(row["right"] != row["found"] for row in rows)
    assert rows[0]["language"] in ("deu", "swh") and rows[0]["sentence"]


def test_one_file_of_the_pivot_gives_the_same_scores_as_a_copy_for_each_language(encoder, toy, tmp_path):
    for name, source in {"eng.txt": "t.deu-eng.eng", "deu.txt": "t.deu-eng.deu", "swh.txt": "t.swh-eng.swh"}.items():
        write(tmp_path / "single" / name, (toy / source).read_text().splitlines())

    pairs, single = (
        run.measure(RetrievalConfig(data=str(folder)), encoder, tmp_path / "out").to_dict()
        for folder in (toy, tmp_path / "single")
    )

    assert pairs == single


def test_contrast_vectors_and_a_prefix_are_used(encoder, toy, tmp_path):
    save_file({"projection": torch.eye(32)}, encoder / pretrained.PROJECTION)
    vectors = ("contrast@contrast", "mean@contrast")

    plain = run.measure(RetrievalConfig(data=str(toy), vectors=vectors), encoder, tmp_path / "out").to_dict()
    prefixed = run.measure(
        RetrievalConfig(data=str(toy), vectors=vectors, prefix="c9 "), encoder, tmp_path / "out"
    ).to_dict()

    assert plain["vectors"]["contrast@contrast"]["mean"] == plain["vectors"]["mean@contrast"]["mean"]  # W is 1
    assert plain["vectors"]["contrast@contrast"]["layer"] == 1
    assert plain["by_layer"] != prefixed["by_layer"] and plain["test_set"] == prefixed["test_set"]


def test_margin_is_another_way_to_compare(encoder, toy, tmp_path):
    cosine, margin = (
        run.measure(RetrievalConfig(data=str(toy), vectors=("cls@1",), margin=by), encoder, tmp_path / "out").to_dict()
        for by in (False, True)
    )

    assert cosine["by_layer"] != margin["by_layer"]


def test_a_large_set_is_measured_at_the_layers_asked_for_alone(encoder, toy, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "CURVE_PAIRS", 19)

    one = run.measure(RetrievalConfig(data=str(toy), vectors=("mean@1",)), encoder, tmp_path / "out").to_dict()
    best = run.measure(RetrievalConfig(data=str(toy), vectors=("mean@best",)), encoder, tmp_path / "out").to_dict()

    assert one["by_layer"] == {} and set(best["by_layer"]) == {"mean"}
    assert one["mean"]["mean"] == best["by_layer"]["mean"]["mean"][1]


@pytest.mark.item("A23")
def test_layers_are_counted_as_hugging_face_counts_them(encoder):
    model, _ = load_encoder(encoder)  # two layers; contrast at 1

    def places(vector: str) -> list[Place]:
        return run.find_places(vector, model, encoder)

    assert places("mean@0") == [Place("mean", 0)]  # the embeddings
    assert places("cls@last") == [Place("cls", 2)]
    assert places("mean@contrast") == [Place("mean", 1)]
    assert places("mean@best") == [Place("mean", 0), Place("mean", 1), Place("mean", 2)]
    assert places("contrast@contrast") == places("contrast@best") == places("contrast@1") == [Place("contrast", 1)]


@pytest.mark.parametrize(
    "vector", ["mean", "max@3", "mean@-1", "mean@Last", "mean@1.5", "mean@", " mean@1", "mean@1\n"]
)
def test_a_vector_that_is_not_written_pooling_at_layer_is_refused(vector):
    with pytest.raises(ConfigError, match=r"vectors\.0"):
        RetrievalConfig.parse({"data": "x", "vectors": [vector]})


@pytest.mark.parametrize(
    ("vector", "said"),
    [
        ("mean@3", "has no vector mean@3: its layers are 0 to 2"),
        ("contrast@2", "has no vector contrast@2: its layers are 1 to 1"),
    ],
)
def test_a_layer_that_the_model_does_not_have_is_refused(encoder, toy, tmp_path, vector, said):
    with pytest.raises(InputError, match=said):
        run.measure(RetrievalConfig(data=str(toy), vectors=(vector,)), encoder, tmp_path / "out").to_dict()


def test_contrast_is_refused_for_a_model_that_was_not_contrasted(encoder, toy, tmp_path):
    config = json.loads((encoder / "config.json").read_text())
    del config["infoxlm"]
    (encoder / "config.json").write_text(json.dumps(config))

    for vector in ("contrast@1", "mean@contrast"):
        with pytest.raises(InputError, match=rf"names no contrast layer \(infoxlm\): leave {vector} out of vectors"):
            run.measure(RetrievalConfig(data=str(toy), vectors=(vector,)), encoder, tmp_path / "out").to_dict()


def test_chance_is_what_vectors_that_are_all_alike_score(tmp_path, toy):
    """[CLS] of the embeddings is one vector for all sentences: ties go to the first, which is right once."""
    encoder = save_model(tmp_path / "encoder", words=WORDS)

    scores = run.measure(RetrievalConfig(data=str(toy), vectors=("cls@0",)), encoder, tmp_path / "out").to_dict()

    assert math.isclose(scores["mean"]["mean"], 1 / 20)
