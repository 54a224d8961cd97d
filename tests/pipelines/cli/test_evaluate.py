"""`infoxlm evaluate` measures any model on one task, prints one table, and refuses what it cannot measure."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import Result
from transformers import XLMRobertaForSequenceClassification

from components.platform import sources
from infoxlm_core.errors import InputError
from infoxlm_core.results import trials
from pipelines.cli.evaluate import build_suite, derive_name, name_models
from tests.pipelines.commands import assert_refused, invoke
from tests.toys.models import save_model

WORDS = [f"{letter}{number}" for letter in "abc" for number in range(10)]
ENGLISH = [f"a{i} b{j}" for i in range(5) for j in range(4)]


def evaluate(model: Path, task: str, data: object, output: Path, *options: object) -> Result:
    return invoke("evaluate", "--model", model, "--task", task, "--data", data, "--output", output, *options)


@pytest.fixture
def encoder(tmp_path) -> Path:
    return save_model(tmp_path / "my encoder", words=WORDS)


@pytest.fixture
def tatoeba(tmp_path) -> Path:
    """Write a test set of twenty sentences in two languages."""
    folder = tmp_path / "v1"
    folder.mkdir()
    for code, word in {"deu": "c0", "swh": "c1 c2"}.items():
        (folder / f"tatoeba.{code}-eng.eng").write_text("".join(f"{line}\n" for line in ENGLISH))
        (folder / f"tatoeba.{code}-eng.{code}").write_text("".join(f"{line} {word}\n" for line in ENGLISH))
    return folder


def test_scores_of_an_encoder_are_shown_beside_published_ones(encoder, tatoeba, tmp_path):
    output = tmp_path / "out"

    result = evaluate(encoder, "tatoeba", tatoeba, output, "--vector", "mean@1")

    assert result.exit_code == 0, result.output
    scores = json.loads((output / "my-encoder/scores.json").read_text())
    our_row = next(line for line in result.stdout.splitlines() if "my-encoder" in line and "layer 1" in line)
    cells = [cell.strip() for cell in our_row.split("|")]
    assert cells[3] == f"{100 * scores['mean']['to_pivot']:.1f}"
    assert cells[4] == f"{100 * scores['languages']['deu']['to_pivot']:.1f}"
    rows_of_paper = [line for line in result.stdout.splitlines() if line.startswith("| InfoXLM ") and "mean" in line]
    for published in ("94.5", "36.2"):  # Table 2 of the paper: deu and swh
        assert published in rows_of_paper[0]
    assert (output / "suite.html").is_file()
    assert (output / "figures/tatoeba_by_layer.png").is_file()


def test_options_reach_the_task_and_a_second_model_is_compared(encoder, tatoeba, tmp_path):
    floor = save_model(tmp_path / "floor", words=WORDS, seed=1)
    output = tmp_path / "out"
    options = ["--languages", "de", "--vector", "cls@0", "--vector", "mean_no_special@last", "--prefix", "c9 "]
    options += ["--margin", "--set", "batch_size=3", "--floor", floor]

    result = evaluate(encoder, "pairs", tatoeba, output, *options)

    assert result.exit_code == 0, result.output
    task = json.loads((output / "suite.json").read_text())["tasks"]["pairs"]
    assert list(task["models"]) == ["my-encoder", "floor"]
    assert task["languages"] == ["deu"]
    assert task["settings"] == {
        "task": "retrieval", "data": str(tatoeba), "languages": ["de"], "vectors": ["cls@0", "mean_no_special@last"],
        "prefix": "c9 ", "margin": True, "batch_size": 3,
    }  # fmt: skip
    assert "InfoXLM" not in result.stdout  # there are no published results for the user's own pairs


@pytest.mark.parametrize(("prefix", "prefix_in_key"), [(None, ""), ("", None), ("query: ", "query: ")])
def test_empty_prefix_differs_from_no_prefix_which_keeps_the_key_of_earlier_trials(tatoeba, prefix, prefix_in_key):
    suite = build_suite({"e5": "e5"}, "tatoeba", str(tatoeba), {"prefix": prefix}, [])

    settings = trials.read_settings(trials.dump_settings(suite.tasks["tatoeba"].settings))

    assert settings.prefix == prefix
    assert settings.result_fields()["prefix"] == prefix_in_key


def test_failed_evaluation_leaves_nothing_and_can_be_repeated(encoder, tatoeba, tmp_path):
    floor = save_model(tmp_path / "floor", words=WORDS, num_hidden_layers=1)
    output = tmp_path / "out"

    result = evaluate(encoder, "pairs", tatoeba, output, "--vector", "mean@2", "--floor", floor)

    assert_refused(result, "floor has no vector mean@2. Give a layer from 0 to 1.")  # after the first model is measured
    assert not output.exists()
    assert evaluate(encoder, "pairs", tatoeba, output, "--vector", "mean@1", "--floor", floor).exit_code == 0


def test_held_out_text_gives_retrieval_and_perplexity(encoder, tmp_path):
    path = tmp_path / "corpus/held_out/en-de/one.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"source": ENGLISH, "target": [f"{line} c0" for line in ENGLISH]}), path)

    result = evaluate(encoder, "held-out", tmp_path / "corpus", tmp_path / "out")

    assert result.exit_code == 0, result.output
    assert "retrieval/served" in result.stdout
    assert "perplexity/mean" in result.stdout
    assert (tmp_path / "out/report.html").is_file()


def test_fine_tuned_classifier_is_scored(tmp_path):
    labels = ["contradiction", "entailment", "neutral"]
    label_names = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    model = save_model(tmp_path / "nli", XLMRobertaForSequenceClassification, words=WORDS, **label_names)
    data = tmp_path / "xnli"
    data.mkdir()
    for language in ("en", "de"):
        rows = [f"{line}\tc{i % 10}\t{labels[i % 3]}\n" for i, line in enumerate(ENGLISH)]
        (data / f"test-{language}.tsv").write_text("".join(rows))

    result = evaluate(model, "xnli", data, tmp_path / "out")

    assert result.exit_code == 0, result.output
    scores = json.loads((tmp_path / "out/nli/scores.json").read_text())
    predictions = pq.read_table(tmp_path / "out/nli/predictions.parquet").to_pylist()
    is_right = [row["label"] == row["predicted"] for row in predictions if row["language"] == "de"]
    assert scores["languages"]["de"]["accuracy"] == pytest.approx(sum(is_right) / len(is_right))
    assert "learning rates" not in result.stdout  # the training of the user's model is unknown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--task": "tatoba"}, "There is no task 'tatoba'. Give --task one of held-out, xnli, classification, mlqa"),
        ({"--data": "nowhere"}, "nowhere: no such file or directory: give a path, or s3://"),
        ({"--data": "s3://bucket"}, "infoxlm: InputError: s3://bucket: no S3 in this test"),
        ({"--task": "mlqa"}, "(XLMRobertaForMaskedLM) is not fine-tuned for question answering. Fine-tune and measure"),
        ({"--task": "xnli", "--data": "nowhere"}, "is not fine-tuned for classification"),
        ({"--model": "nowhere"}, "nowhere: no such file or directory: give a path, s3://"),
        ({"--languages": "14"}, "has no ar, bg, zh"),
        ({"--languages": "German"}, "--languages 'German' is not a list of languages. Give all, 14, 22"),
        ({"--vector": "mean@7"}, "has no vector mean@7. Give a layer from 0 to 2"),
        ({"--floor": ""}, " has no config.json"),
        ({"--set": "batch=3"}, "tasks.tatoeba.settings.batch: unknown name; known are batch_size, data, languages"),
        ({"--set": "batch_size=["}, "override 'batch_size': while parsing"),
    ],
)
def test_evaluation_that_cannot_work_is_refused(encoder, tatoeba, tmp_path, changes, message, monkeypatch):
    def refuse(source: str, **options):
        raise InputError(f"{source}: no S3 in this test")

    monkeypatch.setattr(sources, "_list_uri", refuse)
    options = {"--model": encoder, "--task": "tatoeba", "--data": tatoeba, "--output": tmp_path / "out"} | changes

    result = invoke("evaluate", *(part for option in options.items() for part in option))

    assert_refused(result, message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "floor", "names"),
    [
        ("/a/XLM-R", "/b/xlm-r", ["XLM-R", "xlm-r-floor"]),
        ("/a/one", "/b/two", ["one", "two"]),
        ("/a/one", None, ["one"]),
    ],
)
def test_models_have_different_names(model, floor, names):
    assert list(name_models(model, floor)) == names


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("models:/infoxlm@champion", "infoxlm-champion"),
        ("s3://bucket/some/xlm_r.base/", "xlm-r-base"),
        ("FacebookAI/xlm-roberta-base", "xlm-roberta-base"),
        ("..", "model"),
    ],
)
def test_model_is_named_after_the_last_part_of_its_source(source, name):
    assert derive_name(source) == name
