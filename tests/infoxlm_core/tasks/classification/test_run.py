"""Fine-tuned classifiers are measured by language and on mixed pairs, and predict as Hugging Face's model does."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from infoxlm_core.errors import InputError
from infoxlm_core.model import task_models
from infoxlm_core.stages.finetuning import finetune
from infoxlm_core.tasks.classification import run
from infoxlm_core.tasks.classification.task import HEAD, ClassificationConfig
from infoxlm_core.training.finetuning import selection
from tests.toys.text import messages


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Write aligned pairs in XTREME's layout, labelled by whether both messages begin with the same English verb."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = messages(0)
    pairs = [(row, rows[(7 * number + number % 2) % len(rows)]) for number, row in enumerate(rows)]
    for column, language in enumerate(("en", "de")):
        lines = []
        for first, second in pairs:
            has_same_verb = first[0].split()[0] == second[0].split()[0]
            label = "entailment" if has_same_verb else "contradiction"
            lines.append(f"{first[column]}\t{second[column]}\t{label}\n")
        (folder / f"train-{language}.tsv").write_text("".join(lines[:400]))
        (folder / f"dev-{language}.tsv").write_text("".join(lines[400:440]))
        (folder / f"test-{language}.tsv").write_text("".join(lines[440:500]))
    return folder


def config(data: Path, **changes) -> ClassificationConfig:
    return ClassificationConfig.parse(
        {"data": str(data), "max_tokens": 30, "selection": {"rule": "each", "every": 10}, "log_every": 1,
         "optimization": {"steps": 30, "learning_rate": 0.003, "warmup_steps": 3}} | changes
    )  # fmt: skip


@pytest.fixture(scope="module")
def tuned(encoder, data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    finetune(config(data), encoder, None, folder / "out", folder / "run")
    return folder / "out"


def read_columns(data: Path, split: str, language: str) -> list[list[str]]:
    """Return the premises, hypotheses and labels of a file."""
    lines = (data / f"{split}-{language}.tsv").read_text().splitlines()
    return [list(column) for column in zip(*(line.split("\t") for line in lines), strict=True)]


def predict_with_transformers(
    directory: Path, premises: list[str], hypotheses: list[str]
) -> tuple[torch.Tensor, list[str]]:
    """Return logits and labels of Hugging Face's model, one pair at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    logits = []
    with torch.inference_mode():
        for premise, hypothesis in zip(premises, hypotheses, strict=True):
            batch = tokenizer(premise, hypothesis, truncation=True, max_length=30, return_tensors="pt")
            logits.append(model(**batch).logits[0])
    return torch.stack(logits), [model.config.id2label[int(row.argmax())] for row in logits]


def measure_with_transformers(tuned: Path, data: Path, split: str, language: str) -> float:
    """Return the accuracy of the model that was selected for a language."""
    premises, hypotheses, labels = read_columns(data, split, language)
    directory = selection.find_directory(tuned, language)
    _, predictions = predict_with_transformers(directory, premises, hypotheses)
    return compute_accuracy(predictions, labels)


def compute_accuracy(predictions: list[str], labels: list[str]) -> float:
    return sum(prediction == label for prediction, label in zip(predictions, labels, strict=True)) / len(labels)


@pytest.mark.item("A21", "A22")
def test_packed_logits_equal_those_of_transformers(tuned, data):
    premises, hypotheses, _ = read_columns(data, "test", "de")
    table = pd.DataFrame({"text": premises, "text_pair": hypotheses, "language": "de"})
    model = task_models.load(tuned, HEAD)
    examples = run.encode_rows(table, tuned, 30)

    logits = task_models.compute_logits(model, examples, max_batch_tokens=100)

    expected_logits, expected_labels = predict_with_transformers(tuned, premises, hypotheses)
    torch.testing.assert_close(logits, expected_logits, atol=1e-5, rtol=0)
    assert run.predict(model, examples) == expected_labels


@pytest.mark.item("A21")
def test_accuracy_of_each_language_equals_that_of_transformers(tuned, data, tmp_path):
    scores = run.measure(config(data), tuned, tmp_path)

    english = measure_with_transformers(tuned, data, "test", "en")
    german = measure_with_transformers(tuned, data, "test", "de")
    assert scores.languages == {"en": {"accuracy": pytest.approx(english)}, "de": {"accuracy": pytest.approx(german)}}
    assert scores.mean["accuracy"] == pytest.approx((english + german) / 2)
    assert scores.transfer_gap["accuracy"] == pytest.approx(english - german)
    assert scores.counts == {"de": 60, "en": 60}
    assert scores.mixed is None
    assert scores.task == "classification"
    assert scores.selection["rule"] == "each"
    for language in ("en", "de"):
        assert scores.dev["languages"][language] == measure_with_transformers(tuned, data, "dev", language)
    predictions = pd.read_parquet(tmp_path / "predictions.parquet")
    assert (predictions["predicted"] == predictions["label"]).mean() == pytest.approx(scores.mean["accuracy"])


@pytest.mark.item("A21")
def test_mixed_pairs_have_premises_and_hypotheses_in_two_languages(tuned, data, tmp_path):
    scores = run.measure(config(data, mixed=True), tuned, tmp_path)

    premises, _, labels = read_columns(data, "test", "de")
    _, hypotheses, _ = read_columns(data, "test", "en")
    _, predictions = predict_with_transformers(selection.find_directory(tuned, "de"), premises, hypotheses)
    accuracy_by_pair = {pair: cell["accuracy"] for pair, cell in scores.mixed["cells"].items()}
    assert set(accuracy_by_pair) == {"en-en", "en-de", "de-en", "de-de"}
    assert accuracy_by_pair["de-en"] == compute_accuracy(predictions, labels)
    assert accuracy_by_pair["en-en"] == scores.languages["en"]["accuracy"]
    assert scores.mixed["within"] == pytest.approx(scores.mean["accuracy"])
    assert scores.mixed["across"] == pytest.approx((accuracy_by_pair["de-en"] + accuracy_by_pair["en-de"]) / 2)


