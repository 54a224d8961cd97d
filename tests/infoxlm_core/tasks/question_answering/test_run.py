"""Readers: scores of languages and of pairs of languages, and that a reader learns."""

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


class Liking(nn.Module):
    """A reader with a liking for words: its logits are a function of the token alone."""

    head = TASKS["question_answering"].head

    def __init__(self, tokenizer, likings: dict[str, float]):
        super().__init__()
        table = torch.zeros(len(tokenizer), 2)
        for word, value in likings.items():
            table[tokenizer(word, add_special_tokens=False)["input_ids"]] = value
        self.table = nn.Parameter(table)

    def forward(self, ids, types, lengths, dropout_masks=None):
        return self.table[ids]


@pytest.fixture
def liking(encoder, monkeypatch):
    reader = Liking(tokenizers.load(encoder), {"Berlin": 2.0, "Spree": 1.0})
    monkeypatch.setattr(task_models, "load", lambda directory, kind: reader)
    return reader


def write_mlqa(folder: Path, *cells: str) -> Path:
    for cell in cells:
        context, question = cell.split("-")
        rows = [
            ("1", "the city Berlin" if context == "en" else BERLIN, "Wo", "Berlin"),
            ("2", "a b Spree", "Wo", {"en": "the city Spree", "de": "Spree", "es": "c"}[context]),
        ]
        write_squad(folder / f"test-context-{context}-question-{question}.json", rows)
    return folder


@pytest.mark.item("A21")
def test_scores_are_shares_by_language_and_answers_are_in_the_official_format(encoder, liking, tmp_path):
    config = settings("train-v1.1.json", write_mlqa(tmp_path / "mlqa", "en-en", "de-de", "es-es", "de-en"))

    scores = run.measure(config, encoder, tmp_path / "out")

    # "Spree" and "the city Spree", articles aside: one of two tokens, and the one that was given
    assert scores.languages == {
        "de": {"f1": 1.0, "exact_match": 1.0},
        "en": {"f1": pytest.approx((1 + 2 / 3) / 2), "exact_match": 0.5},
        "es": {"f1": 0.5, "exact_match": 0.5},
    }
    assert scores.mean == pytest.approx({"f1": (1 + 5 / 6 + 0.5) / 3, "exact_match": 2 / 3})
    assert scores.transfer_gap == pytest.approx({"f1": 5 / 6 - 0.75, "exact_match": 0.5 - 0.75})
    assert scores.counts == {"de": 2, "en": 2, "es": 2}
    assert scores.task == "question_answering" and scores.mixed is scores.dev is scores.selection is None
    given = {path.name: json.loads(path.read_text()) for path in (tmp_path / "out/predictions").iterdir()}
    assert set(given) == {"en.json", "de.json", "es.json"}
    assert all(answers == {"1": "Berlin", "2": "Spree"} for answers in given.values())


def test_cells_of_two_languages_are_scored_beside_the_others(encoder, liking, tmp_path):
    test = write_mlqa(tmp_path / "mlqa", "en-en", "de-de", "es-es", "de-en", "es-de")

    scores = run.measure(settings("train.en.json", test, mixed=True), encoder, tmp_path / "out")

    assert set(scores.languages) == {"de", "en", "es"}
    mixed = scores.mixed
    assert {cell: row["f1"] for cell, row in mixed["cells"].items()} == pytest.approx(
        {"en-en": 5 / 6, "de-de": 1, "es-es": 0.5, "de-en": 1, "es-de": 0.5}
    )
    assert (mixed["within"], mixed["across"]) == pytest.approx(((5 / 6 + 1.5) / 3, (1 + 0.75 + 0.5) / 3))
    assert (tmp_path / "out/predictions/de-en.json").is_file()


