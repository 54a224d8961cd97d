"""XLM and BERT as baselines: layouts, samples, equality with Hugging Face's classes, every row of the comparison."""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from markupsafe import escape
from tokenizers import Tokenizer
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import Metaspace
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer, BertForPreTraining, XLMWithLMHeadModel

from infoxlm_core.config import EvaluationConfig, TokenizationConfig
from infoxlm_core.data.layouts import Sequences
from infoxlm_core.data.sampling import generator
from infoxlm_core.data.shards import Table, open_shards
from infoxlm_core.errors import ConfigError, CorpusTooSmall, InputError, TokenizerMismatch
from infoxlm_core.model.objectives import cross_entropy
from infoxlm_core.results import page
from infoxlm_core.results.summary import summarise_metrics
from infoxlm_core.results.trials import Trial
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.systems import text_learner
from infoxlm_core.systems.bert import DOCUMENT_SENTENCES, BERTSampler, truncate
from infoxlm_core.systems.table import SYSTEMS
from infoxlm_core.systems.text_batches import languages_of, micro_batches
from infoxlm_core.systems.text_learner import TextLearner
from infoxlm_core.systems.xlm import XLMSampler, count_windows, lay_out_pairs, read_windows
from infoxlm_core.tasks import TASKS
from infoxlm_core.tasks.perplexity import Perplexity
from infoxlm_core.tasks.questions import Questions
from tests.toys.corpus import tokenized, write_corpus
from tests.toys.pretraining import VOCABULARY, write_shards
from tests.toys.systems import COMPARED, PUBLISHED, config_of, export, learner_of
from tests.toys.text import messages


def of(*rows: list[int]) -> Sequences:
    return Sequences(np.concatenate([np.array(r, np.int64) for r in rows]), np.array([len(row) for row in rows]))


def table_of(*sentences: list[int]) -> Table:
    lengths = [len(sentence) + 1 for sentence in sentences]
    return Table(np.array([t for s in sentences for t in [*s, 2]], np.uint32), np.cumsum([0, *lengths]))


# XLM


@pytest.mark.item("A19")
def test_an_xlm_pair_has_four_eos_positions_that_restart_and_a_language_a_side():
    laid, positions, types = lay_out_pairs(of([10, 11], [12]), of([20], [21, 22]), (5, 7))

    assert laid.flat.tolist() == [2, 10, 11, 2, 2, 20, 2, 2, 12, 2, 2, 21, 22, 2]
    assert laid.lengths.tolist() == [7, 7]
    assert positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 1, 2, 3]
    assert types.tolist() == [5, 5, 5, 5, 7, 7, 7, 5, 5, 5, 7, 7, 7, 7]


def test_a_stream_opens_with_eos_and_is_filled_at_the_front():
    table = table_of([10, 11], [12])

    assert count_windows(table, 4) == 2
    assert read_windows(table, np.array([1, 0]), 4).tolist() == [[11, 2, 12, 2], [2, 2, 2, 10]]
    assert count_windows(table_of(), 4) == 0


def test_xlm_takes_one_objective_in_turn_and_one_language_a_step(tiny_shards):
    shards = open_shards(tiny_shards)
    sampler = XLMSampler(shards, config_of("XLM MLM+TLM"))

    steps = [[sampler.draw(step, shard) for shard in range(4)] for step in range(40)]

    assert [samples[0].objective for samples in steps[:4]] == ["mlm", "tlm", "mlm", "tlm"]
    languages = [tuple(dict.fromkeys(types)) for samples in steps for s in samples for types in [s.types.tolist()]]
    assert all(len({tuple(dict.fromkeys(s.types.tolist())) for s in samples}) == 1 for samples in steps)
    assert languages_of(shards) == ["de", "en", "fr"]
    assert {name for name in languages if len(name) == 1} == {(0,), (2,)}  # mono de, fr
    assert {name for name in languages if len(name) == 2} == {(0, 1), (1, 0), (1, 2), (2, 1)}  # both directions
    kinds = {(sampler.kind_of(step), samples[0].objective, *sorted(set(samples[0].types.tolist())))
             for step, samples in enumerate(steps)}  # fmt: skip
    assert kinds == {("mlm/de", "mlm", 0), ("mlm/fr", "mlm", 2), ("tlm/en-de", "tlm", 0, 1), ("tlm/en-fr", "tlm", 1, 2)}


