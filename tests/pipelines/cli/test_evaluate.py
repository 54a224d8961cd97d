"""`infoxlm evaluate`: one task, any model, one table; and one line for what cannot be measured."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import XLMRobertaForQuestionAnswering as Reader
from transformers import XLMRobertaForSequenceClassification as Classifier
from typer.testing import CliRunner

from components.platform import sources
from infoxlm_core.errors import InputError
from infoxlm_core.results import trials
from pipelines.cli import app
from pipelines.cli.evaluate import build_suite, derive_name, name_models
from tests.toys.models import save_model

WORDS = [f"{letter}{number}" for letter in "abc" for number in range(10)]
ENGLISH = [f"a{i} b{j}" for i in range(5) for j in range(4)]


def run(*arguments: object):
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


@pytest.fixture
def encoder(tmp_path) -> Path:
    return save_model(tmp_path / "my encoder", words=WORDS)


@pytest.fixture
def tatoeba(tmp_path) -> Path:
    folder = tmp_path / "v1"
    folder.mkdir()
    for code, word in {"deu": "c0", "swh": "c1 c2"}.items():
        (folder / f"tatoeba.{code}-eng.eng").write_text("".join(f"{line}\n" for line in ENGLISH))
        (folder / f"tatoeba.{code}-eng.{code}").write_text("".join(f"{line} {word}\n" for line in ENGLISH))
    return folder


def test_an_encoder_stands_beside_the_published_numbers(encoder, tatoeba, tmp_path):
    out = tmp_path / "out"

    result = run("--model", encoder, "--task", "tatoeba", "--data", tatoeba, "--vector", "mean@1", "--output", out)

    assert result.exit_code == 0, result.output
    scores = json.loads((out / "my-encoder/scores.json").read_text())
    ours = next(line for line in result.stdout.splitlines() if "my-encoder" in line and "layer 1" in line)
    shown = [cell.strip() for cell in ours.split("|")]
    assert shown[3] == f"{100 * scores['mean']['to_pivot']:.1f}"
    assert shown[4] == f"{100 * scores['languages']['deu']['to_pivot']:.1f}"
    infoxlm = next(line for line in result.stdout.splitlines() if line.startswith("| InfoXLM ") and "mean" in line)
    assert "94.5" in infoxlm and "36.2" in infoxlm  # its Table 2, deu and swh
    assert (out / "suite.html").is_file() and (out / "figures/tatoeba_by_layer.png").is_file()


def test_options_reach_the_task_and_a_floor_stands_below(encoder, tatoeba, tmp_path):
    floor, out = save_model(tmp_path / "floor", words=WORDS, seed=1), tmp_path / "out"

    result = run(
        "--model", encoder, "--task", "pairs", "--data", tatoeba, "--languages", "de", "--vector", "cls@0",
        "--vector", "mean_no_special@last", "--prefix", "c9 ", "--margin", "--set", "batch_size=3", "--floor", floor,
        "--output", out,
    )  # fmt: skip

    assert result.exit_code == 0, result.output
    summary = json.loads((out / "suite.json").read_text())
    task = summary["tasks"]["pairs"]
    assert list(task["models"]) == ["my-encoder", "floor"] and task["languages"] == ["deu"]
    assert task["settings"] == {
        "task": "retrieval", "data": str(tatoeba), "languages": ["de"], "vectors": ["cls@0", "mean_no_special@last"],
        "prefix": "c9 ", "margin": True, "batch_size": 3,
    }  # fmt: skip
    assert "InfoXLM" not in result.stdout  # pairs of one's own have no published numbers


def test_an_empty_prefix_is_a_setting_of_its_own_and_none_keeps_the_key_of_earlier_trials(tatoeba):
    settings = {}
    for prefix in (None, "", "query: "):
        suite = build_suite({"e5": "e5"}, "tatoeba", str(tatoeba), {"prefix": prefix}, [])
        settings[prefix] = trials.read_settings(trials.dump_settings(suite.tasks["tatoeba"].settings))

    assert {prefix: read.prefix for prefix, read in settings.items()} == {None: None, "": "", "query: ": "query: "}
    keys = [read.result_fields()["prefix"] for read in settings.values()]
    assert keys == ["", None, "query: "]


def test_held_out_text_of_a_prepared_corpus_gives_retrieval_and_perplexity(encoder, tmp_path):
    path = tmp_path / "corpus/held_out/en-de/one.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"source": ENGLISH, "target": [f"{line} c0" for line in ENGLISH]}), path)

    result = run("--model", encoder, "--task", "held-out", "--data", tmp_path / "corpus", "--output", tmp_path / "out")

    assert result.exit_code == 0, result.output
    assert "retrieval/served" in result.stdout and "perplexity/mean" in result.stdout
    assert (tmp_path / "out/report.html").is_file()


def test_a_classifier_that_was_fine_tuned_elsewhere_is_scored(tmp_path):
    names = dict(enumerate(["contradiction", "entailment", "neutral"]))
    model = save_model(
        tmp_path / "nli", Classifier, words=WORDS, id2label=names, label2id={v: k for k, v in names.items()}
    )
    folder = tmp_path / "xnli"
    folder.mkdir()
    for language in ("en", "de"):
        rows = [f"{line}\tc{i % 10}\t{names[i % 3]}\n" for i, line in enumerate(ENGLISH)]
        (folder / f"test-{language}.tsv").write_text("".join(rows))

    result = run("--model", model, "--task", "xnli", "--data", folder, "--output", tmp_path / "out")

    assert result.exit_code == 0, result.output
    scores = json.loads((tmp_path / "out/nli/scores.json").read_text())
    rows = pq.read_table(tmp_path / "out/nli/predictions.parquet").to_pylist()
    right = [row["label"] == row["predicted"] for row in rows if row["language"] == "de"]
    assert scores["languages"]["de"]["accuracy"] == pytest.approx(sum(right) / len(right))
    assert "learning rates" not in result.stdout  # nobody knows how it was trained


def test_a_reader_that_was_fine_tuned_elsewhere_is_scored(tmp_path):
    model = save_model(tmp_path / "reader", Reader, words=WORDS)
    folder = tmp_path / "xquad"
    folder.mkdir()
    for language in ("en", "de"):
        question = {"id": "q", "question": "a1 a2", "answers": [{"text": "b1", "answer_start": 3}]}
        paragraph = {"context": "c1 b1 a5 a6 a7 c2 c3 b9", "qas": [question]}
        content = {"version": "1.1", "data": [{"title": "t", "paragraphs": [paragraph]}]}
        (folder / f"xquad.{language}.json").write_text(json.dumps(content))

    arguments = ["--set", "max_tokens=32", "--set", "stride=8", "--set", "question_tokens=8"]
    result = run("--model", model, "--task", "xquad", "--data", folder, "--output", tmp_path / "out", *arguments)

    assert result.exit_code == 0, result.output
    scores = json.loads((tmp_path / "out/reader/scores.json").read_text())
    assert scores["counts"] == {"de": 1, "en": 1} and set(scores["transfer_gap"]) == {"f1", "exact_match"}
    assert json.loads((tmp_path / "out/reader/predictions/de.json").read_text()).keys() == {"q"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"--task": "tatoba"}, "There is no task 'tatoba'. Give --task one of held-out, xnli, classification, mlqa"),
        ({"--data": "nowhere"}, "nowhere: no such file or folder: give a path, or s3://"),
        ({"--data": "s3://bucket"}, "infoxlm: InputError: s3://bucket: not asked here"),
        ({"--task": "mlqa"}, "(XLMRobertaForMaskedLM) is not fine-tuned for question answering. Fine-tune and measure"),
        ({"--task": "xnli", "--data": "nowhere"}, "is not fine-tuned for classification"),
        ({"--model": "nowhere"}, "nowhere: no such file or directory: give a path, s3://"),
        ({"--languages": "14"}, "has no ar, bg, zh"),
        ({"--languages": "German"}, "--languages 'German' is not a list of languages. Give all, 14, 22"),
        ({"--vector": "mean@best@last"}, "vectors.0: String should match pattern"),
        ({"--vector": "mean@7"}, "has no vector mean@7. Give a layer from 0 to 2"),
        ({"--floor": ""}, " has no config.json"),
        ({"--set": "max_tokens=2"}, "retrieval.max_tokens: Input should be greater than 2, not 2"),
        ({"--set": "batch=3"}, "batch: unknown name; known are batch_size"),
        ({"--set": "batch_size"}, "override 'batch_size': write section.name=value"),
        ({"--set": "batch_size=["}, "--set batch_size=["),
    ],
)
def test_what_cannot_be_measured_is_one_line(encoder, tatoeba, tmp_path, changes, said, monkeypatch):
    def refuse(source: str, **options):
        raise InputError(f"{source}: not asked here")

    monkeypatch.setattr(sources, "_list", refuse)
    arguments = {"--model": encoder, "--task": "tatoeba", "--data": tatoeba, "--output": tmp_path / "out"} | changes

    result = run(*(part for pair in arguments.items() for part in pair))

    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("infoxlm: ")]
    assert said in line and "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_data_are_named_by_a_uri_with_both_its_slashes(encoder, tatoeba, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(sources, "fetch_data", lambda source, store: asked.append(source) or tatoeba)

    result = run("--model", encoder, "--task", "tatoeba", "--data", "s3://bucket/v1", "--output", tmp_path / "out")

    assert result.exit_code == 0 and asked == ["s3://bucket/v1"], result.output
    assert json.loads((tmp_path / "out/suite.json").read_text())["tasks"]["tatoeba"]["settings"]["data"] == asked[0]


def test_a_floor_whose_name_is_taken_gets_another():
    assert list(name_models("/a/XLM-R", "/b/xlm-r")) == ["XLM-R", "xlm-r-floor"]
    assert list(name_models("/a/floor", "/b/floor")) == ["floor", "floor-floor"]
    assert list(name_models("/a/one", "/b/two")) == ["one", "two"] and list(name_models("/a/one", None)) == ["one"]


def test_a_model_is_called_by_the_last_part_of_where_it_is():
    assert derive_name("models:/infoxlm@champion") == "infoxlm-champion"
    assert derive_name("s3://bucket/some/xlm_r.base/") == "xlm-r-base"
    assert derive_name("FacebookAI/xlm-roberta-base") == "xlm-roberta-base"
    assert derive_name("..") == "model"
