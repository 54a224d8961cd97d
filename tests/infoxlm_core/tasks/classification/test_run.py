"""Fine-tuned classifiers are measured by language, on mixed pairs, and answer as Hugging Face's padded model does."""

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
    """Does the second message of a pair begin with the same verb? XTREME's layout, aligned in both languages."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = messages(0)
    pairs = [(one, rows[(7 * number + number % 2) % len(rows)]) for number, one in enumerate(rows)]
    for place, language in enumerate(("en", "de")):
        table = [
            (a[place], b[place], "entailment" if a[0].split()[0] == b[0].split()[0] else "contradiction")
            for a, b in pairs
        ]
        for split, part in (("train", table[:400]), ("dev", table[400:440]), ("test", table[440:500])):
            lines = "".join("\t".join(row) + "\n" for row in part)
            (folder / f"{split}-{language}.tsv").write_text(lines)
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


def read(data: Path, split: str, language: str) -> list[list[str]]:
    return [line.split("\t") for line in (data / f"{split}-{language}.tsv").read_text().splitlines()]


def ask_transformers(directory: Path, premises: list[str], hypotheses: list[str]) -> tuple[torch.Tensor, list[str]]:
    """Logits and labels of plain transformers, one pair at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    logits = []
    with torch.inference_mode():
        for premise, hypothesis in zip(premises, hypotheses, strict=True):
            batch = tokenizer(premise, hypothesis, truncation=True, max_length=30, return_tensors="pt")
            logits.append(model(**batch).logits[0])
    return torch.stack(logits), [model.config.id2label[int(row.argmax())] for row in logits]


@pytest.mark.item("A21", "A22")
def test_packed_logits_are_those_of_plain_transformers(tuned, data):
    premises, hypotheses, _ = map(list, zip(*read(data, "test", "de"), strict=True))

    table = pd.DataFrame({"text": premises, "text_pair": hypotheses, "language": "de"})
    model, examples = task_models.load(tuned, HEAD), run.encode_rows(table, tuned, 30)
    logits = task_models.compute_logits(model, examples, tokens_per_batch=100)

    expected, labels = ask_transformers(tuned, premises, hypotheses)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    assert run.predict(model, examples) == labels


@pytest.mark.item("A21")
def test_scores_are_shares_of_right_answers_by_language_and_the_rest_follows_from_them(tuned, data, tmp_path):
    scores = run.measure(config(data), tuned, tmp_path)

    right = {}
    for language in ("en", "de"):
        premises, hypotheses, labels = map(list, zip(*read(data, "test", language), strict=True))
        _, said = ask_transformers(selection.find_directory(tuned, language), premises, hypotheses)
        right[language] = sum(a == b for a, b in zip(said, labels, strict=True)) / 60
    assert {name: row["accuracy"] for name, row in scores.languages.items()} == pytest.approx(right)
    assert scores.mean["accuracy"] == pytest.approx((right["en"] + right["de"]) / 2)
    assert scores.transfer_gap["accuracy"] == pytest.approx(right["en"] - right["de"])
    assert scores.counts == {"de": 60, "en": 60} and scores.mixed is None
    assert scores.task == "classification" and scores.selection["rule"] == "each"
    written = pd.read_parquet(tmp_path / "predictions.parquet")
    assert (written["predicted"] == written["label"]).mean() == pytest.approx(scores.mean["accuracy"])


def test_development_scores_are_those_of_the_kept_models(tuned, data, tmp_path):
    dev = run.measure(config(data), tuned, tmp_path).dev

    for language in ("en", "de"):
        premises, hypotheses, labels = map(list, zip(*read(data, "dev", language), strict=True))
        _, said = ask_transformers(selection.find_directory(tuned, language), premises, hypotheses)
        assert dev["languages"][language] == sum(a == b for a, b in zip(said, labels, strict=True)) / 40


@pytest.mark.item("A21")
def test_mixed_pairs_take_premises_of_one_language_and_hypotheses_of_another(tuned, data, tmp_path):
    scores = run.measure(config(data, mixed=True), tuned, tmp_path)

    german, english = (list(zip(*read(data, "test", language), strict=True)) for language in ("de", "en"))
    _, said = ask_transformers(selection.find_directory(tuned, "de"), list(german[0]), list(english[1]))
    cells = {name: cell["accuracy"] for name, cell in scores.mixed["cells"].items()}
    assert set(cells) == {"en-en", "en-de", "de-en", "de-de"}
    assert cells["de-en"] == sum(a == b for a, b in zip(said, german[2], strict=True)) / 60
    assert cells["en-en"] == scores.languages["en"]["accuracy"]
    assert scores.mixed["within"] == pytest.approx(scores.mean["accuracy"])
    assert scores.mixed["across"] == pytest.approx((cells["de-en"] + cells["en-de"]) / 2)