def test_a_clm_window_predicts_every_token_but_its_first(tiny_shards):
    samples = XLMSampler(open_shards(tiny_shards), config_of("XLM-CLM")).draw(0, 0)

    text = samples.inputs.flat.reshape(2, 24)
    assert samples.target_ids.tolist() == text[:, 1:].ravel().tolist()
    assert samples.target_rows.tolist() == [*range(23), *range(24, 47)]


def test_xlm_drops_pairs_with_a_long_side(tiny_shards):
    shards = open_shards(tiny_shards)
    config = config_of("XLM MLM+TLM", batches={"side_tokens": 5}, objectives={"mlm": 0.0})
    sampler = XLMSampler(shards, config)

    assert max(sampler.draw(step, 0).inputs.lengths.max() for step in range(20)) == 2 * 5 + 4
    with pytest.raises(CorpusTooSmall, match="TLM needs pairs with sides of at most 2 tokens"):
        XLMSampler(shards, config_of("XLM MLM+TLM", batches={"side_tokens": 2}))


@pytest.mark.item("A28")
def test_in_a_causal_model_the_next_token_changes_no_output_before_it(tiny_shards):
    shards = open_shards(tiny_shards)
    learner = learner_of(config_of("XLM-CLM"), shards)
    learner.module.eval()
    batch = learner.batches(0)[0]
    changed = batch.ids.clone()
    changed[10] = 63 if changed[10] != 63 else 62
    other = type(batch)(**{**vars(batch), "ids": changed})

    before, after = (learner.module.logits(b)[0] for b in (batch, other))

    assert torch.equal(before[:10], after[:10]) and not torch.allclose(before[10:23], after[10:23])
    assert torch.equal(before[23:], after[23:])  # another window
    masked = type(batch)(**{**vars(batch), "objective": "mlm"}), type(other)(**{**vars(other), "objective": "mlm"})
    assert not torch.allclose(*(learner.module.logits(b)[0][:10] for b in masked))


# BERT


@pytest.mark.item("A19")
def test_berts_samples_have_two_parts_two_segments_and_mask_no_special_token(tiny_shards):
    sampler = BERTSampler(open_shards(tiny_shards), config_of("mBERT"))

    for step in range(50):
        samples = sampler.draw(step, 1)
        original = samples.inputs.flat.copy()
        original[samples.target_rows] = samples.target_ids
        cuts = samples.inputs.lengths.cumsum()[:-1]
        for ids, types in zip(np.split(original, cuts), np.split(samples.types, cuts), strict=True):
            ends = np.flatnonzero(ids == 2)
            assert ids[0] == 0 and len(ends) == 2 and ends[1] == len(ids) - 1 <= 23
            assert types.tolist() == [0] * (ends[0] + 1) + [1] * (len(ids) - ends[0] - 1)
        assert samples.target_ids.min() > 3


@pytest.mark.item("A19")
def test_half_of_berts_second_parts_come_from_another_document(tmp_path):
    sampler = BERTSampler(open_shards(write_shards(tmp_path, {"one": 40 * DOCUMENT_SENTENCES})), config_of("mBERT"))
    rng, labels = generator("next"), []
    for row in range(4000):
        table = sampler.tables[0]
        a, b, label = sampler._draw_pair(0, row % len(table), rng)
        if label == 0:  # it is what stands in the text
            text = table.tokens[table.tokens != 2].tolist()
            joined = [*a.tolist(), *b.tolist()]
            assert len(joined) <= 21
            if len(joined) < 21:  # nothing was cut
                assert any(text[i : i + len(joined)] == joined for i in range(len(text)))
        labels.append(label)

    assert np.mean(labels) == pytest.approx(0.5, abs=3 * 0.5 / len(labels) ** 0.5)


def test_another_document_is_never_the_same_and_every_other_is_drawn(tiny_shards):
    sampler, rng = BERTSampler(open_shards(tiny_shards), config_of("mBERT")), generator("other")

    found = {sampler._draw_other_document(0, 1, rng) for _ in range(200)}

    assert found == {(0, 0), (1, 0)}  # 40 sentences are two documents, 25 are one; tables 2 and 3 are French


def test_a_language_of_one_document_has_no_wrong_continuation(tmp_path):
    shards = open_shards(write_shards(tmp_path, {"one": DOCUMENT_SENTENCES}))

    with pytest.raises(CorpusTooSmall, match=r"two documents of 32 sentences of each language, but de has 1"):
        BERTSampler(shards, config_of("mBERT"))


