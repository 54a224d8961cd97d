"""Taggers learn named entities, are scored by whole entities, and load in Hugging Face's class."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer, BertModel, DistilBertModel

from infoxlm_core.errors import InputError
from infoxlm_core.model import task_models
from infoxlm_core.model.huggingface import tokenizers
from infoxlm_core.stages.finetuning import finetune
from infoxlm_core.tasks import TASKS
from infoxlm_core.tasks.named_entities import run
from infoxlm_core.tasks.named_entities.files import Sentence
from infoxlm_core.tasks.named_entities.run import span_f1
from infoxlm_core.tasks.named_entities.task import HEAD, NO_TARGET, loss
from tests.toys.entities import FIRST, LABELS, LAST, PLACES, PLAIN, sentences, settings, write
from tests.toys.questions import write_bert_tokenizer, write_encoder

TASK = TASKS["named_entities"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    """An XLM-R of 40 positions; every word of the toy is a token, other words are several."""
    words = [*FIRST, *LAST, *PLACES, *PLAIN, "mr", "in", *"abcdefghijklmnopqrstuvwxyz"]
    return write_encoder(tmp_path_factory.mktemp("encoder"), words, pieces=300, layers=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("panx")
    write(folder / "train-en.tsv", sentences(300, 1))
    for split, language, seed in (("dev", "en", 2), ("dev", "de", 3), ("test", "en", 4), ("test", "de", 5)):
        write(folder / f"{split}-{language}.tsv", sentences(60, seed))
    return folder


@pytest.fixture(scope="module")
def tuned(encoder, data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    recipe = {"steps": 240, "learning_rate": 0.003, "warmup_steps": 20}
    config = settings(data, optimization=recipe, selection={"rule": "each", "every": 80}, log_every=80)
    finetune(config, encoder, None, folder / "out", folder / "run")
    return folder / "out"


@pytest.mark.slow
def test_a_tagger_learns_names_and_places_from_their_context(tuned, data, tmp_path):
    scores = TASK.measure(settings(data), tuned, tmp_path)

    english = scores.languages["en"]["f1"]
    german = scores.languages["de"]["f1"]
    assert english > 0.85
    assert german > 0.85
    assert scores.mean["f1"] == pytest.approx((english + german) / 2)
    assert scores.transfer_gap["f1"] == pytest.approx(english - german)
    assert scores.counts == {"de": 60, "en": 60}
    assert scores.dev["languages"].keys() == {"de", "en"}
    first_sentence = (tmp_path / "predictions/de.tsv").read_text().split("\n\n")[0].split("\n")
    words_and_tags = [tuple(line.split("\t")[:2]) for line in first_sentence]
    assert words_and_tags == list(zip(*sentences(60, 5)[0], strict=True))
    assert TASK.name_metrics(scores, settings(data), "panx").keys() == {
        "panx/mean", "panx/en", "panx/de", "panx/dev", "panx/transfer_gap",
    }  # fmt: skip


@pytest.mark.item("A22")
@pytest.mark.parametrize("kind", [None, BertModel, DistilBertModel], ids=["XLM-R", "BERT", "DistilBERT"])
def test_an_exported_tagger_has_equal_logits_in_hugging_face(kind, encoder, tmp_path):
    if kind:
        encoder = write_bert_tokenizer(tmp_path / "encoder", ["mr anna stone in york"])
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 40}
        feed_forward_sizes = {"intermediate_size": 24, "hidden_dim": 24}  # the names of BERT and of DistilBERT
        config = kind.config_class(vocab_size=len(tokenizers.load(encoder)), **sizes, **feed_forward_sizes)
        kind(config).save_pretrained(encoder)
    rows = [Sentence(("mr", "anna", "stone"), ("O", "B-PER", "I-PER")), Sentence(("in", "york"), ("O", "B-LOC"))]
    tagger = task_models.create(encoder, HEAD, LABELS, head_dropout=0.3)
    examples, _ = run.encode(rows, encoder, 30, ["en"] * len(rows))

    task_models.export(tagger, encoder, tmp_path / "out")
    logits_by_row = task_models.compute_logits(task_models.load(tmp_path / "out", HEAD), examples)

    huggingface_model = AutoModelForTokenClassification.from_pretrained(tmp_path / "out").eval()
    assert tuple(huggingface_model.config.id2label[number] for number in range(4)) == LABELS
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for row, logits in zip(rows, logits_by_row, strict=True):
        batch = tokenizer(list(row.words), is_split_into_words=True, return_tensors="pt")
        with torch.inference_mode():
            expected_logits = huggingface_model(**batch).logits[0]
        torch.testing.assert_close(logits, expected_logits, atol=1e-5, rtol=0)


def test_only_the_first_token_of_a_word_has_its_tag(encoder, tmp_path):
    rows = [Sentence(("mr", "zyx", "stone"), ("O", "B-PER", "I-PER")), Sentence(("in",), ("O",))]
    write(tmp_path / "train-en.tsv", rows)

    training = TASK.read_training(settings(tmp_path), encoder, None)

    pieces = tokenizers.load(encoder)("zyx", add_special_tokens=False)["input_ids"]
    targets = training.targets[0]
    label_by_position = {
        position: training.labels[targets[position]] for position in np.flatnonzero(targets != NO_TARGET)
    }
    assert len(pieces) > 1
    assert training.labels == ("B-PER", "I-PER", "O")
    assert label_by_position == {1: "O", 2: "B-PER", 2 + len(pieces): "I-PER"}
    assert training.head.count_losses(torch.from_numpy(training.targets)) == 4
    assert training.score_dev is None
    assert training.dev_languages == ()


def test_only_first_tokens_contribute_to_the_loss():
    logits = torch.tensor([[9.0, 0.0], [0.0, 2.0], [5.0, 5.0], [3.0, 0.0]])  # of two sentences, of 3 and 1 tokens
    targets = torch.tensor([[NO_TARGET, 0, NO_TARGET], [1, NO_TARGET, NO_TARGET]])

    total, is_correct = loss(logits, targets, (3, 1))
    _, is_correct_in_first = loss(logits, torch.tensor([[0, 1, 1], [NO_TARGET] * 3]), (3, 1))

    assert total.item() == pytest.approx(np.log1p(np.exp(2)) + np.log1p(np.exp(3)), rel=1e-6)
    assert is_correct.tolist() == [False, False, False, False]
    assert is_correct_in_first.tolist() == [True, True, False, False]


def test_truncated_words_are_tagged_o(encoder, tmp_path, caplog):
    rows = [Sentence(tuple(["we"] * 8 + ["in", "york"]), tuple(["O"] * 9 + ["B-LOC"]))]
    tagger = task_models.create(encoder, HEAD, ("B-LOC", "O"))
    with torch.no_grad():
        tagger.output.weight.zero_()
        tagger.output.bias.copy_(torch.tensor([1.0, 0.0]))  # predicts a place everywhere

    tags = run.tag(tagger, rows, run.encode(rows, encoder, 6, ["en"] * len(rows)))

    assert tags == [["B-LOC"] * 4 + ["O"] * 6]
    assert "6 of 10 words are truncated or have no token, and are tagged O" in caplog.text


@pytest.mark.parametrize(
    ("predicted_tags", "f1"),
    [
        (("O", "B-PER", "I-PER", "O", "B-LOC"), 1.0),
        (("O", "B-PER", "O", "O", "B-LOC"), 0.5),  # half a name does not count: precision and recall are 1/2
        (("O", "B-PER", "I-PER", "O", "O"), 2 / 3),
        (("O", "B-LOC", "I-LOC", "O", "B-LOC"), 0.5),
        (("O",) * 5, 0.0),
    ],
)
def test_an_entity_counts_only_as_a_whole_and_with_its_type(predicted_tags, f1):
    sentence = Sentence(("mr", "anna", "stone", "in", "york"), ("O", "B-PER", "I-PER", "O", "B-LOC"))

    assert span_f1([sentence], [predicted_tags]) == pytest.approx(f1)


def test_a_model_whose_labels_are_not_tags_is_refused(encoder, data, tmp_path):
    tagger = task_models.create(encoder, HEAD, ("LABEL_0", "LABEL_1"))
    task_models.export(tagger, encoder, tmp_path / "tagger")

    with pytest.raises(
        InputError, match=r"tagger/config.json: the label 'LABEL_0' is not O, B-… or I-…\. Write the tags"
    ):
        run.measure(settings(data), tmp_path / "tagger", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("missing_files", "changes", "reason"),
    [
        (("dev-en.tsv",), {"selection": {"rule": "source"}}, "selection.rule source needs a development set in en"),
        (("dev-en.tsv", "dev-de.tsv"), {"selection": {"rule": "joint"}}, "no dev sentences"),
        (("test-en.tsv", "test-de.tsv"), {}, "no test sentences"),
        ((), {"train_languages": ["fr"]}, r"train sentences in fr have the tags \[\], but training needs two tags"),
    ],
)
def test_missing_sets_are_refused_before_training(tmp_path, missing_files, changes, reason):
    for name in ("train-en.tsv", "dev-en.tsv", "dev-de.tsv", "test-en.tsv", "test-de.tsv"):
        write(tmp_path / name, sentences(20, 1))
    TASK.check(settings(tmp_path), has_grid=True)
    for name in missing_files:
        (tmp_path / name).unlink()

    with pytest.raises(InputError, match=reason):
        TASK.check(settings(tmp_path, **changes), has_grid=False)
