"""Pairs are mined from two files with an encoder for which equal words have equal meanings."""

import random
from pathlib import Path

import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.tasks import embedding
from infoxlm_core.tasks.embedding import load_embedder
from infoxlm_core.tasks.mining import mine
from infoxlm_core.tasks.mining.mine import Corpus, MiningResult
from tests.toys.models import save_bag_of_words

WORDS = [f"{letter}{number}" for letter in "abcdefgh" for number in range(30)]


def draw_sentences(count: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.sample(WORDS, 6)) for _ in range(count)]


def translate(sentence: str) -> str:
    return f"{sentence} a0"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    return save_bag_of_words(tmp_path_factory.mktemp("encoder"), words=WORDS)


@pytest.fixture
def paths(tmp_path) -> tuple[Path, Path]:
    """Of 300 lines in each file, 100 are translated; one line is in both files, and one occurs twice."""
    translated = draw_sentences(100, seed=1)
    sources = [*draw_sentences(199, seed=2), "b1 b2 b3 b4", *translated, translated[0]]
    targets = [*map(translate, reversed(translated)), "b1 b2 b3 b4", *draw_sentences(199, seed=3)]
    return write(tmp_path / "x.en", sources), write(tmp_path / "x.de", targets)


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def mine_pairs(
    corpus: Corpus, encoder: Path, cache: Path, digest: str = "digest", threshold=None, **options
) -> MiningResult:
    return mine.mine_pairs(corpus, load_embedder(encoder, **options), digest, cache, precision=0.9, threshold=threshold)


def test_pairs_are_mined_from_a_calibrated_margin_up(encoder, paths, tmp_path, monkeypatch):
    known_pairs = [f"{sentence}\t{translate(sentence)}" for sentence in draw_sentences(300, seed=4)]
    line_of_file = draw_sentences(2, seed=1)[1]
    unusable_pairs = [f"{line_of_file}\tc1 c2", "c3 c4\tc3 c4", known_pairs[0]]  # in the files, equal sides, repeated
    corpus = mine.read_corpus(paths, write(tmp_path / "known.tsv", known_pairs + unusable_pairs), ("en", "de"))

    mined = mine_pairs(corpus, encoder, tmp_path / "cache")
    pairs = list(mine.list_pairs(corpus, mined))
    report = mine.describe(corpus, mined)

    num_correct = sum(pair.target == translate(pair.source) for pair in pairs)
    assert num_correct / len(pairs) > 0.85
    assert num_correct > 85
    source_lines, target_lines = (path.read_text().splitlines() for path in paths)
    assert all(source_lines[pair.source_line - 1] == pair.source for pair in pairs)
    assert all(target_lines[pair.target_line - 1] == pair.target for pair in pairs)
    assert all(pair.source != pair.target for pair in pairs)
    margins = [pair.margin for pair in pairs]
    assert margins == sorted(margins, reverse=True)
    assert report["in_both_files"] == 1
    assert report["lines"][0] == {"read": 301, "distinct": 300, "dropped": {"duplicate": 1}}
    calibration = report["calibration"]
    assert (calibration["planted_pairs"], calibration["skipped_pairs"]) == (300, 2)
    assert calibration["chosen"]["precision"] >= 0.9
    assert calibration["chosen"]["pairs"] == len(pairs) == report["pairs"]
    assert len(calibration["curves"]) == len(report["histogram"]["matches"])
    assert sum(report["histogram"]["matches"]) == report["matches"]

    def refuse(*_, **__):
        raise AssertionError("the vectors are computed again")

    monkeypatch.setattr(embedding.VectorEncoder, "embed", refuse)
    assert list(mine.list_pairs(corpus, mine_pairs(corpus, encoder, tmp_path / "cache"))) == pairs
    for changed in ({"prefix": "b1 "}, {"layer": 2}, {"max_tokens": 5}, {"digest": "of another model"}):
        with pytest.raises(AssertionError, match="computed again"):
            mine_pairs(corpus, encoder, tmp_path / "cache", **changed)


def test_a_threshold_needs_no_calibration_pairs(encoder, paths, tmp_path):
    corpus = mine.read_corpus(paths, None, ("en", "de"))

    all_mined = mine_pairs(corpus, encoder, tmp_path / "cache", threshold=0)
    threshold = float(all_mined.matches.margins[9])
    best_mined = mine_pairs(corpus, encoder, tmp_path / "cache", threshold=threshold)

    assert all_mined.num_pairs == len(all_mined.matches.margins) > 200
    assert best_mined.num_pairs == 10
    assert list(mine.list_pairs(corpus, best_mined)) == list(mine.list_pairs(corpus, all_mined))[:10]
    assert "calibration" not in mine.describe(corpus, best_mined)


def test_too_few_calibration_pairs_are_refused(paths, tmp_path):
    pairs = write(tmp_path / "few.tsv", [f"a{row}\tb{row}" for row in range(99)])

    with pytest.raises(InputError, match=r"few.tsv: only 99 of 99 pairs are neither .* give at least 100"):
        mine.read_corpus(paths, pairs, ("en", "de"))


def test_equal_lines_of_small_files_are_not_a_pair(encoder, tmp_path):
    sources = write(tmp_path / "x.en", ["a1 a2", "b1 b2 b3"])
    targets = write(tmp_path / "x.de", ["b1 b2 b3 b4", "a1 a2"])
    corpus = mine.read_corpus((sources, targets), None, ("en", "de"))

    mined = mine_pairs(corpus, encoder, tmp_path / "cache", threshold=0)

    assert [(pair.source, pair.target) for pair in mine.list_pairs(corpus, mined)] == [("b1 b2 b3", "b1 b2 b3 b4")]
