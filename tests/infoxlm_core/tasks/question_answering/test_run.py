"""Readers learn to answer questions, and are scored by language and by pair of languages."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from infoxlm_core.errors import InputError
from infoxlm_core.model import task_models
from infoxlm_core.model.huggingface import tokenizers
from infoxlm_core.stages.finetuning import finetune
from infoxlm_core.tasks import TASKS
from infoxlm_core.tasks.question_answering import run
from infoxlm_core.tasks.question_answering.task import AnsweringConfig
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.training.finetuning import selection
from tests.toys.questions import CLASSES, WORDS, riddles, write_encoder, write_squad

LETTERS = "a b c d e f g h"
BERLIN = "Berlin liegt an der Spree"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    """An XLM-R of 40 positions; every word of the toys is a token."""
    answers = [answer for answers in CLASSES.values() for answer in answers]
    others = [*BERLIN.split(), *LETTERS.split(), "Wo", "the", "city", "which"]
    words = [*WORDS, *CLASSES, *answers, *others]
    return write_encoder(tmp_path_factory.mktemp("encoder"), words, pieces=400, layers=1)


def settings(train: Path | str, test: Path | str, **changes) -> AnsweringConfig:
    values = {"train": [str(train)], "test": [str(test)], "question_tokens": 8, "stride": 4, "max_tokens": 384}
    return AnsweringConfig.parse(values | changes)


class WordReader(nn.Module):
    """A reader that prefers some words: its logits depend on the token alone."""

    head = TASKS["question_answering"].head

    def __init__(self, tokenizer, logit_by_word: dict[str, float]):
        super().__init__()
        table = torch.zeros(len(tokenizer), 2)
        for word, logit in logit_by_word.items():
            table[tokenizer(word, add_special_tokens=False)["input_ids"]] = logit
        self.table = nn.Parameter(table)

    def forward(self, ids, types, lengths, dropout_masks=None):
        return self.table[ids]


@pytest.fixture
def reader(encoder, monkeypatch) -> WordReader:
    """Replace every fine-tuned reader by one that answers Berlin, or else Spree."""
    reader = WordReader(tokenizers.load(encoder), {"Berlin": 2.0, "Spree": 1.0})
    monkeypatch.setattr(task_models, "load", lambda directory, kind: reader)
    return reader


def write_mlqa(folder: Path, *pairs: str) -> Path:
    """Write a set for each pair of the languages of paragraph and question."""
    for pair in pairs:
        context, question = pair.split("-")
        rows = [
            ("1", "the city Berlin" if context == "en" else BERLIN, "Wo", "Berlin"),
            ("2", "a b Spree", "Wo", {"en": "the city Spree", "de": "Spree", "es": "c"}[context]),
        ]
        write_squad(folder / f"test-context-{context}-question-{question}.json", rows)
    return folder


def f1_by_pair(scores: Scores) -> dict[str, float]:
    return {pair: row["f1"] for pair, row in scores.mixed["cells"].items()}


@pytest.mark.item("A21")
def test_scores_are_by_language_and_answers_in_the_official_format(encoder, reader, tmp_path):
    config = settings("train-v1.1.json", write_mlqa(tmp_path / "mlqa", "en-en", "de-de", "es-es", "de-en"))

    scores = run.measure(config, encoder, tmp_path / "out")

    # The gold answer "the city Spree" has two tokens without its article, of which "Spree" is one.
    assert scores.languages == {
        "de": {"f1": 1.0, "exact_match": 1.0},
        "en": {"f1": pytest.approx((1 + 2 / 3) / 2), "exact_match": 0.5},
        "es": {"f1": 0.5, "exact_match": 0.5},
    }
    assert scores.mean == pytest.approx({"f1": (1 + 5 / 6 + 0.5) / 3, "exact_match": 2 / 3})
    assert scores.transfer_gap == pytest.approx({"f1": 5 / 6 - 0.75, "exact_match": 0.5 - 0.75})
    assert scores.counts == {"de": 2, "en": 2, "es": 2}
    assert scores.task == "question_answering"
    assert scores.mixed is scores.dev is scores.selection is None
    answers_by_file = {path.name: json.loads(path.read_text()) for path in (tmp_path / "out/predictions").iterdir()}
    answers = {"1": "Berlin", "2": "Spree"}
    assert answers_by_file == {"en.json": answers, "de.json": answers, "es.json": answers}


def test_mixed_sets_are_scored_by_pair_of_languages(encoder, reader, tmp_path):
    test = write_mlqa(tmp_path / "mlqa", "en-en", "de-de", "es-es", "de-en", "es-de")

    scores = run.measure(settings("train.en.json", test, mixed=True), encoder, tmp_path / "out")

    assert set(scores.languages) == {"de", "en", "es"}
    expected = {"en-en": 5 / 6, "de-de": 1, "es-es": 0.5, "de-en": 1, "es-de": 0.5}
    assert f1_by_pair(scores) == pytest.approx(expected)
    assert scores.mixed["within"] == pytest.approx((5 / 6 + 1.5) / 3)
    assert scores.mixed["across"] == pytest.approx((1 + 0.75 + 0.5) / 3)
    assert (tmp_path / "out/predictions/de-en.json").is_file()


def test_answers_to_translations_are_compared_in_the_source_language(encoder, reader, tmp_path):
    test = write_mlqa(tmp_path / "mlqa", "en-en", "de-de")
    rows = [("1", "a b the Spree", "Wo", "the Spree")]
    write_squad(tmp_path / "translated/translate-test-context-de-question-de.json", rows)
    config = settings("train.en.json", test, normaliser="mlqa", translated_test=[str(tmp_path / "translated")])

    scores = run.measure(config, encoder, tmp_path / "out")

    assert scores.languages["de"] == {"f1": 1.0, "exact_match": 1.0}  # in English, `the` is an article
    assert scores.counts == {"de": 1, "en": 2}
    english = write_mlqa(tmp_path / "english", "en-en")
    with pytest.raises(InputError, match="no test set in de"):
        run.measure(settings("train.en.json", test, translated_test=[str(english)]), encoder, tmp_path / "out")


def test_answers_are_normalised_in_the_language_of_the_paragraph(encoder, reader, tmp_path):
    for pair in ("de-question-de", "de-question-en", "en-question-en", "en-question-de"):
        rows = [("1", "a b die Spree", "Wo", "die Spree")]
        write_squad(tmp_path / f"mlqa/test-context-{pair}.json", rows)
    config = settings("train.en.json", tmp_path / "mlqa", mixed=True, normaliser="mlqa")

    scores = run.measure(config, encoder, tmp_path / "out")

    # "die" is an article in German, but in English a second word of the gold answer that "Spree" lacks.
    assert f1_by_pair(scores) == pytest.approx({"de-de": 1, "de-en": 1, "en-en": 2 / 3, "en-de": 2 / 3})


def test_the_digest_of_a_test_set_depends_on_its_content_only(encoder, reader, tmp_path):
    def digest(folder: Path) -> str:
        return run.measure(settings("train.en.json", folder), encoder, tmp_path / "out").test_set

    original = write_mlqa(tmp_path / "original", "en-en", "de-de")
    renamed = write_mlqa(tmp_path / "renamed", "en-en", "de-de")
    changed = write_mlqa(tmp_path / "changed", "en-en", "de-de")
    path = renamed / "test-context-de-question-de.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=3))
    path.rename(renamed / "xquad.de.json")
    path = changed / "test-context-de-question-de.json"
    path.write_text(path.read_text().replace('"text": "Spree"', '"text": "Spre"'))

    assert digest(original) == digest(renamed)
    assert digest(original) != digest(changed)


def test_every_language_is_answered_by_the_model_selected_for_it(encoder, tmp_path, monkeypatch):
    tokenizer = tokenizers.load(encoder)
    loaded_names = []
    logits_by_model = {"tuned": {"Berlin": 1.0}, "20": {"Spree": 1.0}}

    def load(directory: Path, kind: str) -> WordReader:
        loaded_names.append(directory.name)
        return WordReader(tokenizer, logits_by_model[directory.name])

    monkeypatch.setattr(task_models, "load", load)
    tuned = tmp_path / "tuned"
    for folder in (tuned, tuned / "steps/20"):
        folder.mkdir(parents=True)
        for file in encoder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    dev_scores = [selection.DevScores(10, {"en": 0.8, "de": 0.2}), selection.DevScores(20, {"en": 0.5, "de": 0.4})]
    selection.write(tuned, "each", dev_scores, {"*": 10, "en": 10, "de": 20})
    test = write_mlqa(tmp_path / "mlqa", "en-en", "de-de", "de-en", "es-es")

    scores = run.measure(settings("train.en.json", test, mixed=True), tuned, tmp_path / "out")

    assert sorted(loaded_names) == ["20", "tuned"]
    answers = {path.stem: json.loads(path.read_text())["1"] for path in (tmp_path / "out/predictions").iterdir()}
    assert answers == {"en": "Berlin", "de": "Spree", "de-en": "Spree", "es": "Berlin"}
    assert scores.dev == {"languages": {"en": 0.8, "de": 0.4}, "mean": pytest.approx(0.6)}
    assert scores.selection["rule"] == "each"


def test_a_language_that_mlqa_cannot_score_is_refused_before_inference(encoder, tmp_path):
    path = write_squad(tmp_path / "xquad.sw.json", [("1", BERLIN, "Wo", "Spree")])
    english = write_squad(tmp_path / "train.en.json", [("1", BERLIN, "Wo", "Spree")])
    config = settings(english, path, normaliser="mlqa")

    config_with_dev = settings(english, english, dev=[str(path)], normaliser="mlqa")
    reason = "language 'sw' is not one of MLQA's"

    with pytest.raises(InputError, match=reason):
        run.read_training(config, tmp_path / "no model", None)
    with pytest.raises(InputError, match=reason):
        run.measure(config, tmp_path / "no model", tmp_path / "out")
    with pytest.raises(InputError, match=reason):
        run.read_training(config_with_dev, encoder, None)


@pytest.mark.parametrize(
    ("files", "language"),
    [
        (["train-v1.1.json"], "en"),
        (["train.de.json"], "de"),
        (["train.de.json", "train.en.json"], "en"),
        (["folder"], "ko"),
    ],
)
def test_the_source_is_the_language_of_the_training_files(tmp_path, files, language):
    write_squad(tmp_path / "folder/tydiqa.goldp.ko.train.json", [("1", BERLIN, "Wo", "Spree")])

    config = settings("", "").model_copy(update={"train": tuple(str(tmp_path / name) for name in files)})

    assert run.list_training_languages(config)[0] == language


def test_windows_fit_the_encoder_and_misplaced_answers_are_left_out(encoder, tmp_path):
    text = " ".join(WORDS * 12)
    rows = [("1", text, "Wo", "stone river"), ("2", text, "Wo", "Berlin"), ("3", f"{text} Berlin", "Wo", "Berlin")]
    train = write_squad(tmp_path / "train.en.json", rows)  # Berlin is not in the second: answer_start is -1

    training = run.read_training(settings(train, train), encoder, None)

    assert training.score_dev is None
    assert training.examples.lengths.max() == 40
    assert len(training.examples) == len(training.targets) == 2 * 3  # 35 of 96 and 97 words at a time, 4 of them again
    tokenizer = tokenizers.load(encoder)
    answers = []
    for start, (first, last) in zip(training.examples.starts, training.targets, strict=True):
        if last:
            answers.append(tokenizer.decode(training.examples.ids[start + first : start + last + 1]))
    assert answers.count("Berlin") == 1
    assert set(answers) == {"stone river", "Berlin"}


def test_development_scores_are_the_f1_of_each_language(encoder, tmp_path):
    dev = write_mlqa(tmp_path / "mlqa", "en-en", "de-de", "de-en")
    good_reader = WordReader(tokenizers.load(encoder), {"Berlin": 2.0, "Spree": 1.0})
    bad_reader = WordReader(tokenizers.load(encoder), {"a": 1.0})
    train = write_squad(tmp_path / "train.en.json", [("1", BERLIN, "Wo", "Spree")])

    training = run.read_training(settings(train, dev, dev=[str(dev)]), encoder, None)

    assert training.score_dev(good_reader) == pytest.approx({"de": 1.0, "en": 5 / 6})
    assert training.score_dev(bad_reader) == pytest.approx({"de": 0.0, "en": 0.0})


def test_a_reader_learns_to_answer_questions_about_new_paragraphs(encoder, tmp_path):
    train = write_squad(tmp_path / "train.en.json", riddles(600, seed=1, words=10))
    for seed, (name, words) in enumerate({"test/xquad.en": 10, "test/xquad.de": 22, "dev/dev.en": 10}.items(), start=2):
        write_squad(tmp_path / f"{name}.json", riddles(60, seed, words))
    optimization = {"steps": 200, "learning_rate": 0.003, "warmup_steps": 10, "weight_decay": 0.0}
    # Windows have 4 special tokens, 2 of the question and 14 words: a training paragraph, or half a German one.
    config = settings(train, tmp_path / "test", dev=[str(tmp_path / "dev")], max_tokens=20, dropout=0.0,
                      optimization=optimization, selection={"rule": "joint", "every": 100},
                      checkpoints={"every": 100})  # fmt: skip

    finetune(config, encoder, None, tmp_path / "tuned", tmp_path / "run")
    scores = run.measure(config, tmp_path / "tuned", tmp_path / "out")

    assert scores.languages["en"]["f1"] > 0.8
    assert scores.languages["de"]["f1"] > 0.8
    assert scores.dev["languages"].keys() == {"en"}
    assert scores.dev["mean"] > 0.8
    assert scores.selection["rule"] == "joint"
    assert [look["step"] for look in scores.selection["looks"]] == [100, 200]
