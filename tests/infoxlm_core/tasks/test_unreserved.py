"""Which test files were not removed from an encoder's training text."""

from pathlib import Path

import pytest

from infoxlm_core import manifests
from infoxlm_core.corpora import evaluation_sets
from infoxlm_core.results import trials
from infoxlm_core.tasks import TASKS
from infoxlm_core.tasks.unreserved import find_unreserved_files
from tests.toys.models import save_model


@pytest.fixture
def test_files(tmp_path) -> list[Path]:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/a.en-de.en").write_text("open the door\nsave the file\n")
    (tmp_path / "set/a.en-de.de").write_text("close it\nsave the file\n")
    return evaluation_sets.list_files(tmp_path / "set")


def write_manifest(directory: Path, kind: str = "encoder", inputs: dict | None = None, **facts) -> Path:
    directory.mkdir(exist_ok=True)
    manifests.write(directory, kind, facts, inputs)
    return directory


def test_files_not_removed_from_the_training_text_are_named(test_files, tmp_path, caplog):
    digests = [evaluation_sets.digest(path) for path in test_files]
    encoder = write_manifest(tmp_path / "a", steps=9, reserved=digests)
    encoder_without_second_file = write_manifest(tmp_path / "b", steps=9, reserved=digests[:1])
    encoder_without_files = write_manifest(tmp_path / "c", steps=9)

    assert find_unreserved_files(encoder, test_files) == []
    assert not caplog.messages
    assert find_unreserved_files(encoder_without_second_file, test_files) == ["a.en-de.en"]
    assert find_unreserved_files(encoder_without_files, test_files) == ["a.en-de.de", "a.en-de.en"]
    assert "2 of its files (a.en-de.de, …) were not removed from its training text. Add them" in caplog.messages[-1]


def test_only_encoders_pretrained_here_are_checked(test_files, tmp_path):
    (tmp_path / "other").mkdir()

    assert find_unreserved_files(tmp_path / "other", test_files) == []
    assert find_unreserved_files(write_manifest(tmp_path / "untrained", steps=0), test_files) == []
    assert find_unreserved_files(write_manifest(tmp_path / "tuned", "classifier", steps=9), test_files) == []


def test_held_out_text_is_reserved_for_models_of_its_own_corpus_only(test_files, tmp_path):
    corpus = write_manifest(tmp_path / "corpus", "corpus", name="corpus")
    other_corpus = write_manifest(tmp_path / "other", "corpus", name="other")
    inputs = {"corpus": manifests.load(corpus)["digest"]}
    other_digests = [manifests.load(other_corpus)["digest"]]

    encoder = write_manifest(tmp_path / "a", inputs=inputs, steps=9)
    encoder_of_both = write_manifest(tmp_path / "b", inputs=inputs, steps=9, other_corpora=other_digests)

    assert find_unreserved_files(encoder, test_files, corpus) == []
    assert len(find_unreserved_files(encoder, test_files, other_corpus)) == 2
    assert len(find_unreserved_files(encoder_of_both, test_files, corpus)) == 2


def test_scores_name_the_test_files_that_were_not_reserved(test_files, tmp_path):
    model = save_model(tmp_path / "model")
    settings = TASKS["retrieval"].settings.parse({"data": str(tmp_path / "set")})
    scores_of_other_model = trials.measure_model(settings, model, model, {}, tmp_path / "other").to_dict()
    write_manifest(model, steps=9)

    scores = trials.measure_model(settings, model, model, {}, tmp_path / "ours").to_dict()

    assert scores == scores_of_other_model | {"not_reserved": ["a.en-de.de", "a.en-de.en"]}
    assert trials.read_scores(tmp_path / "ours" / trials.SCORES).details["not_reserved"] == scores["not_reserved"]


@pytest.mark.parametrize(
    ("task", "files", "settings", "expected_names"),
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
def test_each_task_lists_its_test_files(tmp_path, monkeypatch, task, files, settings, expected_names):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)

    test_files = TASKS[task].list_test_files(TASKS[task].settings.parse(settings))

    assert [path.name for path in test_files] == expected_names
