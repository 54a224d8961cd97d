"""Whether an encoder's training text was kept free of a test."""

from pathlib import Path

import pytest

from infoxlm_core import manifests
from infoxlm_core.corpora import evaluation_sets
from infoxlm_core.results import trials
from infoxlm_core.tasks import TASKS, unreserved
from tests.toys.models import save_model


@pytest.fixture
def tests(tmp_path) -> list[Path]:
    (tmp_path / "set").mkdir()
    for name, line in (("a.en-de.en", "open the door"), ("a.en-de.de", "close it")):
        (tmp_path / "set" / name).write_text(f"{line}\nsave the file\n")
    return evaluation_sets.list_files(tmp_path / "set")


def encoder(directory: Path, kind: str = "encoder", inputs: dict | None = None, **facts) -> Path:
    directory.mkdir(exist_ok=True)
    manifests.write(directory, kind, facts, inputs)
    return directory


def test_files_that_were_not_taken_out_of_the_text_of_our_own_encoder_are_named(tests, tmp_path, caplog):
    known = [evaluation_sets.digest(path) for path in tests]

    assert unreserved.find(encoder(tmp_path / "a", steps=9, reserved=known), tests) == []
    assert not caplog.messages
    assert unreserved.find(encoder(tmp_path / "b", steps=9, reserved=known[:1]), tests) == ["a.en-de.en"]
    assert unreserved.find(encoder(tmp_path / "c", steps=9), tests) == ["a.en-de.de", "a.en-de.en"]
    assert "2 of its files (a.en-de.de, …) were not removed from its training text. Add them" in caplog.messages[-1]


def test_of_encoders_that_others_trained_or_nobody_has_nothing_is_said(tests, tmp_path):
    (tmp_path / "theirs").mkdir()

    assert unreserved.find(tmp_path / "theirs", tests) == []
    assert unreserved.find(encoder(tmp_path / "start", steps=0), tests) == []
    assert unreserved.find(encoder(tmp_path / "tuned", "classifier", steps=9), tests) == []


def test_held_out_text_is_in_no_training_text_of_its_own_corpus(tests, tmp_path):
    (own, other) = (encoder(tmp_path / name, "corpus", name=name) for name in ("own", "other"))
    trained = encoder(tmp_path / "a", inputs={"corpus": manifests.load(own)["digest"]}, steps=9)

    assert unreserved.find(trained, tests, own) == []
    assert len(unreserved.find(trained, tests, other)) == 2
    inputs = {"corpus": manifests.load(own)["digest"]}
    begun_on_another = encoder(tmp_path / "b", inputs=inputs, steps=9, other_corpora=[manifests.load(other)["digest"]])
    assert len(unreserved.find(begun_on_another, tests, own)) == 2


def test_scores_on_a_test_that_was_not_taken_out_say_so(tests, tmp_path):
    model = save_model(tmp_path / "model")
    settings = TASKS["retrieval"].settings.parse({"data": str(tmp_path / "set")})

    free = trials.measure(settings, model, model, {}, tmp_path / "theirs").to_dict()
    marked = trials.measure(settings, encoder(model, steps=9), model, {}, tmp_path / "ours").to_dict()

    assert marked == free | {"not_reserved": ["a.en-de.de", "a.en-de.en"]}
    assert trials.read_scores(tmp_path / "ours" / trials.SCORES).details["not_reserved"] == marked["not_reserved"]


@pytest.mark.parametrize(
    ("task", "files", "settings", "asked"),
    [
        ("classification", ["test-de.tsv", "train-en.tsv", "dev-de.tsv"], {"data": "."}, ["test-de.tsv"]),
        ("classification", ["all.csv"], {"data": "all.csv"}, ["all.csv"]),
        ("named_entities", ["test-de.tsv", "train-en.tsv"], {"data": "."}, ["test-de.tsv"]),
        ("question_answering", ["test.de.json", "train.en.json", "dev.de.json"],
         {"train": ["train.en.json"], "test": ["."]}, ["test.de.json"]),
        ("retrieval", ["README.md", "a.en-de.de", "a.en-de.en"], {"data": "."}, ["a.en-de.de", "a.en-de.en"]),
        ("retrieval", ["en-de.tsv", "de.txt", "script.py"], {"data": "."}, ["de.txt", "en-de.tsv"]),
        ("retrieval", ["held_out/en-de/a.parquet", "mono/de/a.parquet"], {"data": "."}, ["a.parquet"]),
    ],
)  # fmt: skip
def test_a_task_knows_which_of_its_files_are_the_test(tmp_path, monkeypatch, task, files, settings, asked):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)

    assert [path.name for path in TASKS[task].list_test_files(TASKS[task].settings.parse(settings))] == asked