def test_the_longer_part_is_cut_at_either_end():
    a, b, rng = np.arange(10), np.arange(100, 104), generator("cut")

    cuts = [truncate(a, b, 8, rng) for _ in range(200)]

    assert {(len(x), len(y)) for x, y in cuts} == {(4, 4)}
    assert all((np.diff(x) == 1).all() and y.tolist() == b.tolist() for x, y in cuts)
    assert {x[0] for x, _ in cuts} == set(range(7))  # 0 to 6 of its 10 tokens fall at the front


# Hugging Face


def padded(batch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A packed batch as the padded one that Hugging Face takes, and where its rows went: (T,) bool of (B, L)."""
    parts = {"input_ids": batch.ids, "position_ids": batch.positions, "langs": batch.types}
    grid = {
        name: torch.nn.utils.rnn.pad_sequence(part.split(list(batch.lengths)), batch_first=True, padding_value=1)
        for name, part in parts.items()
    }
    real = torch.arange(max(batch.lengths))[None] < torch.tensor(batch.lengths)[:, None]
    return grid | {"attention_mask": real.long()}, real


def with_uneven_weights(learner: TextLearner) -> TextLearner:
    """Biases and norms that are not 0 and 1, so that a forgotten one is seen."""
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in learner.module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=rng))
    learner.module.eval()
    return learner


@pytest.mark.item("A22", "A32")
@pytest.mark.parametrize("row", ["XLM-CLM", "XLM-MLM", "XLM MLM+TLM"])
def test_hugging_faces_xlm_gives_our_logits(tiny_shards, tmp_path, row):
    learner = with_uneven_weights(learner_of(config_of(row), open_shards(tiny_shards)))
    export(learner, open_shards(tiny_shards), tmp_path)
    theirs = XLMWithLMHeadModel.from_pretrained(tmp_path).double()
    learner.module.double()

    for step in range(2):
        batch = learner.batches(step)[0]
        inputs, real = padded(batch)
        with torch.inference_mode():
            expected, (logits, _) = theirs(**inputs).logits[real], learner.module.logits(batch)
        # transformers computes XLM's softmax in fp32 even so: 2**-24 of a logit of size 1 and more, layer by layer
        torch.testing.assert_close(logits, expected[batch.target_rows], rtol=1e-5, atol=1e-5)
    assert theirs.config.lang2id == {"de": 0, "en": 1, "fr": 2}
    assert theirs.config.causal == (row == "XLM-CLM")


@pytest.mark.item("A22", "A32")
def test_hugging_faces_bert_gives_our_logits(tiny_shards, tmp_path):
    learner = with_uneven_weights(learner_of(config_of("mBERT"), open_shards(tiny_shards)))
    export(learner, open_shards(tiny_shards), tmp_path)
    theirs = BertForPreTraining.from_pretrained(tmp_path).double()
    learner.module.double()

    batch = learner.batches(0)[0]
    inputs, real = padded(batch)
    inputs["token_type_ids"] = inputs.pop("langs") * real  # padding is segment 0
    inputs["position_ids"] = inputs["position_ids"] * real
    with torch.inference_mode():
        expected, (logits, by_sequence) = theirs(**inputs), learner.module.logits(batch)

    torch.testing.assert_close(logits, expected.prediction_logits[real][batch.target_rows], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(by_sequence["nsp"], expected.seq_relationship_logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("row", ["XLM-MLM", "mBERT"])
def test_a_run_starts_from_an_exported_model(tiny_shards, tmp_path, row):
    shards = open_shards(tiny_shards)
    first = with_uneven_weights(learner_of(config_of(row), shards))
    export(first, open_shards(tiny_shards), tmp_path)

    second = learner_of(config_of(row, model={"start": str(tmp_path), "layers": 7}), shards)

    assert all(torch.equal(a, b) for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True))
    with pytest.raises(InputError, match=r"has no weight .*: give a complete model"):
        SYSTEMS[first.config.system].load_into(
            SYSTEMS[first.config.system].build(config_of(row, model={"layers": 3}), shards), tmp_path
        )


@pytest.mark.parametrize("row", ["XLM-CLM", "mBERT"])
def test_a_tokenizer_with_other_special_ids_is_refused(tiny_shards, row):
    shards = open_shards(tiny_shards)
    facts = shards.manifest["facts"] | {"vocabulary": asdict(replace(shards.vocabulary, begin=5))}

    with pytest.raises(TokenizerMismatch, match=r"needs XLM-R's ids .* begin with 5 and end with 2: set tokenization"):
        learner_of(config_of(row), replace(shards, manifest={"facts": facts}))


def test_an_xlm_of_other_languages_is_no_start(tiny_shards, tmp_path):
    first = learner_of(config_of("XLM-MLM"), open_shards(tiny_shards))
    export(first, open_shards(tiny_shards), tmp_path / "model")
    others = open_shards(write_shards(tmp_path / "shards", {"one": 9}, languages=("de", "ru")))

    with pytest.raises(ConfigError, match=r"has the languages \['de', 'en', 'fr'\], but the shards have"):
        learner_of(config_of("XLM-MLM", model={"start": str(tmp_path / "model")}), others)


@pytest.mark.parametrize(
    ("row", "one", "two", "types"),
    [
        ("XLM-MLM", [2, 4, 5, 2], [2, 4, 2, 5, 2], None),
        ("mBERT", [0, 4, 5, 2], [0, 4, 2, 5, 2], [0, 0, 0, 1, 1]),
    ],
)
def test_the_tokenizer_that_travels_along_has_the_systems_special_tokens(tiny_shards, tmp_path, row, one, two, types):
    pieces = [*((name, 0.0) for name in ("<s>", "<pad>", "</s>", "<unk>")), ("▁a", -1.0), ("▁b", -1.0)]
    tokenizer = Tokenizer(Unigram(pieces, unk_id=3))
    tokenizer.pre_tokenizer = Metaspace()
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))

    shards = replace(open_shards(tiny_shards), directory=tmp_path)
    export(learner_of(config_of(row), shards), shards, tmp_path / "model")

    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert loaded("a b")["input_ids"] == one
    assert loaded("a", "b")["input_ids"] == two
    assert types is None or loaded("a", "b", return_token_type_ids=True)["token_type_ids"] == types


# training


class MostLogits(TorchDispatchMode):
    """Rows of the largest matrix as wide as the vocabulary that an operation has made."""

    rows = 0

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        matrix = isinstance(made, torch.Tensor) and made.dim() == 2 and made.is_contiguous()  # no table on its side
        if matrix and made.shape[1] == VOCABULARY:
            self.rows = max(self.rows, len(made))
        return made


@pytest.mark.parametrize("row", ["XLM-CLM", "mBERT"])
def test_losses_and_gradients_are_those_of_all_logits_which_are_never_made(tiny_shards, monkeypatch, row):
    learner = with_uneven_weights(
        learner_of(config_of(row, model={"hidden": 32, "ffn": 128}), open_shards(tiny_shards))
    )
    batch, scales = learner.batches(0)[0], {"clm": 0.5, "mlm": 0.5, "nsp": 0.25}
    logits, by_sequence = learner.module.logits(batch)
    words = cross_entropy(logits, batch.target_ids)
    expected = 0.5 * words + sum(0.25 * cross_entropy(by_sequence[name], batch.labels[name]) for name in batch.labels)
    expected.backward(inputs=list(learner.module.parameters()))
    gradient = torch.cat([p.grad.flatten() for p in learner.module.parameters() if p.grad is not None])
    learner.module.zero_grad()

    monkeypatch.setattr(text_learner, "linear_cross_entropy", partial(text_learner.linear_cross_entropy, rows=5))
    with MostLogits() as seen:
        loss, sums = learner.losses(batch, scales)
        loss.backward()

    assert len(batch.target_ids) > seen.rows == 5
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(sums[batch.objective], words, rtol=1e-6, atol=0)
    found = torch.cat([p.grad.flatten() for p in learner.module.parameters() if p.grad is not None])
    assert (found - gradient).norm() < 1e-6 * gradient.norm()


def test_xlms_first_weights_have_its_spread(tiny_shards):
    model = SYSTEMS["xlm"].build(config_of("XLM-MLM", model={"hidden": 64, "ffn": 256}), open_shards(tiny_shards))

    assert model.encoder.token_embedding.weight.std().item() == pytest.approx(1 / 8, rel=0.05)
    assert model.encoder.type_embedding.weight.std().item() == pytest.approx(1 / 8, rel=0.2)
    assert model.encoder.layers[0].up.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_xlms_inner_size_is_four_times_the_hidden_one(tiny_shards):
    with pytest.raises(ConfigError, match=r"model.ffn \(32\) must be 4 \* model.hidden \(64\) with system xlm"):
        learner_of(config_of("XLM-MLM", model={"ffn": 32}), open_shards(tiny_shards))


@pytest.mark.parametrize("row", ["XLM MLM+TLM", "mBERT"])
def test_micro_batches_change_nothing_but_the_split(tiny_shards, row):
    samples = learner_of(config_of(row, batches={"virtual_shards": 1}), open_shards(tiny_shards)).sampler.draw(1, 0)

    whole, parts = micro_batches(samples, 8, 5, 0), micro_batches(samples, 3, 5, 0)

    assert [part.rng_key for part in parts] == [(5, 0, 0), (5, 0, 1), (5, 0, 2)]
    for name in ("ids", "positions", "types", "target_ids"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole[0], name))
    for name, labels in whole[0].labels.items():
        assert torch.equal(torch.cat([part.labels[name] for part in parts]), labels)
    assert sum((part.target_counts for part in parts), ()) == whole[0].target_counts
    assert torch.equal(torch.cat([part.ids[part.target_rows] for part in parts]), whole[0].ids[whole[0].target_rows])


@pytest.mark.item("A32")
@pytest.mark.parametrize("row", PUBLISHED)
def test_every_published_system_starts_takes_steps_and_is_exported_by_configuration_only(tiny_shards, tmp_path, row):
    figures = pretrain(config_of(row), tiny_shards, tmp_path / "out", tmp_path / "run")

    assert any(name.startswith("loss/") for name in figures)
    assert all((tmp_path / "out" / name / "model.safetensors").is_file() for name in ("encoder", "start"))


@pytest.mark.item("A32")
def test_every_row_of_the_comparison_sees_as_many_tokens_and_reaches_the_page(tmp_path):
    pairs = messages(0)
    text = {"en": [english for english, _ in pairs], "de": [german for _, german in pairs]}
    corpus = write_corpus(tmp_path / "corpus", text, {"en-de": pairs})
    shards = tokenized(TokenizationConfig(vocabulary_size=96, processes=1), corpus, tmp_path / "shards")
    sizes = {"model": {"max_tokens": 64}, "batches": {"side_tokens": 28}}
    results = []
    for row, settings in COMPARED.items():
        config = config_of(row, **sizes) if row == "untrained" else config_of(row, **sizes, tokens=4000)
        figures = pretrain(config, shards, tmp_path / row, tmp_path / "runs" / row)
        metrics = measured(tmp_path / row / "encoder", pairs[:20])
        metrics |= {name: figures[name] for name in ("steps", "tokens_seen")}
        results.append((Trial.parse({"variant": row, "seed": 1, "what": settings["what"]}), metrics))
    summary = summarise_metrics("systems", results)
    page.write(tmp_path, "comparison", summary)

    tokens = {row: variant.costs["tokens_seen"].mean for row, variant in summary.variants.items()}
    del tokens["untrained"]
    assert all(value == pytest.approx(4000, rel=0.15) for value in tokens.values())  # whole steps
    perplexity = {row: variant.metrics["perplexity/mean"].mean for row, variant in summary.variants.items()}
    assert [row for row, value in perplexity.items() if value is None] == ["XLM-CLM"]
    assert all(variant.metrics["retrieval/served"].n == 1 for variant in summary.variants.values())
    html = (tmp_path / "comparison.html").read_text()
    assert "tokens seen" in html and all(escape(settings["what"]) in html for settings in COMPARED.values())


def measured(encoder: Path, pairs: list[tuple[str, str]]) -> dict[str, float]:
    """Return the metrics of an encoder in retrieval and, if it fills gaps, in perplexity."""
    config = EvaluationConfig()
    sentences = {"de": [german for _, german in pairs]}
    questions = Questions("en", {"de": len(pairs)}, {"de": pairs}, sentences, {"de": torch.ones(len(pairs)).bool()})
    metrics = {}
    for task in (TASKS["retrieval"], Perplexity()):
        scores = task.measure_held_out(questions, encoder, config)
        if scores is not None:
            metrics |= task.name_metrics(scores, questions, task.name)
    return metrics
