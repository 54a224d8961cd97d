"""The evaluation stage, on tiny random models and a corpus whose answers are known."""

import json
import math
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModel, AutoTokenizer
from transformers import XLMRobertaForSequenceClassification as Classifier

from infoxlm_core import manifests
from infoxlm_core.config import EvaluationConfig
from infoxlm_core.errors import InputError
from infoxlm_core.results import evidence
from infoxlm_core.stages.evaluation import evaluate
from infoxlm_core.tasks.embedding import embed_sentences
from tests.toys.models import save_model

CONFIG = EvaluationConfig(retrieval_pairs=20, perplexity_sentences=10, batch_size=8, max_tokens=32)
WORDS = [f"{letter}{number}" for letter in "abc" for number in range(10)]


def write_table(path: Path, **columns) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Two languages: German repeats the English words and adds one, Chinese shares none with the English."""
    root = tmp_path / "corpus"
    english = [f"a{i} b{j}" for i in range(5) for j in range(4)]
    write_table(root / "held_out/en-de/one.parquet", source=english[:10], target=[f"{s} c0" for s in english[:10]])
    write_table(root / "held_out/en-de/two.parquet", source=english[10:], target=[f"{s} c0" for s in english[10:]])
    chinese = [f"c{1 + i % 5} b{4 + i // 5}" for i in range(20)]
    write_table(root / "held_out/en-zh/one.parquet", source=english, target=chinese)
    return root


@pytest.fixture
def encoders(tmp_path) -> dict[str, Path]:
    return {
        "InfoXLM": save_model(tmp_path / "encoder", words=WORDS),
        "no training!": save_model(tmp_path / "floor", words=WORDS, seed=1, num_hidden_layers=1),
    }


@pytest.fixture
def classifier(tmp_path) -> Path:
    names = {0: "x", 1: "y"}
    directory = save_model(tmp_path / "classifier", Classifier, words=WORDS, id2label=names, label2id={"x": 0, "y": 1})
    write_table(
        directory / "test.parquet",
        text=["a1 b2", "a2", "b3", "c4"],
        label=list("xyxy"),
        language=["en", "en", "de", "de"],
    )
    return directory


def test_an_encoder_finds_copies_and_is_scored_beside_its_floor(corpus, encoders, tmp_path):
    metrics = evaluate(CONFIG, corpus, encoders, {}, tmp_path / "out")

    assert metrics["retrieval/de"] > 0.9 > metrics["retrieval/zh"]
    assert metrics["retrieval/best"] == pytest.approx((metrics["retrieval/de"] + metrics["retrieval/zh"]) / 2)
    assert metrics["retrieval/best"] == pytest.approx((metrics["retrieval/xx_en"] + metrics["retrieval/en_xx"]) / 2)
    assert (
        metrics["retrieval/no_overlap"] == metrics["retrieval/zh"]
    )  # every German pair shares a token, no Chinese one
    assert metrics["retrieval/chance"] == 1 / 20
    assert metrics["retrieval/best"] >= metrics["retrieval/contrast"]
    assert metrics["perplexity/mean"] == pytest.approx(sum(metrics[f"perplexity/{c}"] for c in ("en", "de", "zh")) / 3)
    assert metrics["no-training/retrieval/best_layer"] in (0, 1)
    assert all(math.isfinite(value) for value in metrics.values())
    assert not [name for name in metrics if "classification" in name]


def test_the_best_layer_is_the_highest_of_all_layers_and_poolings(corpus, encoders, tmp_path):
    manifests.write(encoders["InfoXLM"], "encoder", {"steps": 9})  # ours, and of these sentences it says nothing

    evaluate(CONFIG, corpus, encoders, {}, tmp_path / "out")

    scores = json.loads((tmp_path / "out/scores.json").read_text())
    marks = {name: one.get("not_reserved") for name, one in scores["models"].items()}
    assert marks == {"InfoXLM": ["one.parquet", "two.parquet", "one.parquet"], "no training!": None}
    assert "not taken out of the training text of InfoXLM" in (tmp_path / "out/report.html").read_text()
    for model in scores["models"].values():
        retrieval = model["tasks"]["retrieval"]
        mean, best = retrieval["mean"]["mean"], retrieval["best"]
        assert mean == max(max(shares) for shares in retrieval["by_layer"].values())
        assert mean == retrieval["by_layer"][best["pooling"]][best["layer"]]


def test_the_same_evaluation_twice_gives_the_same_files(corpus, encoders, tmp_path):
    first, second = (evaluate(CONFIG, corpus, encoders, {}, tmp_path / name) for name in ("one", "two"))

    assert first == second
    files = sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*") if p.is_file())
    assert {str(f) for f in files} >= {"scores.json", "report.html", "model_card.md", "figures/retrieval_by_layer.png"}
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


def test_classifiers_are_scored_by_language(corpus, encoders, classifier, tmp_path):
    metrics = evaluate(CONFIG, corpus, encoders, {"InfoXLM": classifier}, tmp_path / "out")

    assert metrics["classification/mean"] == (metrics["classification/en"] + metrics["classification/de"]) / 2
    assert metrics["classification/transfer_gap"] == metrics["classification/en"] - metrics["classification/de"]


def test_the_outcomes_by_question_give_back_the_scores(corpus, encoders, classifier, tmp_path):
    metrics = evaluate(CONFIG, corpus, encoders, {"InfoXLM": classifier}, tmp_path / "out")
    ours, floor = (evidence.Outcomes(evidence.read(tmp_path / "out/items.parquet", name), "en") for name in encoders)

    names = ("retrieval/best", "retrieval/no_overlap", "retrieval/contrast", "retrieval/xx_en", "retrieval/en_xx",
             "retrieval/de", "classification/mean", "classification/en")  # fmt: skip
    for name in names:
        answers = ours.answers(name)
        assert answers.groupby("language").mean().mean() == pytest.approx(metrics[name]), name
    best = floor.answers("retrieval/best")
    assert best.groupby("language").mean().mean() == pytest.approx(metrics["no-training/retrieval/best"])
    for name in ("perplexity/mean", "classification/transfer_gap", "retrieval/best_layer", "nothing"):
        with pytest.raises(InputError, match=f"{name} has no outcomes by question"):
            ours.answers(name)


def test_no_sentence_can_be_read_from_the_outcomes(corpus, encoders, classifier, tmp_path):
    evaluate(CONFIG, corpus, encoders, {"InfoXLM": classifier}, tmp_path / "out")

    table = pd.read_parquet(tmp_path / "out/items.parquet")
    assert not {"a0 b0", "a1 b2"} & set(table.astype(str).to_numpy().ravel())
    assert table[table["task"] == "retrieval"].groupby("question")["language"].nunique().eq(2).all()


def test_a_label_that_the_classifier_does_not_know_is_refused(corpus, encoders, classifier, tmp_path):
    write_table(classifier / "test.parquet", text=["a1"], label=["z"], language=["en"])

    with pytest.raises(InputError, match=r"test\.parquet: label 'z' is not one of the classifier's \(x, y\)"):
        evaluate(CONFIG, corpus, encoders, {"InfoXLM": classifier}, tmp_path / "out")


def test_an_encoder_without_language_model_head_or_contrast_layer_is_scored_on_retrieval(corpus, tmp_path):
    directory = save_model(tmp_path / "plain", AutoModelOf, words=WORDS)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "infoxlm"}))

    metrics = evaluate(CONFIG, corpus, {"plain": directory}, {}, tmp_path / "out")

    assert "retrieval/best" in metrics
    assert not {"retrieval/contrast", "perplexity/mean"} & set(metrics)


def AutoModelOf(config):
    return AutoModel.from_config(config)


def test_the_model_card_s_code_gives_the_vectors_of_embed_sentences(corpus, encoders, tmp_path):
    evaluate(CONFIG, corpus, encoders, {}, tmp_path / "out")
    card = (tmp_path / "out/model_card.md").read_text()
    code = card.split("```python\n")[1].split("```")[0].replace("path/to/this/model", str(encoders["InfoXLM"]))
    names: dict = {}

    exec(code, names)

    expected = embed_sentences(encoders["InfoXLM"], ["Save the file", "Datei speichern"])
    torch.testing.assert_close(names["vectors"], expected, atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(encoders["InfoXLM"]).mask_token == "<mask>"


def test_a_corpus_without_held_out_pairs_is_refused(tmp_path, encoders):
    write_table(
        tmp_path / "corpus/held_out/en-de/one.parquet",
        source=pa.array([], pa.string()),
        target=pa.array([], pa.string()),
    )

    for root in (tmp_path / "nowhere", tmp_path / "corpus"):
        with pytest.raises(InputError, match=r"has no held-out pairs\. Give a prepared corpus"):
            evaluate(CONFIG, root, encoders, {}, tmp_path / "out")