@pytest.mark.parametrize(
    ("selected_lines", "reason"),
    [(slice(0, 59), "de has 59 rows, but en has 60"), (slice(None, None, -1), r"row \d+ has different labels")],
    ids=["fewer rows", "another order"],
)
def test_mixed_pairs_need_the_same_test_set_in_every_language(tuned, data, tmp_path, selected_lines, reason):
    lines = (data / "test-de.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "test-de.tsv").write_text("".join(lines[selected_lines]))
    (tmp_path / "test-en.tsv").write_text((data / "test-en.tsv").read_text())

    with pytest.raises(InputError, match=reason):
        run.measure(config(tmp_path, mixed=True), tuned, tmp_path)


def test_mixed_pairs_need_a_second_language(tuned, data, tmp_path):
    for name in ("train-en.tsv", "test-en.tsv"):
        (tmp_path / name).write_text((data / name).read_text())
    changes = {"mixed": True, "selection": {"rule": "last"}}

    with pytest.raises(InputError, match="mixed needs two languages, but all test rows are in en"):
        run.check(config(tmp_path, **changes), has_grid=False)
    with pytest.raises(InputError, match="all test rows are in en"):
        run.measure(config(tmp_path, **changes), tuned, tmp_path / "out")


def test_translated_test_rows_are_classified_as_text_of_the_source(tuned, data, tmp_path, monkeypatch):
    second, first, labels = read_columns(data, "test", "de")  # exchanged, so that predictions differ
    lines = [
        f"{premise}\t{hypothesis}\t{label}\n" for premise, hypothesis, label in zip(first, second, labels, strict=True)
    ]
    (tmp_path / "test-de.tsv").write_text("".join(lines))
    scores_of_originals = run.measure(config(data), tuned, tmp_path / "original")
    text_languages = []
    encode_rows = run.encode_rows

    def record_languages(table, *arguments):
        text_languages.extend(table["language"])
        return encode_rows(table, *arguments)

    monkeypatch.setattr(run, "encode_rows", record_languages)

    scores = run.measure(config(data, translated_test=[str(tmp_path)]), tuned, tmp_path / "out")

    assert text_languages == ["en"] * 120
    _, expected = predict_with_transformers(selection.find_directory(tuned, "en"), first, second)
    predictions = pd.read_parquet(tmp_path / "out/predictions.parquet").groupby("language")["predicted"]
    assert predictions.get_group("de").tolist() == expected
    assert scores.languages["en"] == scores_of_originals.languages["en"]


def test_every_test_row_needs_a_translation(tuned, data, tmp_path):
    (tmp_path / "test-de.tsv").write_text((data / "test-de.tsv").read_text().partition("\n")[2])

    with pytest.raises(InputError, match="59 translated test rows for de, but 60 test rows"):
        run.check(config(data, translated_test=[str(tmp_path)]), has_grid=False)
    with pytest.raises(InputError, match="0 translated test rows for de, but 60"):
        run.measure(config(data, translated_test=[str(data / "test-en.tsv")]), tuned, tmp_path / "out")


def test_the_digest_of_a_test_set_depends_on_its_rows_only(tuned, data, tmp_path):
    for name in ("test-en.tsv", "test-de.tsv"):
        (tmp_path / name).write_text((data / name).read_text())

    scores = run.measure(config(data), tuned, tmp_path / "out")
    scores_of_copy = run.measure(config(tmp_path), tuned, tmp_path / "out")
    (tmp_path / "test-de.tsv").unlink()
    scores_of_english = run.measure(config(tmp_path), tuned, tmp_path / "out")

    assert scores.test_set == scores_of_copy.test_set
    assert scores.test_set != scores_of_english.test_set
    assert scores_of_english.transfer_gap is None


def test_test_sets_without_rows_or_with_unknown_labels_are_refused(tuned, tmp_path):
    (tmp_path / "test-en.tsv").write_text("a\tb\tyes\n")
    with pytest.raises(InputError, match=r"1 of 1 rows .*'yes'.* not one of the classifier's \(contradiction, entail"):
        run.measure(config(tmp_path), tuned, tmp_path / "out")
    (tmp_path / "test-en.tsv").rename(tmp_path / "dev-en.tsv")
    with pytest.raises(InputError, match="no row has the split test"):
        run.measure(config(tmp_path), tuned, tmp_path / "out")


def test_training_rows_in_the_test_are_counted_and_refused_if_too_many(caplog):
    train = pd.DataFrame({"text": ["Open it", "Close it", "Save it"], "text_pair": ["a", "b", "c"]})
    other_rows = pd.DataFrame({"text": ["Open it", "Print it"], "text_pair": ["b", "a"]})
    training_row = pd.DataFrame({"text": ["open  IT"], "text_pair": ["A"]})

    run.check_overlap(train, other_rows)
    assert not caplog.messages
    run.check_overlap(train, pd.concat([other_rows, training_row], ignore_index=True))
    assert "1 of 3 test rows are also training rows (such as 'open  IT')" in caplog.text
    with pytest.raises(InputError, match=r"3 of 3 test rows are also training rows .*\. Test on other rows"):
        run.check_overlap(train, train)
