"""Taggers of named entities: where tags go, that they are learned, and that the model loads in Hugging Face's class."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
)

from infoxlm_core.errors import CorpusTooSmall, InputError
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
def test_it_learns_names_and_places_from_their_neighbours_and_is_scored_by_whole_spans(tuned, data, tmp_path):
    scores = TASK.measure(settings(data), tuned, tmp_path)

    assert scores.languages["en"]["f1"] > 0.85 and scores.languages["de"]["f1"] > 0.85
    assert scores.mean["f1"] == pytest.approx(sum(cell["f1"] for cell in scores.languages.values()) / 2)
    assert scores.transfer_gap["f1"] == pytest.approx(scores.languages["en"]["f1"] - scores.languages["de"]["f1"])
    assert scores.counts == {"de": 60, "en": 60} and scores.dev["languages"].keys() == {"de", "en"}
    block = (tmp_path / "predictions/de.tsv").read_text().split("\n\n")[0].split("\n")
    assert [tuple(line.split("\t")[:2]) for line in block] == list(zip(*sentences(60, 5)[0], strict=True))
    assert TASK.name_metrics(scores, settings(data), "panx").keys() == {
        "panx/mean", "panx/en", "panx/de", "panx/dev", "panx/transfer_gap",
    }  # fmt: skip


@pytest.mark.item("A22")
@pytest.mark.parametrize("kind", ["XLM-R", "BERT", "DistilBERT"])
def test_a_tagger_of_any_encoder_leaves_as_hugging_faces_class_with_equal_logits(kind, encoder, tmp_path):
    if kind != "XLM-R":
        encoder = write_bert_tokenizer(tmp_path / "encoder", ["mr anna stone in york"])
        sizes = {"vocab_size": len(tokenizers.load(encoder)), "max_position_embeddings": 40}
        model = BertModel(BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
                                     **sizes)) if kind == "BERT" else DistilBertModel(
            DistilBertConfig(dim=16, n_layers=2, n_heads=2, hidden_dim=24, **sizes))  # fmt: skip
        model.save_pretrained(encoder)
    rows = [Sentence(("mr", "anna", "stone"), ("O", "B-PER", "I-PER")), Sentence(("in", "york"), ("O", "B-LOC"))]
    module = task_models.create(encoder, HEAD, LABELS, head_dropout=0.3)
    examples, _ = run.encode(rows, encoder, 30, ["en"] * len(rows))

    task_models.export(module, encoder, tmp_path / "out")
    ours = task_models.compute_logits(task_models.load(tmp_path / "out", HEAD), examples)

    theirs = AutoModelForTokenClassification.from_pretrained(tmp_path / "out").eval()
    assert tuple(theirs.config.id2label[number] for number in range(4)) == LABELS
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for row, logits in zip(rows, ours, strict=True):
        batch = tokenizer(list(row.words), is_split_into_words=True, return_tensors="pt")
        with torch.inference_mode():
            torch.testing.assert_close(logits, theirs(**batch).logits[0], atol=1e-5, rtol=0)


def test_only_the_first_token_of_a_word_has_its_tag(encoder, tmp_path):
    rows = [Sentence(("mr", "zyx", "stone"), ("O", "B-PER", "I-PER")), Sentence(("in",), ("O",))]
    write(tmp_path / "train-en.tsv", rows)

    training = TASK.read_training(settings(tmp_path), encoder, None)

    pieces = tokenizers.load(encoder)("zyx", add_special_tokens=False)["input_ids"]
    wanted = {1: "O", 2: "B-PER", 2 + len(pieces): "I-PER"}
    assert len(pieces) > 1 and training.labels == ("B-PER", "I-PER", "O")
    assert {place: training.labels[n] for place, n in enumerate(training.targets[0]) if n != NO_TARGET} == wanted
    assert training.head.count_losses(torch.from_numpy(training.targets)) == 4
    assert training.score_dev is None and training.development == ()


def test_the_loss_is_that_of_first_tokens_alone():
    logits = torch.tensor([[9.0, 0.0], [0.0, 2.0], [5.0, 5.0], [3.0, 0.0]])  # of two sentences, of 3 and 1 tokens
    targets = torch.tensor([[NO_TARGET, 0, NO_TARGET], [1, NO_TARGET, NO_TARGET]])

    total, hits = loss(logits, targets, (3, 1))

    assert total.item() == pytest.approx(np.log1p(np.exp(2)) + np.log1p(np.exp(3)), rel=1e-6)
    assert hits.tolist() == [False, False, False, False]
    assert loss(logits, torch.tensor([[0, 1, 1], [NO_TARGET] * 3]), (3, 1))[1].tolist() == [
        True, True, False, False,
    ]  # fmt: skip


def test_truncated_words_are_tagged_o(encoder, tmp_path, caplog):
    rows = [Sentence(tuple(["we"] * 8 + ["in", "york"]), tuple(["O"] * 9 + ["B-LOC"]))]
    module = task_models.create(encoder, HEAD, ("B-LOC", "O"))
    with torch.no_grad():
        module.output.weight.zero_()
        module.output.bias.copy_(torch.tensor([1.0, 0.0]))  # all is a place

    examples, first_tokens = run.encode(rows, encoder, 6, ["en"] * len(rows))
    tags = run.tag(module, rows, examples, first_tokens)

    assert tags == [["B-LOC"] * 4 + ["O"] * 6]
    assert "6 of 10 words are truncated or have no token, and are tagged O" in caplog.text


@pytest.mark.parametrize(
    ("given", "f1"),
    [
        (("O", "B-PER", "I-PER", "O", "B-LOC"), 1.0),
        (("O", "B-PER", "O", "O", "B-LOC"), 0.5),  # half a name is no name: 1 of 2 found, 1 of 2 right
        (("O", "B-PER", "I-PER", "O", "O"), 2 / 3),
        (("O", "B-LOC", "I-LOC", "O", "B-LOC"), 0.5),
        (("O",) * 5, 0.0),
    ],
)
def test_a_span_counts_as_a_whole_with_its_kind(given, f1):
    gold = Sentence(("mr", "anna", "stone", "in", "york"), ("O", "B-PER", "I-PER", "O", "B-LOC"))

    assert span_f1([gold], [given]) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("missing", "changes", "said"),
    [
        ((), {}, None),
        (("dev-en.tsv",), {"selection": {"rule": "source"}}, "selection.rule source needs a development set in en"),
        (("dev-en.tsv", "dev-de.tsv"), {"selection": {"rule": "joint"}}, "no dev sentences"),
        (("test-en.tsv", "test-de.tsv"), {}, "no test sentences"),
        ((), {"train_languages": ["fr"]}, r"train sentences in fr have the tags \[\], but training needs two tags"),
    ],
)
def test_what_would_fail_after_training_is_refused_before(tmp_path, missing, changes, said):
    for name in ("train-en", "dev-en", "dev-de", "test-en", "test-de"):
        write(tmp_path / f"{name}.tsv", sentences(20, 1))
    for name in missing:
        (tmp_path / name).unlink()

    if said is None:
        TASK.check(settings(tmp_path), has_grid=True)
        return
    with pytest.raises(InputError, match=said):
        TASK.check(settings(tmp_path, **changes), has_grid=False)


def test_without_an_entity_there_is_nothing_to_learn(encoder, tmp_path):
    write(tmp_path / "train-en.tsv", [Sentence(("we",), ("O",))])

    with pytest.raises(CorpusTooSmall, match=r"have the tags \['O'\], but training needs two tags"):
        TASK.read_training(settings(tmp_path), encoder, None)
