"""`infoxlm mine` writes translation pairs and a report, and refuses input that cannot be mined."""

import json
import random
import sys
from pathlib import Path

import pytest

from infoxlm_core.tasks.mining import neighbours
from tests.pipelines.commands import assert_refused, invoke
from tests.toys.models import save_bag_of_words

WORDS = [f"{letter}{number}" for letter in "abcdefgh" for number in range(30)]
FILES = ["x.en", "x.de", "-o", "mined.tsv"]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Return the working directory: an encoder, two files of 200 lines with 100 translations, and 150 known pairs."""
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    generator = random.Random(1)
    sentences = [" ".join(generator.sample(WORDS, 6)) for _ in range(450)]
    (tmp_path / "x.en").write_text("".join(f"{sentence}\n" for sentence in sentences[:200]))
    (tmp_path / "x.de").write_text("".join(f"{sentence} a0\n" for sentence in sentences[100:300]))
    (tmp_path / "known.tsv").write_text("".join(f"{sentence}\t{sentence} a0\n" for sentence in sentences[300:]))
    save_bag_of_words(tmp_path / "encoder", words=WORDS)
    return tmp_path


def test_mined_pairs_and_their_report_are_written_and_summarised(folder):
    result = invoke("mine", "encoder", *FILES, "--calibrate", "known.tsv", "--precision", "0.9")

    assert result.exit_code == 0, result.stderr
    rows = [line.split("\t") for line in (folder / "mined.tsv").read_text().splitlines()]
    report = json.loads((folder / "mined.tsv.json").read_text())
    assert sum(target == f"{source} a0" for *_, source, target in rows) > 80
    assert (report["pairs"], report["languages"], report["vector"]["layer"]) == (len(rows), ["en", "de"], 0)
    assert float(rows[-1][0]) >= round(report["margin"], 5)
    assert report["calibration"]["chosen"]["precision"] >= 0.9
    summary, paths = result.stdout.splitlines()
    assert summary.startswith(f"{len(rows)} of {report['matches']} matches have margin {report['margin']:.4f} or")
    assert paths == "wrote mined.tsv and mined.tsv.json"
    assert len(list((folder / "cache/vectors").iterdir())) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (FILES, "The margin needs one of --calibrate and --threshold."),
        (["x.en", "x.de", "-o", "mined.csv", "--threshold", "1"], "mined.csv: '.csv' is not an output format"),
        (["x.en", "known.tsv", "-o", "mined.tsv", "--threshold", "1"], "its name must contain one language"),
        ([*FILES, "--threshold", "1", "--languages", "en,q"], "languages en, q: give"),
        (["x.en", "no.de", "-o", "mined.tsv", "--threshold", "1"], "no.de"),
        (["x.en", "x.de", "-o", "no/mined.tsv", "--threshold", "1"], "no/mined.tsv"),
    ],
)
def test_input_that_cannot_be_mined_is_refused(folder, arguments, message):
    result = invoke("mine", "encoder", *arguments)

    assert_refused(result, message)
    assert result.stdout == ""
    assert not list(folder.glob("*mined*"))


def test_planted_pairs_count_as_lines_before_the_library_of_the_index_is_needed(folder, monkeypatch):
    monkeypatch.setattr(neighbours, "MAX_EXACT", 300)  # more than 200 lines, fewer than 200 lines and 150 known pairs
    monkeypatch.setitem(sys.modules, "faiss", None)  # as if it were not installed

    assert invoke("mine", "encoder", *FILES, "--threshold", "1").exit_code == 0
    result = invoke("mine", "encoder", "x.en", "x.de", "-o", "calibrated.tsv", "--calibrate", "known.tsv")

    assert_refused(result, "350 sentences are more than the 300 that are compared without an index")


def test_mining_is_a_task_of_evaluate(folder):
    data = folder / "set"
    data.mkdir()
    for language in ("en", "de"):
        lines = (folder / f"x.{language}").read_text().splitlines()
        rows = [f"{language}-{number}\t{line}\n" for number, line in enumerate(lines)]
        (data / f"de-en.{language}").write_text("".join(rows))
    (data / "de-en.gold").write_text("".join(f"de-{row}\ten-{100 + row}\n" for row in range(100)))

    result = invoke("evaluate", "--model", "encoder", "--task", "mining", "--data", "set")

    assert result.exit_code == 0, result.stderr
    for heading in ("F1 by language", "Precision by language", "Recall by language"):
        table = result.stdout.split(heading)[1].splitlines()
        row_of_encoder = next(line for line in table if line.startswith("| encoder"))
        assert float(row_of_encoder.split("|")[2]) > 90
