"""`infoxlm mine`: what it writes and prints, and one line where it refuses."""

import json
import random

import pytest
from typer.testing import CliRunner

from pipelines.cli import app
from tests.toys.models import save_bag_of_words

WORDS = [f"{letter}{number}" for letter in "abcdefgh" for number in range(30)]


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Two files of 200 lines, of which 100 are translated, an encoder, and 150 known pairs."""
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    drawn = random.Random(1)
    sentences = [" ".join(drawn.sample(WORDS, 6)) for _ in range(450)]
    (tmp_path / "x.en").write_text("".join(f"{sentence}\n" for sentence in sentences[:200]))
    (tmp_path / "x.de").write_text("".join(f"{sentence} a0\n" for sentence in sentences[100:300]))
    (tmp_path / "known.tsv").write_text("".join(f"{sentence}\t{sentence} a0\n" for sentence in sentences[300:]))
    save_bag_of_words(tmp_path / "encoder", words=WORDS)
    return tmp_path


def test_pairs_and_a_report_are_written_and_described_in_two_lines(files):
    result = run("mine", "encoder", "x.en", "x.de", "-o", "mined.tsv", "--calibrate", "known.tsv", "--precision", "0.9")

    assert result.exit_code == 0, result.stderr
    rows = [line.split("\t") for line in (files / "mined.tsv").read_text().splitlines()]
    report = json.loads((files / "mined.tsv.json").read_text())
    assert sum(target == f"{source} a0" for *_, source, target in rows) > 80
    assert (report["pairs"], report["languages"], report["vector"]["layer"]) == (len(rows), ["en", "de"], 0)
    assert float(rows[-1][0]) >= round(report["margin"], 5) and report["calibration"]["chosen"]["precision"] >= 0.9
    assert result.stdout.startswith(f"{len(rows)} of {report['matches']} matches have margin {report['margin']:.4f} or")
    assert result.stdout.endswith("wrote mined.tsv and mined.tsv.json\n") and result.stdout.count("\n") == 2
    assert len(list((files / "cache/vectors").iterdir())) == 4


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["x.en", "x.de", "-o", "mined.tsv"], "The margin needs one of --calibrate and --threshold."),
        (["x.en", "x.de", "-o", "mined.csv", "--threshold", "1"], "mined.csv: pairs are not written as '.csv'"),
        (
            ["x.en", "known.tsv", "-o", "mined.tsv", "--threshold", "1"],
            "known.tsv: its name does not tell its language",
        ),
        (["x.en", "x.de", "-o", "mined.tsv", "--threshold", "1", "--languages", "en,q"], "languages en, q: give"),
        (["x.en", "no.de", "-o", "mined.tsv", "--threshold", "1"], "no.de"),
        (["x.en", "x.de", "-o", "no/mined.tsv", "--threshold", "1"], "no/mined.tsv"),
        (
            ["x.en", "x.de", "-o", "mined.tsv", "--calibrate", "known.tsv", "--precision", "1"],
            "no margin has precision",
        ),
    ],
)
def test_what_cannot_be_mined_is_refused_in_one_line(files, arguments, reason):
    result = run("mine", "encoder", *arguments)

    lines = [line for line in result.stderr.splitlines() if line.startswith("infoxlm: ")]
    assert (result.exit_code, result.stdout, len(lines)) == (2, "", 1) and reason in lines[0]
    assert not [path.name for path in files.iterdir() if "mined" in path.name]


def test_mining_is_a_task_of_evaluate(files):
    for code, name in (("en", "x.en"), ("de", "x.de")):
        lines = (files / name).read_text().splitlines()
        (files / f"set/de-en.{code}").parent.mkdir(exist_ok=True)
        (files / f"set/de-en.{code}").write_text("".join(f"{code}-{row}\t{line}\n" for row, line in enumerate(lines)))
    (files / "set/de-en.gold").write_text("".join(f"de-{row}\ten-{100 + row}\n" for row in range(100)))

    result = run("evaluate", "--model", "encoder", "--task", "mining", "--data", "set")

    assert result.exit_code == 0, result.stderr
    for heading in ("mining: F1", "mining: precision", "mining: recall"):
        table = result.stdout.split(heading)[1].splitlines()
        assert float(next(line for line in table if line.startswith("| encoder")).split("|")[2]) > 90