def test_translate_test_compares_answers_in_the_language_of_the_translation(encoder, liking, tmp_path):
    test = write_mlqa(tmp_path / "mlqa", "en-en", "de-de")
    rows = [("1", "a b the Spree", "Wo", "the Spree")]
    write_squad(tmp_path / "translated/translate-test-context-de-question-de.json", rows)
    config = settings("train.en.json", test, normaliser="mlqa", translated_test=[str(tmp_path / "translated")])

    scores = run.measure(config, encoder, tmp_path / "out")

    assert scores.languages["de"] == {"f1": 1.0, "exact_match": 1.0}  # in English, `the` is an article
    assert scores.counts == {"de": 1, "en": 2}
    with pytest.raises(InputError, match="no test set in de"):
        other = write_mlqa(tmp_path / "other", "en-en")
        run.measure(settings("train.en.json", test, translated_test=[str(other)]), encoder, tmp_path / "out")


def test_mlqa_compares_answers_by_the_language_of_the_paragraph(encoder, liking, tmp_path):
    for cell in ("de-question-de", "de-question-en", "en-question-en", "en-question-de"):
        rows = [("1", "a b die Spree", "Wo", "die Spree")]
        write_squad(tmp_path / f"mlqa/test-context-{cell}.json", rows)
    config = settings("train.en.json", tmp_path / "mlqa", mixed=True, normaliser="mlqa")

    scores = run.measure(config, encoder, tmp_path / "out")

    # given is Spree: in German without article the very answer, in English two words of which it is one
    assert {cell: row["f1"] for cell, row in scores.mixed["cells"].items()} == pytest.approx(
        {"de-de": 1, "de-en": 1, "en-en": 2 / 3, "en-de": 2 / 3}
    )


def test_the_digest_of_a_test_set_is_that_of_its_content(encoder, liking, tmp_path):
    def digest(folder: Path) -> str:
        return run.measure(settings("train.en.json", folder), encoder, tmp_path / "out").test_set

    first, again, other = (write_mlqa(tmp_path / name, "en-en", "de-de") for name in "abc")
    path = again / "test-context-de-question-de.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=3))
    path.rename(again / "xquad.de.json")
    path = other / "test-context-de-question-de.json"
    path.write_text(path.read_text().replace('"text": "Spree"', '"text": "Spre"'))

    assert digest(first).startswith("sha256:") and digest(first) == digest(again)
    assert digest(other) != digest(first)


def test_every_language_is_read_by_the_model_that_was_kept_for_it(encoder, tmp_path, monkeypatch):
    tokenizer, loaded = tokenizers.load(encoder), []
    likings = {"tuned": {"Berlin": 1.0}, "20": {"Spree": 1.0}}

    def load(directory: Path, kind: str) -> Liking:
        loaded.append(directory.name)
        return Liking(tokenizer, likings[directory.name])

    monkeypatch.setattr(task_models, "load", load)
    tuned = tmp_path / "tuned"
    for folder in (tuned, tuned / "steps/20"):
        folder.mkdir(parents=True)
        for file in encoder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    looks = [selection.DevScores(10, {"en": 0.8, "de": 0.2}), selection.DevScores(20, {"en": 0.5, "de": 0.4})]
    selection.write(tuned, "each", looks, {"*": 10, "en": 10, "de": 20})
    test = write_mlqa(tmp_path / "mlqa", "en-en", "de-de", "de-en", "es-es")

    scores = run.measure(settings("train.en.json", test, mixed=True), tuned, tmp_path / "out")

    assert sorted(loaded) == ["20", "tuned"]
    given = {path.stem: json.loads(path.read_text())["1"] for path in (tmp_path / "out/predictions").iterdir()}
    assert given == {"en": "Berlin", "de": "Spree", "de-en": "Spree", "es": "Berlin"}
    assert scores.dev == {"languages": {"en": 0.8, "de": 0.4}, "mean": pytest.approx(0.6)}
    assert scores.selection["rule"] == "each"


