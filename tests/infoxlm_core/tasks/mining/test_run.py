"""Mining on a set in BUCC's layout: the threshold is chosen on one half, and the other half is measured."""

import random
import zlib
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.tasks import TASKS
from infoxlm_core.tasks.mining import bucc, run
from infoxlm_core.tasks.mining.run import MatchedHalf
from infoxlm_core.tasks.mining.task import MiningConfig
from tests.toys.models import save_bag_of_words

WORDS = [f"{letter}{number}" for letter in "abcdefgh" for number in range(30)]


def write(path: Path, *rows: tuple[str, str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{first}\t{second}\n" for first, second in rows), encoding="utf-8")


@pytest.fixture
def data(tmp_path) -> Path:
    """120 of 400 German and 300 English sentences are translations, which repeat the words and add one."""
    generator = random.Random(5)
    sentences = [" ".join(generator.sample(WORDS, 6)) for _ in range(580)]
    german = [(f"de-{row}", sentence) for row, sentence in enumerate(sentences[:400])]
    english = [(f"en-{row}", f"{sentence} a0") for row, sentence in enumerate(sentences[280:])]
    write(tmp_path / "set/de-en.training.de", *german)
    write(tmp_path / "set/de-en.training.en", *english)
    write(tmp_path / "set/de-en.training.gold", *((f"de-{280 + row}", f"en-{row}") for row in range(120)))
    return tmp_path / "set"


def test_the_half_that_did_not_choose_the_threshold_is_scored(data, tmp_path):
    settings = MiningConfig(data=str(data))
    task = TASKS["mining"]
    task.check(settings, has_grid=False)

    scores = task.measure(settings, save_bag_of_words(tmp_path / "encoder", words=WORDS), tmp_path / "out")

    matches = pq.read_table(tmp_path / "out/de.parquet").to_pylist()
    threshold = scores.details["thresholds"]["de"]
    mined = [row for row in matches if row["margin"] >= threshold and zlib.crc32(row["source_id"].encode()) % 2 == 1]
    num_correct = sum(row["target"] == f"{row['source']} a0" for row in mined)
    num_gold = sum(zlib.crc32(f"de-{280 + row}".encode()) % 2 for row in range(120))
    expected_scores = {
        "f1": 2 * num_correct / (len(mined) + num_gold),
        "precision": num_correct / len(mined),
        "recall": num_correct / num_gold,
    }
    assert 40 < num_gold < 80
    assert len(matches) > 250
    assert scores.counts == {"de": num_gold}
    assert scores.languages["de"] == scores.mean == pytest.approx(expected_scores)
    assert scores.mean["f1"] > 0.9
    metrics = task.name_metrics(scores, settings, "bucc")
    assert metrics["bucc/f1"] == metrics["bucc/f1/de"] == scores.mean["f1"]
    assert [path.name for path in task.list_test_files(settings)] == ["de-en.training.de", "de-en.training.en"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["de.parquet"]  # the vectors are deleted


def test_the_threshold_has_the_best_f1():
    half = MatchedHalf(np.array([1.3, 1.2, 1.1, 1.0]), np.array([True, False, True, False]), num_gold=2)

    assert run.choose_threshold(half) == 1.1
    assert run.score_half(half, 1.1) == {"f1": 4 / 5, "precision": 2 / 3, "recall": 1.0}
    assert run.score_half(half, 9.0) == {"f1": 0.0, "precision": 0.0, "recall": 0.0}


def test_a_folder_has_several_languages_and_gold_pairs_in_either_order(data):
    write(data / "fr-en.training.fr", ("fr-1", "x"), ("fr-2", "y"))
    write(data / "fr-en.training.en", ("en-1", "x"), ("en-2", "y"))
    write(data / "fr-en.training.gold", ("en-2", "fr-1"))
    (data / "README.txt").write_text("about the set")

    sets = bucc.find_sets(data, "en")

    assert list(sets) == ["de", "fr"]
    assert list(bucc.find_sets(data, "en", "de-en")) == ["de"]
    assert bucc.read_set(sets["fr"]).gold == {(0, 1)}


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("de-en.training.gold", "de-1\ten-999\n", r"gold:1: no sentences 'de-1' and 'en-999'"),
        ("de-en.training.en", "en-1 without a tab\n", "training.en:1 is not two columns"),
        ("de-en.training.en", "", "training.en is empty"),
        ("de-en.training.en", "en-1\tx\n", "training.en has a single sentence. Give the complete file"),
        ("de-en.training.en", "en-1\tx\nen-1\ty\n", "training.en: 2 sentences have the id 'en-1'. Make ids unique"),
        ("de-en.sample.gold", "x\ty\n", "de-en.sample.gold: put de-en.sample.en and the file of one other"),
    ],
)
def test_damaged_sets_are_refused(data, name, content, reason):
    (data / name).write_text(content)

    with pytest.raises(InputError, match=reason):
        run.read_sets(MiningConfig(data=str(data)))


def test_one_gold_pair_is_too_few(data):
    (data / "de-en.training.gold").write_text("de-300\ten-20\n")
    (mining_set,) = run.read_sets(MiningConfig(data=str(data))).values()
    matches = run.Matches(np.ones(400), np.arange(400), np.zeros(400, int))

    with pytest.raises(InputError, match=r"too few gold pairs \(1\) to choose"):
        run.split_into_halves(mining_set, matches)


def test_a_folder_needs_one_set_per_language(data, tmp_path):
    for suffix in ("de", "en", "gold"):
        (data / f"de-en.sample.{suffix}").write_bytes((data / f"de-en.training.{suffix}").read_bytes())

    with pytest.raises(InputError, match=r"has two sets of de \(de-en.sample.gold, de-en.training.gold\): set name"):
        bucc.find_sets(data, "en")
    assert list(bucc.find_sets(data, "en", "training")) == ["de"]
    with pytest.raises(InputError, match=r"has no \.gold file with '' in its name"):
        bucc.find_sets(tmp_path, "en")
