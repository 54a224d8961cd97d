"""The evaluation stage, on tiny random models and a corpus whose answers are known."""

import json
import math
import re
import shutil
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, XLMRobertaForSequenceClassification

from infoxlm_core import manifests
from infoxlm_core.config import AlignedSetConfig, EvaluationConfig
from infoxlm_core.errors import InputError
from infoxlm_core.results import evidence
from infoxlm_core.results.bootstrap import paired_bootstrap
from infoxlm_core.stages.evaluation import evaluate
from infoxlm_core.tasks.embedding import embed_sentences
from tests.toys.models import save_model

CONFIG = EvaluationConfig(retrieval_pairs=60, perplexity_sentences=10, batch_size=8, max_tokens=32)
WORDS = [f"{letter}{number}" for letter in "abc" for number in range(10)]
ENGLISH = [f"a{first} b{second}" for first in range(10) for second in range(6)]
CHINESE = [f"c{9 - first} b{(second + 3) % 10}" for first in range(10) for second in range(6)]
WARNING = "pairs of zh: too_short drops 30 % of 10 rows: <check> the filter"
UNTRAINED = "<b>no training!"


def write_table(path: Path, **columns) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


def read_outcomes(output: Path, model: str) -> evidence.Outcomes:
    return evidence.Outcomes(evidence.read(output / "items.parquet", model), "en")