def test_a_language_that_mlqa_cannot_score_is_refused_before_anything_is_read(encoder, tmp_path):
    path = write_squad(tmp_path / "xquad.sw.json", [("1", BERLIN, "Wo", "Spree")])
    english = write_squad(tmp_path / "train.en.json", [("1", BERLIN, "Wo", "Spree")])
    config = settings(english, path, normaliser="mlqa")

    for refused in (
        lambda: run.read_training(config, tmp_path / "no model", None),
        lambda: run.measure(config, tmp_path / "no model", tmp_path / "out"),
        lambda: run.read_training(settings(english, english, dev=[str(path)], normaliser="mlqa"), encoder, None),
    ):
        with pytest.raises(InputError, match="language 'sw' is not one of MLQA's"):
            refused()


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


def test_windows_fit_what_the_encoder_reads_and_wrong_answers_are_left_out(encoder, tmp_path):
    long = " ".join(WORDS * 12)
    rows = [("1", long, "Wo", "stone river"), ("2", long, "Wo", "Berlin"), ("3", f"{long} Berlin", "Wo", "Berlin")]
    train = write_squad(tmp_path / "train.en.json", rows)  # Berlin is not in the second: answer_start is -1

    parts = run.read_training(settings(train, train), encoder, None)

    assert parts.score_dev is None and parts.examples.lengths.max() == 40
    assert len(parts.examples) == len(parts.targets) == 2 * 3  # 35 of 96 and 97 words at a time, 4 of them again
    tokenizer, starts = tokenizers.load(encoder), parts.examples.starts
    texts = [
        tokenizer.decode(parts.examples.ids[start + first : start + last + 1])
        for start, (first, last) in zip(starts, parts.targets, strict=True) if last
    ]  # fmt: skip
    assert texts.count("Berlin") == 1 and set(texts) == {"stone river", "Berlin"}


def test_development_sets_are_judged_by_f1_in_each_language(encoder, tmp_path):
    dev = write_mlqa(tmp_path / "mlqa", "en-en", "de-de", "de-en")
    reader = Liking(tokenizers.load(encoder), {"Berlin": 2.0, "Spree": 1.0})
    train = write_squad(tmp_path / "train.en.json", [("1", BERLIN, "Wo", "Spree")])

    parts = run.read_training(settings(train, dev, dev=[str(dev)]), encoder, None)

    assert parts.score_dev(reader) == pytest.approx({"de": 1.0, "en": 5 / 6})
    assert parts.score_dev(Liking(tokenizers.load(encoder), {"a": 1.0})) == pytest.approx({"de": 0.0, "en": 0.0})


def test_a_reader_learns_to_answer_questions_about_paragraphs_it_never_saw(encoder, tmp_path):
    train = write_squad(tmp_path / "train.en.json", riddles(600, seed=1, words=10))
    for seed, (name, words) in enumerate({"test/xquad.en": 10, "test/xquad.de": 22, "dev/dev.en": 10}.items(), start=2):
        write_squad(tmp_path / f"{name}.json", riddles(60, seed, words))
    optimization = {"steps": 200, "learning_rate": 0.003, "warmup_steps": 10, "weight_decay": 0.0}
    # 4 special tokens, 2 of the question, and 14 words: all of a training paragraph, of a German one half
    config = settings(train, tmp_path / "test", dev=[str(tmp_path / "dev")], max_tokens=20, dropout=0.0,
                      optimization=optimization, selection={"rule": "joint", "every": 100},
                      checkpoints={"every": 100})  # fmt: skip

    finetune(config, encoder, None, tmp_path / "tuned", tmp_path / "run")
    scores = run.measure(config, tmp_path / "tuned", tmp_path / "out")

    assert scores.languages["en"]["f1"] > 0.8 and scores.languages["de"]["f1"] > 0.8
    assert scores.dev["languages"].keys() == {"en"} and scores.dev["mean"] > 0.8
    assert scores.selection["rule"] == "joint" and [look["step"] for look in scores.selection["looks"]] == [
        100,
        200,
    ]
