"""Two files in, ranked pairs out, with an encoder for which the same words are the same meaning."""

import random
from pathlib import Path

import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.tasks import embedding
from infoxlm_core.tasks.embedding import load_embedder
from infoxlm_core.tasks.mining import mine
from tests.toys.models import save_bag_of_words

WORDS = [f"{letter}{number}" for letter in "abcdefgh" for number in range(30)]


def draw_sentences(count: int, seed: int) -> list[str]:
    drawn = random.Random(seed)
    return [" ".join(drawn.sample(WORDS, 6)) for _ in range(count)]


def translate(sentence: str) -> str:
    return f"{sentence} a0"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    return save_bag_of_words(tmp_path_factory.mktemp("encoder"), words=WORDS)


@pytest.fixture
def texts(tmp_path) -> tuple[Path, Path, Path]:
    """Of 300 lines in each file, 100 are translated; one line is in both files, and one occurs twice."""
    translated = draw_sentences(100, seed=1)
    sources = [*draw_sentences(199, seed=2), "b1 b2 b3 b4", *translated, translated[0]]
    targets = [*map(translate, reversed(translated)), "b1 b2 b3 b4", *draw_sentences(199, seed=3)]
    known = [f"{sentence}\t{translate(sentence)}" for sentence in draw_sentences(300, seed=4)]
    known += [f"{translated[1]}\tc1 c2", "c3 c4\tc3 c4", known[0]]  # of the files, of equal sides, and twice
    paths = (tmp_path / "x.en", tmp_path / "x.de", tmp_path / "known.tsv")
    for path, lines in zip(paths, (sources, targets, known), strict=True):
        path.write_text("".join(f"{line}\n" for line in lines))
    return paths


def test_pairs_are_mined_with_a_calibrated_margin_and_vectors_are_kept(encoder, texts, tmp_path, monkeypatch):
    *paths, known = texts
    corpus = mine.read((paths[0], paths[1]), known, ("en", "de"))

    mined = mine.mine(corpus, load_embedder(encoder), "digest", tmp_path / "cache", precision=0.9, threshold=None)
    pairs = list(mine.list_pairs(corpus, mined))
    report = mine.describe(corpus, mined)

    right = [pair for pair in pairs if pair.target == translate(pair.source)]
    assert len(right) / len(pairs) > 0.85 and len(right) > 85
    assert all(paths[0].read_text().splitlines()[pair.source_line - 1] == pair.source for pair in pairs)
    assert all(paths[1].read_text().splitlines()[pair.target_line - 1] == pair.target for pair in pairs)
    assert [pair.margin for pair in pairs] == sorted((pair.margin for pair in pairs), reverse=True)
    assert all(pair.source != pair.target for pair in pairs) and report["in_both_files"] == 1
    assert report["lines"][0] == {"read": 301, "distinct": 300, "dropped": {"duplicate": 1}}
    calibration = report["calibration"]
    assert (calibration["planted_pairs"], calibration["skipped_pairs"]) == (300, 2)
    assert calibration["chosen"]["precision"] >= 0.9 and calibration["chosen"]["pairs"] == len(pairs) == report["pairs"]
    assert len(calibration["curves"]) == len(report["histogram"]["matches"])
    assert sum(report["histogram"]["matches"]) == report["matches"]

    def refuse(*_, **__):
        raise AssertionError("the vectors are computed again")

    monkeypatch.setattr(embedding.VectorEncoder, "embed", refuse)
    again = mine.mine(corpus, load_embedder(encoder), "digest", tmp_path / "cache", precision=0.9, threshold=None)
    assert list(mine.list_pairs(corpus, again)) == pairs
    for changed in ({"prefix": "b1 "}, {"layer": 2}, {"max_tokens": 5}):
        with pytest.raises(AssertionError, match="computed again"):
            mine.mine(corpus, load_embedder(encoder, **changed), "digest", tmp_path / "cache", 0.9, None)
    with pytest.raises(AssertionError, match="computed again"):
        mine.mine(corpus, load_embedder(encoder), "of another model", tmp_path / "cache", 0.9, None)


def test_a_threshold_needs_no_pairs(encoder, texts, tmp_path):
    corpus = mine.read((texts[0], texts[1]), None, ("en", "de"))

    everything = mine.mine(corpus, load_embedder(encoder), "digest", tmp_path / "cache", 0.95, threshold=0)
    best = mine.mine(
        corpus, load_embedder(encoder), "digest", tmp_path / "cache", 0.95, float(everything.matches.margins[9])
    )

    assert everything.num_pairs == len(everything.matches.margins) > 200 and best.num_pairs == 10
    assert list(mine.list_pairs(corpus, best)) == list(mine.list_pairs(corpus, everything))[:10]
    assert "calibration" not in mine.describe(corpus, best)


def test_too_few_pairs_are_refused(texts, tmp_path):
    (tmp_path / "few.tsv").write_text("".join(f"a{row}\tb{row}\n" for row in range(99)))

    with pytest.raises(InputError, match=r"few.tsv: 99 of 99 pairs are neither .* give at least 100"):
        mine.read((texts[0], texts[1]), tmp_path / "few.tsv", ("en", "de"))


def test_small_files_are_mined_and_equal_lines_are_no_pair(encoder, tmp_path):
    (tmp_path / "x.en").write_text("a1 a2\nb1 b2 b3\n")
    (tmp_path / "x.de").write_text("b1 b2 b3 b4\na1 a2\n")
    corpus = mine.read((tmp_path / "x.en", tmp_path / "x.de"), None, ("en", "de"))

    mined = mine.mine(corpus, load_embedder(encoder), "digest", tmp_path / "cache", 0.95, threshold=0)

    assert [(pair.source, pair.target) for pair in mine.list_pairs(corpus, mined)] == [("b1 b2 b3", "b1 b2 b3 b4")]
