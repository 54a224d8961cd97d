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
from transformers import AutoModel, AutoTokenizer
from transformers import XLMRobertaForSequenceClassification as Classifier

from infoxlm_core import manifests
from infoxlm_core.config import AlignedSetConfig, EvaluationConfig
from infoxlm_core.errors import InputError
from infoxlm_core.results import evidence
from infoxlm_core.stages.evaluation import evaluate
from infoxlm_core.tasks.embedding import embed_sentences
from tests.toys.models import save_model

CONFIG = EvaluationConfig(retrieval_pairs=60, perplexity_sentences=10, batch_size=8, max_tokens=32)
WORDS = [f"{letter}{number}" for letter in "abc" for number in range(10)]
WARNING = "pairs of zh: too_short drops 30 % of 10 rows: <check> the filter"
NAMES = ("InfoXLM", "<b>no training!")


def write_table(path: Path, **columns) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Two languages: German repeats the English words and adds one, Chinese shares none with the English."""
    root = tmp_path_factory.mktemp("corpus")
    english = [f"a{i} b{j}" for i in range(10) for j in range(6)]
    write_table(root / "held_out/en-de/one.parquet", source=english[:10], target=[f"{s} c0" for s in english[:10]])
    write_table(root / "held_out/en-de/two.parquet", source=english[10:], target=[f"{s} c0" for s in english[10:]])
    chinese = [f"c{9 - i} b{(j + 3) % 10}" for i in range(10) for j in range(6)]
    write_table(root / "held_out/en-zh/one.parquet", source=english, target=chinese)
    file = {"corpus": "web", "kind": "pairs", "file": "web.tsv", "read": 10, "kept": 7, "dropped": {"too_short": 3}}
    report = {"files": [file | {"language": code} for code in ("de", "zh")], "warnings": [WARNING]}
    (root / "report.json").write_text(json.dumps(report))
    return root


@pytest.fixture(scope="module")
def encoders(tmp_path_factory) -> dict[str, Path]:
    """An encoder that was trained by us, with curves, and an untrained one."""
    root = tmp_path_factory.mktemp("encoders")
    trained = save_model(root / "encoder", words=WORDS)
    lines = [{"step": step, "loss/mlm": 9.0 - step, "xlco/accuracy": step / 10} for step in (1, 2)]
    (trained / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifests.write(trained, "encoder", {"steps": 9})  # says nothing of sentences that were reserved
    return dict(
        zip(NAMES, (trained, save_model(root / "floor", words=WORDS, seed=1, num_hidden_layers=1)), strict=True)
    )


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    names = {0: "x", 1: "y"}
    directory = tmp_path_factory.mktemp("models") / "classifier"
    save_model(directory, Classifier, words=WORDS, id2label=names, label2id={"x": 0, "y": 1})
    write_table(
        directory / "test.parquet",
        text=["a1 b2", "a2", "b3", "c4"],
        label=list("xyxy"),
        language=["en", "en", "de", "de"],
    )
    return directory


@pytest.fixture(scope="module")
def evaluated(corpus, encoders, classifier, tmp_path_factory) -> tuple[Path, dict[str, float]]:
    """The output of an evaluation, and its metrics."""
    output = tmp_path_factory.mktemp("evaluation")
    return output, evaluate(CONFIG, corpus, encoders, {"InfoXLM": classifier}, output)


def test_an_encoder_finds_copies_and_is_scored_beside_its_floor(evaluated):
    _, metrics = evaluated

    assert metrics["retrieval/de"] > 0.5 > metrics["retrieval/zh"]
    assert metrics["retrieval/served"] == pytest.approx((metrics["retrieval/de"] + metrics["retrieval/zh"]) / 2)
    assert metrics["retrieval/served"] == pytest.approx((metrics["retrieval/xx_en"] + metrics["retrieval/en_xx"]) / 2)
    assert metrics["retrieval/no_overlap"] == metrics["retrieval/zh"]  # every German pair shares a token
    assert metrics["retrieval/chance"] == 1 / 60
    assert metrics["retrieval/best"] >= metrics["retrieval/served"]
    assert metrics["perplexity/mean"] == pytest.approx(sum(metrics[f"perplexity/{c}"] for c in ("en", "de", "zh")) / 3)
    assert metrics["b-no-training/retrieval/best_layer"] in (0, 1)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["classification/mean"] == (metrics["classification/en"] + metrics["classification/de"]) / 2
    assert metrics["classification/transfer_gap"] == metrics["classification/en"] - metrics["classification/de"]
    assert not [name for name in metrics if name.startswith("b-no-training/classification")]


def test_the_scores_are_those_of_the_contrast_layer_and_the_best_layer_is_the_highest(evaluated):
    scores = json.loads((evaluated[0] / "scores.json").read_text())

    assert (scores["model"], scores["pivot"]) == ("InfoXLM", "en") and scores["test_set"].startswith("sha256:")
    marks = {name: model.get("not_reserved") for name, model in scores["models"].items()}
    assert list(marks.values()) == [["one.parquet", "two.parquet", "one.parquet"], None]
    for model in scores["models"].values():
        retrieval = model["tasks"]["retrieval"]
        served, best = retrieval["served"], retrieval["best"]
        assert served == {"layer": 1, "pooling": "mean"}  # the contrast layer
        assert retrieval["mean"]["mean"] == retrieval["by_layer"]["mean"][1]
        assert best["mean"] == max(max(shares) for shares in retrieval["by_layer"].values())
        assert best["mean"] == retrieval["by_layer"][best["pooling"]][best["layer"]]


def test_the_report_shows_all_scores_escapes_names_and_needs_no_network(evaluated):
    output, metrics = evaluated

    html = (output / "report.html").read_text()
    headings = re.findall("<h2>(.*?)</h2>", html)
    assert headings == ["Headlines", "retrieval", "perplexity", "classification", "Transfer gap",
                        "Map of the sentences", "Questions", "Training", "Text", "Settings"]  # fmt: skip
    assert f"{100 * metrics['retrieval/served']:.2f}" in html and "<td>too short</td><td>6</td>" in html
    assert "&lt;b&gt;no training!" in html and "<b>no" not in html
    assert "not removed from the training text of InfoXLM" in html
    assert WARNING.replace("<check>", "&lt;check&gt;") in html and WARNING in (output / "report.md").read_text()
    assert "<script" not in html and "<link" not in html
    assert all(source.startswith("data:image/svg+xml;base64,") for source in re.findall(r'src="([^"]*)"', html))
    figures = {path.stem for path in (output / "figures").glob("*.png")}
    assert figures == {
        "retrieval_by_layer", "retrieval", "perplexity", "classification", "transfer-gap", "map", "training",
    }  # fmt: skip
    by_layer = pd.read_csv(output / "tables/retrieval-by-layer.csv")
    assert list(by_layer["detail"]) == ["mean of tokens", "[CLS]"] * 2
    assert pd.isna(by_layer["2"][2])  # the floor has fewer layers


def test_the_same_evaluation_twice_gives_the_same_files(corpus, encoders, classifier, evaluated, tmp_path):
    output, metrics = evaluated

    assert evaluate(CONFIG, corpus, encoders, {"InfoXLM": classifier}, tmp_path) == metrics

    files = sorted(path.relative_to(output) for path in output.rglob("*") if path.is_file())
    assert {"scores.json", "items.parquet", "report.html", "model_card.md"} <= {str(file) for file in files}
    for file in files:
        assert (output / file).read_bytes() == (tmp_path / file).read_bytes(), file


def test_the_outcomes_by_question_give_back_the_scores(evaluated):
    output, metrics = evaluated
    ours, floor = (evidence.Outcomes(evidence.read(output / "items.parquet", name), "en") for name in NAMES)

    names = ("retrieval/served", "retrieval/no_overlap", "retrieval/best", "retrieval/xx_en", "retrieval/en_xx",
             "retrieval/de", "classification/mean", "classification/en")  # fmt: skip
    for name in names:
        answers = ours.score_questions(name)
        assert answers.groupby("language").mean().mean() == pytest.approx(metrics[name]), name
    best = floor.score_questions("retrieval/served")
    assert best.groupby("language").mean().mean() == pytest.approx(metrics["b-no-training/retrieval/served"])
    for name in ("perplexity/mean", "classification/transfer_gap", "retrieval/best_layer", "nothing"):
        with pytest.raises(InputError, match=f"no outcomes of {name} by question"):
            ours.score_questions(name)


def test_centred_vectors_have_the_mean_of_training_text_removed_and_never_that_of_questions(
    corpus, encoders, evaluated, tmp_path
):
    shutil.copytree(corpus, tmp_path / "corpus")
    texts = [f"c{i} b{j}" for i in range(10) for j in range(10)]
    write_table(tmp_path / "corpus/pairs/en-zh/one.parquet", source=["a1 b2", "a3"], target=["c1", "c2 b2"])
    write_table(tmp_path / "corpus/mono/zh/one.parquet", text=texts)
    write_table(tmp_path / "corpus/mono/de/one.parquet", text=["a1 c0", "a2 c0"])

    metrics = evaluate(CONFIG, tmp_path / "corpus", {"InfoXLM": encoders["InfoXLM"]}, {}, tmp_path / "out")

    def embed(texts: list[str]) -> torch.Tensor:
        return embed_sentences(encoders["InfoXLM"], texts).double()

    centres = {"en": embed(["a1 b2", "a3"]).mean(dim=0), "zh": embed([*texts, "c1", "c2 b2"]).mean(dim=0)}
    questions = pd.read_parquet(corpus / "held_out/en-zh/one.parquet")
    english = torch.nn.functional.normalize(embed(questions["source"].tolist()) - centres["en"], dim=1)
    chinese = torch.nn.functional.normalize(embed(questions["target"].tolist()) - centres["zh"], dim=1)
    cosines, right = english @ chinese.T, torch.arange(60)
    expected = ((cosines.argmax(dim=1) == right).double().mean() + (cosines.argmax(dim=0) == right).double().mean()) / 2
    scores = json.loads((tmp_path / "out/scores.json").read_text())
    centred = scores["models"]["InfoXLM"]["tasks"]["retrieval"]["centred"]
    assert centred["languages"]["zh"]["mean"] == pytest.approx(expected.item(), abs=0.02)
    assert metrics["retrieval/centred"] == centred["mean"] != metrics["retrieval/served"]
    assert metrics["retrieval/served"] == evaluated[1]["retrieval/served"]
    assert "retrieval/centred" not in evaluated[1]  # its corpus has no training text


def test_no_sentence_can_be_read_from_the_outcomes(evaluated):
    table = pd.read_parquet(evaluated[0] / "items.parquet")

    assert not {"a0 b0", "a1 b2"} & set(table.astype(str).to_numpy().ravel())
    assert table[table["task"] == "retrieval"].groupby("question")["language"].nunique().eq(2).all()


def test_a_label_that_the_classifier_does_not_know_is_refused(corpus, encoders, classifier, tmp_path):
    other = shutil.copytree(classifier, tmp_path / "classifier")
    write_table(other / "test.parquet", text=["a1"], label=["z"], language=["en"])

    with pytest.raises(InputError, match=r"test\.parquet: label 'z' is not one of the classifier's \(x, y\)"):
        evaluate(CONFIG, corpus, encoders, {"InfoXLM": other}, tmp_path / "out")


def test_an_encoder_without_language_model_head_or_contrast_layer_is_scored_on_retrieval(corpus, tmp_path):
    directory = save_model(tmp_path / "plain", AutoModel.from_config, words=WORDS)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "infoxlm"}))

    metrics = evaluate(CONFIG, corpus, {"plain": directory}, {}, tmp_path / "out")

    assert "perplexity/mean" not in metrics
    retrieval = json.loads((tmp_path / "out/scores.json").read_text())["models"]["plain"]["tasks"]["retrieval"]
    assert retrieval["served"] == {"layer": 2, "pooling": "mean"}  # the vectors of embed and of the model card
    assert metrics["retrieval/served"] == retrieval["by_layer"]["mean"][2]
    assert "hidden_states[2]" in (tmp_path / "out/model_card.md").read_text()
    torch.testing.assert_close(
        embed_sentences(directory, ["a1 b2"]), embed_sentences(directory, ["a1 b2"], 2, "mean"), atol=0, rtol=0
    )
    headings = re.findall("<h2>(.*?)</h2>", (tmp_path / "out/report.html").read_text())
    assert headings == ["Headlines", "retrieval", "Map of the sentences", "Questions", "Text", "Settings"]


def test_the_code_of_the_model_card_gives_the_vectors_of_embed_sentences(encoders, evaluated):
    card = (evaluated[0] / "model_card.md").read_text()
    code = card.split("```python\n")[1].split("```")[0].replace("path/to/this/model", str(encoders["InfoXLM"]))
    names: dict = {}

    exec(code, names)

    expected = embed_sentences(encoders["InfoXLM"], ["Save the file", "Datei speichern"])
    torch.testing.assert_close(names["vectors"], expected, atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(encoders["InfoXLM"]).mask_token == "<mask>"


def test_the_model_card_opens_with_its_languages_and_lists_scores_and_counts(evaluated):
    output, metrics = evaluated

    card = (output / "model_card.md").read_text()
    best = f"{100 * metrics['retrieval/served']:.1f}"
    assert card.startswith('---\nlanguage:\n- "en"\n- "de"\n- "zh"\n')
    assert re.search(rf"\| InfoXLM \| 1 \| mean \| {best} \|", card) and "| <b>no training! |" in card
    assert "| language | pairs |\n|---|---|\n| de | 7 |\n| zh | 7 |\n" in card


def test_a_corpus_without_held_out_pairs_is_refused(tmp_path, encoders):
    empty = pa.array([], pa.string())
    write_table(tmp_path / "corpus/held_out/en-de/one.parquet", source=empty, target=empty)

    for root in (tmp_path / "nowhere", tmp_path / "corpus"):
        with pytest.raises(InputError, match=r"has no held-out pairs\. Give a prepared corpus"):
            evaluate(CONFIG, root, encoders, {}, tmp_path / "out")


def test_the_guard_is_measured_for_the_encoder_and_its_start_and_compared_question_by_question(
    corpus, encoders, tmp_path
):
    models = {"InfoXLM": encoders["InfoXLM"], "start": encoders[NAMES[1]]}
    guard = AlignedSetConfig(data=str(corpus), languages=("zh",))

    metrics = evaluate(CONFIG.model_copy(update={"guard": guard}), corpus, models, {}, tmp_path / "out")

    assert metrics["guard/mean"] == metrics["guard/zh"] == metrics["retrieval/zh"]
    ours, start = (evidence.Outcomes(evidence.read(tmp_path / "out/items.parquet", name), "en") for name in models)
    for metric in ("guard/mean", "guard/zh"):
        interval = evidence.paired_bootstrap(ours.score_questions(metric), start.score_questions(metric))
        assert interval.questions == 60
        assert interval.gain == pytest.approx(metrics[metric] - metrics[f"start/{metric}"])
    assert evidence.find_start(tmp_path / "out/items.parquet") == "start"
    guard_scores = json.loads((tmp_path / "out/scores.json").read_text())["models"]["InfoXLM"]["tasks"]["guard"]
    assert guard_scores["not_reserved"]  # the manifest does not mention the files


def test_a_run_with_a_start_shows_what_changed_and_no_sentence_leaves_with_the_model(corpus, encoders, tmp_path):
    merged = shutil.copytree(encoders["InfoXLM"], tmp_path / "merged")
    curve = [{"weight": weight, "held_out": 0.9, "guard": 0.8, "guard_lower": 0.0} for weight in (0.0, 0.5)]
    merge = {"weight": 0.5, "passed": True, "largest_loss": 0.005, "curve": curve}
    manifests.write(merged, "encoder", {"steps": 9, "merge": merge})
    config = CONFIG.model_copy(update={"guard": AlignedSetConfig(data=str(corpus))})

    evaluate(config, corpus, {"InfoXLM": merged, "start": encoders[NAMES[1]]}, {}, tmp_path / "out")

    html, card, scores = ((tmp_path / "out" / name).read_text() for name in (
        "report.html", "model_card.md", "scores.json"))  # fmt: skip
    headings = re.findall("<h2>(.*?)</h2>", html)
    assert headings[:6] == [
        "Headlines", "Before and after", "Broken and fixed pairs", "Nearest sentences", "Merge with the start",
        "retrieval",
    ]  # fmt: skip
    assert (tmp_path / "out/figures/merge.png").is_file() and 'alt="merge"' in html
    assert "### Before and after the training" in card and "the weight of this encoder is 0.5" in card
    changes = json.loads(scores)["before_after"]
    assert [row["name"] for row in changes["guard"]] == ["mean", "zh", "de"]
    assert changes["held_out"][0]["fixed"] > 0
    sentences = [f"a{i} b{j}" for i in range(10) for j in range(6)]
    assert sum(sentence in html for sentence in sentences) > 10
    assert not any(sentence in card + scores for sentence in sentences)  # both are stored with a registered model


def test_an_evaluation_without_a_guard_has_the_key_of_earlier_versions():
    earlier_fields = {"retrieval_pairs", "perplexity_sentences", "batch_size", "max_tokens", "seed"}

    assert CONFIG.result_fields().keys() == earlier_fields
    assert CONFIG.model_copy(
        update={"guard": AlignedSetConfig(data="tatoeba")}
    ).result_fields().keys() == earlier_fields | {"guard"}
