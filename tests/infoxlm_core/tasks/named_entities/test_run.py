"""Named entities: what is read, where tags go, that it is learned and leaves as Hugging Face's class."""

import itertools
import random
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
    XLMRobertaConfig,
    XLMRobertaModel,
)

from infoxlm_core.errors import CorpusTooSmall, EncodingError, InputError
from infoxlm_core.model import task_models
from infoxlm_core.model.huggingface import tokenizers
from infoxlm_core.results import suite_page, trials
from infoxlm_core.results.suite_config import SuiteConfig
from infoxlm_core.results.summary import summarise
from infoxlm_core.stages.finetuning import finetune
from infoxlm_core.tasks import TASKS
from infoxlm_core.tasks.named_entities import run
from infoxlm_core.tasks.named_entities.files import Sentence, read_tagged
from infoxlm_core.tasks.named_entities.head import HEAD, NO_TARGET, loss
from infoxlm_core.tasks.named_entities.run import span_f1
from infoxlm_core.tasks.named_entities.settings import NamedEntitiesConfig
from infoxlm_core.training.finetuning import selection
from tests.toys.questions import write_bert_tokenizer, write_xlmr_tokenizer

FIRST, LAST, PLACES = ("anna", "bob", "cleo"), ("stone", "river", "field"), ("york", "lima", "oslo")
PLAIN = ("we", "saw", "then", "once", "river", "stone", "field", "york")  # of a name only where one stands
LABELS = ("B-LOC", "B-PER", "I-PER", "O")
TASK = TASKS["named_entities"]