def test_mixed_pairs_need_the_same_test_in_every_language(tuned, data, tmp_path):
    for change, said in (
        (slice(0, 59), "de has 59 rows, but en has 60"),
        (slice(None, None, -1), r"row \d+ has another label"),
    ):
        folder = tmp_path / str(len(said))
        folder.mkdir()
        lines = (data / "test-de.tsv").read_text().splitlines(keepends=True)[change]
        (folder / "test-de.tsv").write_text("".join(lines))
        (folder / "test-en.tsv").write_text((data / "test-en.tsv").read_text())

        with pytest.raises(InputError, match=said):
            run.measure(config(folder, mixed=True), tuned, tmp_path)


def test_translate_test_classifies_the_translations_as_text_of_the_source(tuned, data, tmp_path, monkeypatch):
    german = read(data, "test", "de")
    lines = ["\t".join((second, first, label)) for first, second, label in german]
    (tmp_path / "test-de.tsv").write_text("\n".join(lines) + "\n")

    original = run.measure(config(data), tuned, tmp_path / "original")
    text_languages = []
    encode_rows = run.encode_rows
    monkeypatch.setattr(
        run, "encode_rows", lambda table, *rest: text_languages.extend(table["language"]) or encode_rows(table, *rest)
    )

    scores = run.measure(config(data, translated_test=[str(tmp_path)]), tuned, tmp_path / "out")

    assert text_languages == ["en"] * 120
    second, first, _ = map(list, zip(*german, strict=True))
    _, expected = ask_transformers(selection.find_directory(tuned, "en"), first, second)
    predictions = pd.read_parquet(tmp_path / "out/predictions.parquet").groupby("language")["predicted"]
    assert predictions.get_group("de").tolist() == expected
    assert scores.languages["en"] == original.languages["en"]


def test_translate_test_needs_a_translation_of_each_row(tuned, data, tmp_path):
    (tmp_path / "test-de.tsv").write_text((data / "test-de.tsv").read_text().partition("\n")[2])

    with pytest.raises(InputError, match="59 translated test rows for de, but 60 test rows"):
        run.check(config(data, translated_test=[str(tmp_path)]), has_grid=False)
    with pytest.raises(InputError, match="0 translated test rows for de, but 60"):
        run.measure(config(data, translated_test=[str(data / "test-en.tsv")]), tuned, tmp_path / "out")


def test_the_test_set_has_a_digest_of_its_own(tuned, data, tmp_path):
    (tmp_path / "test-en.tsv").write_text((data / "test-en.tsv").read_text())
    (tmp_path / "test-de.tsv").write_text((data / "test-de.tsv").read_text())

    one, same = (run.measure(config(folder), tuned, tmp_path / "o").test_set
                 for folder in (data, tmp_path))  # fmt: skip
    (tmp_path / "test-de.tsv").unlink()
    other = run.measure(config(tmp_path), tuned, tmp_path / "o")

    assert one == same != other.test_set
    assert other.transfer_gap is None


def test_a_test_of_other_labels_or_none_is_refused(tuned, data, tmp_path):
    (tmp_path / "test-en.tsv").write_text("a\tb\tyes\n")
    with pytest.raises(InputError, match=r"1 of 1 rows .*'yes'.* not one of the classifier's \(contradiction, entail"):
        run.measure(config(tmp_path), tuned, tmp_path / "o")
    (tmp_path / "test-en.tsv").rename(tmp_path / "dev-en.tsv")
    with pytest.raises(InputError, match="no row has the split test"):
        run.measure(config(tmp_path), tuned, tmp_path / "o")


def test_test_rows_that_are_training_rows_are_counted_and_refused_if_they_are_most(caplog):
    train = pd.DataFrame({"text": ["Open it", "Close it", "Save it"], "text_pair": ["a", "b", "c"]})
    apart = pd.DataFrame({"text": ["Open it", "Print it"], "text_pair": ["b", "a"]})
    few = pd.concat([apart, pd.DataFrame({"text": ["open  IT"], "text_pair": ["A"]})], ignore_index=True)

    run.check_overlap(train, apart)
    assert not caplog.messages
    run.check_overlap(train, few)
    assert caplog.messages == [
        "1 of 3 test rows are also training rows (such as 'open  IT'), so their scores measure memorization"
    ]
    with pytest.raises(InputError, match=r"3 of 3 test rows are also training rows .*\. Test on other rows"):
        run.check_overlap(train, train)