def read_headings(output: Path) -> list[str]:
    return re.findall("<h2>(.*?)</h2>", (output / "report.html").read_text())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Two languages: German repeats the English words and adds one, Chinese shares no pair of words with English."""
    root = tmp_path_factory.mktemp("corpus")
    german = [f"{sentence} c0" for sentence in ENGLISH]
    write_table(root / "held_out/en-de/one.parquet", source=ENGLISH[:10], target=german[:10])
    write_table(root / "held_out/en-de/two.parquet", source=ENGLISH[10:], target=german[10:])
    write_table(root / "held_out/en-zh/one.parquet", source=ENGLISH, target=CHINESE)
    file = {"corpus": "web", "kind": "pairs", "file": "web.tsv", "read": 10, "kept": 7, "dropped": {"too_short": 3}}
    report = {"files": [file | {"language": code} for code in ("de", "zh")], "warnings": [WARNING]}
    (root / "report.json").write_text(json.dumps(report))
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """An encoder with training curves, whose manifest reserves no sentences for evaluation."""
    encoder = save_model(tmp_path_factory.mktemp("trained") / "encoder", words=WORDS)
    lines = [{"step": step, "loss/mlm": 9.0 - step, "xlco/accuracy": step / 10} for step in (1, 2)]
    (encoder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifests.write(encoder, "encoder", {"steps": 9})
    return encoder


@pytest.fixture(scope="module")
def encoders(trained, tmp_path_factory) -> dict[str, Path]:
    """The trained encoder, and an untrained one with fewer layers."""
    untrained = save_model(tmp_path_factory.mktemp("untrained") / "floor", words=WORDS, seed=1, num_hidden_layers=1)
    return {"InfoXLM": trained, UNTRAINED: untrained}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "classifier"
    labels = {"id2label": {0: "x", 1: "y"}, "label2id": {"x": 0, "y": 1}}
    save_model(directory, XLMRobertaForSequenceClassification, words=WORDS, **labels)
    texts = ["a1 b2", "a2", "b3", "c4"]
    write_table(directory / "test.parquet", text=texts, label=list("xyxy"), language=["en", "en", "de", "de"])
    return directory


@pytest.fixture(scope="module")
def evaluation(corpus, encoders, classifier, tmp_path_factory) -> tuple[Path, dict[str, float]]:
    """The output of an evaluation, and its metrics."""
    output = tmp_path_factory.mktemp("evaluation")
    return output, evaluate(CONFIG, corpus, encoders, {"InfoXLM": classifier}, output)


def test_metrics_are_means_over_languages_and_directions(evaluation):
    _, metrics = evaluation

    assert metrics["retrieval/de"] > 0.5 > metrics["retrieval/zh"]
    assert metrics["retrieval/served"] == pytest.approx((metrics["retrieval/de"] + metrics["retrieval/zh"]) / 2)
    assert metrics["retrieval/served"] == pytest.approx((metrics["retrieval/xx_en"] + metrics["retrieval/en_xx"]) / 2)
    assert metrics["retrieval/no_overlap"] == metrics["retrieval/zh"]  # every German pair shares a token
    assert metrics["retrieval/chance"] == 1 / 60
    assert "retrieval/centred" not in metrics  # the corpus has no training text
    assert metrics["perplexity/mean"] == pytest.approx(sum(metrics[f"perplexity/{c}"] for c in ("en", "de", "zh")) / 3)
    assert metrics["classification/mean"] == (metrics["classification/en"] + metrics["classification/de"]) / 2
    assert metrics["classification/transfer_gap"] == metrics["classification/en"] - metrics["classification/de"]
    assert metrics["b-no-training/retrieval/best_layer"] in (0, 1)
    assert not [name for name in metrics if name.startswith("b-no-training/classification")]
    assert all(math.isfinite(value) for value in metrics.values())


def test_served_scores_are_those_of_the_contrast_layer_and_best_scores_the_highest(evaluation):
    output, _ = evaluation
    scores = read_json(output / "scores.json")

    assert (scores["model"], scores["pivot"]) == ("InfoXLM", "en")
    assert scores["test_set"].startswith("sha256:")
    assert scores["models"]["InfoXLM"]["not_reserved"] == ["one.parquet", "two.parquet", "one.parquet"]
    assert "not_reserved" not in scores["models"][UNTRAINED]
    for model in scores["models"].values():
        retrieval = model["tasks"]["retrieval"]
        best = retrieval["best"]
        assert retrieval["served"] == {"layer": 1, "pooling": "mean"}
        assert retrieval["mean"]["mean"] == retrieval["by_layer"]["mean"][1]
        assert best["mean"] == max(max(shares) for shares in retrieval["by_layer"].values())
        assert best["mean"] == retrieval["by_layer"][best["pooling"]][best["layer"]]


def test_report_shows_all_scores_with_escaped_names_and_needs_no_network(evaluation):
    output, metrics = evaluation

    html = (output / "report.html").read_text()
    assert read_headings(output) == ["Summary", "Retrieval", "Perplexity", "Classification", "Transfer gap",
                                     "Map of the sentences", "Test pairs", "Training", "Training text",
                                     "Settings"]  # fmt: skip
    assert f"{100 * metrics['retrieval/served']:.2f}" in html
    assert "<td>too short</td><td>6</td>" in html
    assert "&lt;b&gt;no training!" in html and "<b>no" not in html
    assert "not removed from the training text of InfoXLM" in html
    assert WARNING.replace("<check>", "&lt;check&gt;") in html
    assert WARNING in (output / "report.md").read_text()
    assert "<script" not in html and "<link" not in html
    assert all(source.startswith("data:image/svg+xml;base64,") for source in re.findall(r'src="([^"]*)"', html))
    assert {path.stem for path in (output / "figures").glob("*.png")} == {
        "retrieval_by_layer", "retrieval", "perplexity", "classification", "transfer-gap", "map", "training",
    }  # fmt: skip
    by_layer = pd.read_csv(output / "tables/retrieval-by-layer.csv")
    assert list(by_layer["detail"]) == ["mean of tokens", "[CLS]"] * 2
    assert pd.isna(by_layer["2"][2])  # the untrained model has fewer layers


def test_repeated_evaluation_writes_the_same_bytes(corpus, encoders, classifier, evaluation, tmp_path):
    output, metrics = evaluation

    assert evaluate(CONFIG, corpus, encoders, {"InfoXLM": classifier}, tmp_path) == metrics

    files = sorted(path.relative_to(output) for path in output.rglob("*") if path.is_file())
    assert {"scores.json", "items.parquet", "report.html", "model_card.md"} <= {str(file) for file in files}
    for file in files:
        assert (output / file).read_bytes() == (tmp_path / file).read_bytes(), file


def test_outcomes_of_single_questions_give_the_scores_and_contain_no_sentences(evaluation):
    output, metrics = evaluation
    outcomes = read_outcomes(output, "InfoXLM")

    for name in ("retrieval/served", "retrieval/no_overlap", "retrieval/best", "retrieval/xx_en", "retrieval/en_xx",
                 "retrieval/de", "classification/mean", "classification/en"):  # fmt: skip
        answers = outcomes.score_questions(name)
        assert answers.groupby("language").mean().mean() == pytest.approx(metrics[name]), name
    answers = read_outcomes(output, UNTRAINED).score_questions("retrieval/served")
    assert answers.groupby("language").mean().mean() == pytest.approx(metrics["b-no-training/retrieval/served"])
    for name in ("perplexity/mean", "classification/transfer_gap", "retrieval/best_layer", "nothing"):
        with pytest.raises(InputError, match=f"no outcomes of {name} by question"):
            outcomes.score_questions(name)
    table = pd.read_parquet(output / "items.parquet")
    assert {*ENGLISH, *CHINESE}.isdisjoint(table.astype(str).to_numpy().ravel())
    assert table[table["task"] == "retrieval"].groupby("question")["language"].nunique().eq(2).all()


def test_centred_vectors_have_the_mean_of_the_training_text_removed(corpus, trained, evaluation, tmp_path):
    shutil.copytree(corpus, tmp_path / "corpus")
    texts = [f"c{first} b{second}" for first in range(10) for second in range(10)]
    write_table(tmp_path / "corpus/pairs/en-zh/one.parquet", source=["a1 b2", "a3"], target=["c1", "c2 b2"])
    write_table(tmp_path / "corpus/mono/zh/one.parquet", text=texts)
    write_table(tmp_path / "corpus/mono/de/one.parquet", text=["a1 c0", "a2 c0"])

    metrics = evaluate(CONFIG, tmp_path / "corpus", {"InfoXLM": trained}, {}, tmp_path / "out")

    def embed_centred(sentences: list[str], training_text: list[str]) -> torch.Tensor:
        centre = embed_sentences(trained, training_text).double().mean(dim=0)
        return F.normalize(embed_sentences(trained, sentences).double() - centre, dim=1)

    cosines = embed_centred(ENGLISH, ["a1 b2", "a3"]) @ embed_centred(CHINESE, [*texts, "c1", "c2 b2"]).T
    directions = [(cosines.argmax(dim=dim) == torch.arange(60)).double().mean().item() for dim in (0, 1)]
    retrieval = read_json(tmp_path / "out/scores.json")["models"]["InfoXLM"]["tasks"]["retrieval"]
    assert retrieval["centred"]["languages"]["zh"]["mean"] == pytest.approx(sum(directions) / 2, abs=0.02)
    assert metrics["retrieval/centred"] == retrieval["centred"]["mean"] != metrics["retrieval/served"]
    assert metrics["retrieval/served"] == evaluation[1]["retrieval/served"]


def test_label_that_the_classifier_does_not_know_is_refused(corpus, encoders, classifier, tmp_path):
    other_classifier = shutil.copytree(classifier, tmp_path / "classifier")
    write_table(other_classifier / "test.parquet", text=["a1"], label=["z"], language=["en"])

    with pytest.raises(InputError, match=r"test\.parquet: label 'z' is not one of the classifier's \(x, y\)"):
        evaluate(CONFIG, corpus, encoders, {"InfoXLM": other_classifier}, tmp_path / "out")


def test_encoder_without_language_model_head_and_contrast_layer_is_scored_on_retrieval(corpus, tmp_path):
    encoder = save_model(tmp_path / "plain", AutoModel.from_config, words=WORDS)
    settings = read_json(encoder / "config.json")
    del settings["infoxlm"]
    (encoder / "config.json").write_text(json.dumps(settings))

    metrics = evaluate(CONFIG, corpus, {"plain": encoder}, {}, tmp_path / "out")

    assert "perplexity/mean" not in metrics
    retrieval = read_json(tmp_path / "out/scores.json")["models"]["plain"]["tasks"]["retrieval"]
    assert retrieval["served"] == {"layer": 2, "pooling": "mean"}
    assert metrics["retrieval/served"] == retrieval["by_layer"]["mean"][2]
    assert "hidden_states[2]" in (tmp_path / "out/model_card.md").read_text()
    served_vectors = embed_sentences(encoder, ["a1 b2"])
    torch.testing.assert_close(served_vectors, embed_sentences(encoder, ["a1 b2"], 2, "mean"), atol=0, rtol=0)
    headings = ["Summary", "Retrieval", "Map of the sentences", "Test pairs", "Training text", "Settings"]
    assert read_headings(tmp_path / "out") == headings


def test_model_card_has_languages_scores_counts_and_code_that_computes_the_vectors(trained, evaluation):
    output, metrics = evaluation
    card = (output / "model_card.md").read_text()
    code = card.split("```python\n")[1].split("```")[0].replace("path/to/this/model", str(trained))
    variables: dict = {}

    exec(code, variables)

    expected_vectors = embed_sentences(trained, ["Save the file", "Datei speichern"])
    torch.testing.assert_close(variables["vectors"], expected_vectors, atol=1e-5, rtol=0)
    assert card.startswith('---\nlanguage:\n- "en"\n- "de"\n- "zh"\n')
    assert f"| InfoXLM | 1 | mean | {100 * metrics['retrieval/served']:.1f} |" in card
    assert f"| {UNTRAINED} |" in card
    assert "| language | pairs |\n|---|---|\n| de | 7 |\n| zh | 7 |\n" in card


@pytest.mark.parametrize("folder", ["missing", "corpus"])
def test_corpus_without_held_out_pairs_is_refused(tmp_path, encoders, folder):
    empty = pa.array([], pa.string())
    write_table(tmp_path / "corpus/held_out/en-de/one.parquet", source=empty, target=empty)

    with pytest.raises(InputError, match=r"has no held-out pairs\. Give a prepared corpus"):
        evaluate(CONFIG, tmp_path / folder, encoders, {}, tmp_path / "out")


def test_run_with_a_start_and_a_guard_shows_what_the_training_changed(corpus, encoders, tmp_path):
    merged = shutil.copytree(encoders["InfoXLM"], tmp_path / "merged")
    curve = [{"weight": weight, "held_out": 0.9, "guard": 0.8, "guard_lower": 0.0} for weight in (0.0, 0.5)]
    merge = {"weight": 0.5, "passed": True, "largest_loss": 0.005, "curve": curve}
    manifests.write(merged, "encoder", {"steps": 9, "merge": merge})
    config = CONFIG.model_copy(update={"guard": AlignedSetConfig(data=str(corpus))})
    output = tmp_path / "out"

    metrics = evaluate(config, corpus, {"InfoXLM": merged, "start": encoders[UNTRAINED]}, {}, output)

    assert metrics["guard/zh"] == metrics["retrieval/zh"]
    assert metrics["guard/mean"] == metrics["retrieval/served"]
    for metric in ("guard/mean", "guard/zh"):
        answers = read_outcomes(output, "InfoXLM").score_questions(metric)
        interval = paired_bootstrap(answers, read_outcomes(output, "start").score_questions(metric))
        assert interval.gain == pytest.approx(metrics[metric] - metrics[f"start/{metric}"])
    assert interval.questions == 60
    assert evidence.find_start(output / "items.parquet") == "start"
    scores = read_json(output / "scores.json")
    assert scores["models"]["InfoXLM"]["tasks"]["guard"]["not_reserved"]  # the manifest does not mention the files
    assert [row["name"] for row in scores["before_after"]["guard"]] == ["mean", "zh", "de"]
    assert scores["before_after"]["held_out"][0]["fixed"] > 0
    assert read_headings(output)[1:5] == [
        "Before and after", "Broken and fixed pairs", "Nearest sentences", "Merge with the start",
    ]  # fmt: skip
    assert (output / "figures/merge.png").is_file()
    html = (output / "report.html").read_text()
    assert 'alt="merge"' in html
    assert sum(sentence in html for sentence in ENGLISH) > 10
    card = (output / "model_card.md").read_text()
    assert "### Before and after the training" in card and "the weight of this encoder is 0.5" in card
    for file in ("model_card.md", "scores.json"):  # they are stored with a registered model
        assert not any(sentence in (output / file).read_text() for sentence in ENGLISH), file