def sentences(count: int, seed: int) -> list[Sentence]:
    """`mr anna stone` is a person, `in york` a place; the same words elsewhere are neither."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        parts = [(rng.choice(PLAIN), "O") for _ in range(rng.randint(1, 4))]
        for _ in range(rng.randint(0, 2)):
            person = [("mr", "O"), (rng.choice(FIRST), "B-PER"), (rng.choice(LAST), "I-PER")]
            parts += rng.choice((person, [("in", "O"), (rng.choice(PLACES), "B-LOC")]))
            parts.append((rng.choice(PLAIN), "O"))
        rows.append(Sentence(*map(tuple, zip(*parts, strict=True))))
    return rows


def write(path: Path, rows: list[Sentence], prefix: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    blocks = ["".join(f"{prefix}{word}\t{tag}\n" for word, tag in zip(*row, strict=True)) for row in rows]
    path.write_text("\n".join(blocks))
    return path


def settings(data: Path, **changes) -> NamedEntitiesConfig:
    return NamedEntitiesConfig.parse({"data": str(data), "max_tokens": 30} | changes)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    """An XLM-R of 40 positions; every word of the toy is a token, other words are several."""
    folder = tmp_path_factory.mktemp("encoder")
    words = [*FIRST, *LAST, *PLACES, *PLAIN, "mr", "in", *"abcdefghijklmnopqrstuvwxyz"]
    write_xlmr_tokenizer(folder, [" ".join([word] * 9) for word in words], 300)
    config = XLMRobertaConfig(
        vocab_size=len(tokenizers.load(folder)), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=42, type_vocab_size=1, initializer_range=0.25,  # learns soon
    )  # fmt: skip
    torch.manual_seed(0)
    XLMRobertaModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


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
    recipe = {"steps": 240, "learning_rate": 0.01, "warmup_steps": 20}
    config = settings(data, optimization=recipe, selection={"rule": "each", "every": 80}, log_every=80)
    finetune(config, encoder, None, folder / "out", folder / "run")
    return folder / "out"


@pytest.mark.slow
def test_it_learns_names_and_places_from_their_neighbours_and_is_scored_by_whole_spans(tuned, data, tmp_path):
    scores = TASK.measure(settings(data), tuned, tmp_path)

    assert scores.languages["en"]["f1"] > 0.9 and scores.languages["de"]["f1"] > 0.9
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
    examples, _ = run.encode(rows, encoder, 30)

    task_models.export(module, encoder, tmp_path / "out")
    ours = task_models.run(task_models.load(tmp_path / "out", HEAD), examples)

    theirs = AutoModelForTokenClassification.from_pretrained(tmp_path / "out").eval()
    assert tuple(theirs.config.id2label[number] for number in range(4)) == LABELS
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for row, logits in zip(rows, ours, strict=True):
        batch = tokenizer(list(row.words), is_split_into_words=True, return_tensors="pt")
        with torch.inference_mode():
            torch.testing.assert_close(logits, theirs(**batch).logits[0], atol=1e-5, rtol=0)


def test_the_model_of_a_suites_rule_is_kept_for_each_language(tuned):
    assert selection.read(tuned)["rule"] == "each" and set(selection.read(tuned)["chosen"]) == {"*", "de", "en"}


def test_the_first_piece_of_a_word_bears_its_tag_and_no_other_does(encoder, tmp_path):
    rows = [Sentence(("mr", "zyx", "stone"), ("O", "B-PER", "I-PER")), Sentence(("in",), ("O",))]
    write(tmp_path / "train-en.tsv", rows)

    training = TASK.training(settings(tmp_path), encoder, None)

    pieces = tokenizers.load(encoder)("zyx", add_special_tokens=False)["input_ids"]
    wanted = {1: "O", 2: "B-PER", 2 + len(pieces): "I-PER"}
    assert len(pieces) > 1 and training.labels == ("B-PER", "I-PER", "O")
    assert {place: training.labels[n] for place, n in enumerate(training.targets[0]) if n != NO_TARGET} == wanted
    assert training.head.count(torch.from_numpy(training.targets)) == 4
    assert training.score_dev is None and training.development == ()


def test_the_loss_is_that_of_first_pieces_alone():
    logits = torch.tensor([[9.0, 0.0], [0.0, 2.0], [5.0, 5.0], [3.0, 0.0]])  # of two sentences, of 3 and 1 tokens
    targets = torch.tensor([[NO_TARGET, 0, NO_TARGET], [1, NO_TARGET, NO_TARGET]])

    total, hits = loss(logits, targets, (3, 1))

    assert total.item() == pytest.approx(np.log1p(np.exp(2)) + np.log1p(np.exp(3)), rel=1e-6)
    assert hits.tolist() == [False, False, False, False]
    assert loss(logits, torch.tensor([[0, 1, 1], [NO_TARGET] * 3]), (3, 1))[1].tolist() == [
        True, True, False, False,
    ]  # fmt: skip


def test_words_that_are_cut_off_are_answered_with_no_entity(encoder, tmp_path, caplog):
    rows = [Sentence(tuple(["we"] * 8 + ["in", "york"]), tuple(["O"] * 9 + ["B-LOC"]))]
    module = task_models.create(encoder, HEAD, ("B-LOC", "O"))
    with torch.no_grad():
        module.output.weight.zero_()
        module.output.bias.copy_(torch.tensor([1.0, 0.0]))  # all is a place

    examples, firsts = run.encode(rows, encoder, 6)
    answered = run.tag(module, rows, examples, firsts)

    assert answered == [["B-LOC"] * 4 + ["O"] * 6]
    assert "6 of 10 words are cut off or have no piece: taken for O" in caplog.text


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


# What is read


def test_xtremes_and_wikianns_layouts_are_the_same_sentences(tmp_path):
    rows = sentences(5, 1)
    for split, language in itertools.product(("train", "dev", "test"), ("en", "de")):
        write(tmp_path / "xtreme" / f"{split}-{language}.tsv", rows)
        write(tmp_path / "wikiann" / language / split, rows, prefix=f"{language}:")
    (tmp_path / "wikiann/README.md").write_text("other files may lie beside")

    xtreme, wikiann = (read_tagged(settings(tmp_path / name)) for name in ("xtreme", "wikiann"))

    assert xtreme == wikiann and xtreme["test"] == {"de": rows, "en": rows}
    assert list(xtreme["train"]) == ["en"]  # German is not learned


def test_words_with_a_colon_stay_what_they_are_where_words_bear_no_language(tmp_path):
    rows = [Sentence(("we", "en:gb", ":"), ("O", "O", "O"))]

    assert read_tagged(settings(write(tmp_path / "test-en.tsv", rows)))["test"]["en"] == rows
    assert read_tagged(settings(write(tmp_path / "en/test", rows, "en:")))["test"]["en"] == rows


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("we\tO\nanna B-PER\n", r"test-en\.tsv:2: 'anna B-PER' is not a word, a tab and O, B-… or I-…: mend it"),
        ("we\tO\nanna\tPER\n", r"test-en\.tsv:2: 'anna\\tPER' is not a word"),
        ("we\tO\tO\n", r"test-en\.tsv:1: "),
        ("we\n", r"test-en\.tsv:1: 'we' is not"),  # XTREME's hidden tests have no tags
    ],
)
def test_a_bad_line_is_refused_with_its_file_and_number(tmp_path, content, said):
    (tmp_path / "test-en.tsv").write_text(content)

    with pytest.raises(InputError, match=said) as refused:
        read_tagged(settings(tmp_path))
    assert "\n" not in str(refused.value)


def test_files_that_cannot_be_told_apart_or_read_are_refused(tmp_path):
    with pytest.raises(InputError, match="no such file or folder: give XTREME's files"):
        read_tagged(settings(tmp_path / "nowhere"))
    (tmp_path / "words.txt").write_text("we\tO\n")
    with pytest.raises(InputError, match="no file whose name says split and language"):
        read_tagged(settings(tmp_path))
    (tmp_path / "test-en.tsv").write_bytes(b"caf\xe9\tO\n")
    with pytest.raises(EncodingError, match=r"test-en\.tsv: not UTF-8"):
        read_tagged(settings(tmp_path))
    write(tmp_path / "test-en.tsv", sentences(1, 1))
    write(tmp_path / "en/test", sentences(1, 1))
    with pytest.raises(InputError, match="are both test sentences in en: keep one"):
        read_tagged(settings(tmp_path))


@pytest.mark.parametrize(
    ("missing", "changes", "said"),
    [
        ((), {}, None),
        (("dev-en.tsv",), {"selection": {"rule": "source"}}, "selection.rule source needs a development set in en"),
        (("dev-en.tsv", "dev-de.tsv"), {"selection": {"rule": "joint"}}, "no dev sentences"),
        (("test-en.tsv", "test-de.tsv"), {}, "no test sentences"),
        ((), {"train_languages": ["fr"]}, r"train sentences in fr have tags \[\]: need=2 tags"),
    ],
)
def test_what_would_fail_after_training_is_refused_before(tmp_path, missing, changes, said):
    for name in ("train-en", "dev-en", "dev-de", "test-en", "test-de"):
        write(tmp_path / f"{name}.tsv", sentences(20, 1))
    for name in missing:
        (tmp_path / name).unlink()

    if said is None:
        TASK.check(settings(tmp_path), chosen=True)
        return
    with pytest.raises(InputError, match=said):
        TASK.check(settings(tmp_path, **changes), chosen=False)


def test_without_an_entity_there_is_nothing_to_learn(encoder, tmp_path):
    write(tmp_path / "train-en.tsv", [Sentence(("we",), ("O",))])

    with pytest.raises(CorpusTooSmall, match=r"have tags \['O'\]: need=2 tags"):
        TASK.training(settings(tmp_path), encoder, None)


# The task among the others


def test_dropout_of_the_head_is_drawn_by_worker_so_workers_belong_to_the_result(encoder, tmp_path):
    assert TASK.depends_on_workers(settings(tmp_path), encoder)
    assert not TASK.depends_on_workers(settings(tmp_path, head_dropout=0.0), encoder)


def test_languages_stand_in_xtremes_order():
    assert TASK.sort(["zh", "de", "no", "en", "af"]) == ["en", "af", "de", "zh", "no"]


def test_a_suite_plans_measures_and_sums_it_up_like_any_task(tuned, data, tmp_path):
    task = {"settings": settings(data).model_dump(mode="json", exclude_defaults=True) | {"task": "named_entities"}}
    config = SuiteConfig.parse({"models": {"toy": str(tuned)}, "tasks": {"panx": task}})
    (planned,) = trials.plan(config)

    scores = trials.measure(planned.settings, tuned, tuned, {}, tmp_path)
    summary = summarise(config, {planned.trial.name: scores})
    suite_page.write(tmp_path / "page", summary)

    assert trials.read_scores(tmp_path / trials.SCORES).mean == scores.mean
    assert summary.flatten()["panx/de"] == scores.languages["de"]["f1"]
    page = (tmp_path / "page/suite.md").read_text()
    assert f"{100 * scores.mean['f1']:.1f}" in page
