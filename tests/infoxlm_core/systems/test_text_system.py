"""XLM and BERT as baselines: layouts, samples, equality with Hugging Face's classes, every row of the comparison."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from markupsafe import escape
from tokenizers import Tokenizer
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import Metaspace
from transformers import AutoTokenizer, BertForPreTraining, XLMWithLMHeadModel

from infoxlm_core.config import EvaluationConfig, TokenizationConfig
from infoxlm_core.data.layouts import Sequences
from infoxlm_core.data.sampling import make_rng
from infoxlm_core.data.shards import Table, open_shards
from infoxlm_core.errors import ConfigError, CorpusTooSmall, InputError, TokenizerMismatch
from infoxlm_core.model.objectives import cross_entropy
from infoxlm_core.results import page
from infoxlm_core.results.summaries.ablation import summarise_metrics
from infoxlm_core.results.trials import Trial
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.systems.bert import DOCUMENT_SENTENCES, BERTSampler, Document, truncate
from infoxlm_core.systems.table import SYSTEMS
from infoxlm_core.systems.text_batches import TextBatch, list_languages, micro_batches, pack_segments
from infoxlm_core.systems.text_learner import TextLearner
from infoxlm_core.systems.xlm import XLMSampler, count_windows, lay_out_pairs, read_windows
from infoxlm_core.tasks import TASKS
from infoxlm_core.tasks.perplexity import Perplexity
from infoxlm_core.tasks.questions import Questions
from tests.toys.corpus import tokenized, write_corpus
from tests.toys.pretraining import write_shards
from tests.toys.systems import COMPARED, PUBLISHED, config_of, export, learner_of
from tests.toys.text import messages


def sequences_of(*rows: list[int]) -> Sequences:
    return pack_segments([np.array(row) for row in rows])


def table_of(*sentences: list[int]) -> Table:
    """Return a table of sentences, each of which ends with `</s>` (id 2)."""
    tokens = [token for sentence in sentences for token in [*sentence, 2]]
    lengths = [len(sentence) + 1 for sentence in sentences]
    return Table(np.array(tokens, np.uint32), np.cumsum([0, *lengths]))


def logits_of(learner: TextLearner, batch: TextBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logits (N, V) of the targets, and those of sentence objectives."""
    states, bias, sentence_logits = learner.module.compute_target_states(batch)
    return F.linear(states, learner.module.encoder.token_embedding.weight, bias), sentence_logits


def add_noise_to_weights(learner: TextLearner) -> None:
    """Change all parameters, so that no bias is 0 and no norm 1: a parameter that is not used would be noticed."""
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in learner.module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=rng))
    learner.module.eval()


# XLM


@pytest.mark.item("A19")
def test_xlm_pairs_have_four_eos_restarting_positions_and_a_language_for_each_side():
    pairs, positions, types = lay_out_pairs(sequences_of([10, 11], [12]), sequences_of([20], [21, 22]), (5, 7))

    assert pairs.flat.tolist() == [2, 10, 11, 2, 2, 20, 2, 2, 12, 2, 2, 21, 22, 2]
    assert pairs.lengths.tolist() == [7, 7]
    assert positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 1, 2, 3]
    assert types.tolist() == [5, 5, 5, 5, 7, 7, 7, 5, 5, 5, 7, 7, 7, 7]


def test_stream_starts_with_eos_and_is_padded_at_the_front():
    table = table_of([10, 11], [12])

    assert count_windows(table, 4) == 2
    assert read_windows(table, np.array([1, 0]), 4).tolist() == [[11, 2, 12, 2], [2, 2, 2, 10]]
    assert count_windows(table_of(), 4) == 0


def test_xlm_alternates_objectives_and_has_one_language_per_step(tiny_shards):
    shards = open_shards(tiny_shards)
    sampler = XLMSampler(shards, config_of("XLM MLM+TLM"))

    objectives = []
    languages_by_kind: dict[str, set] = {}
    for step in range(40):
        samples_of_shards = [sampler.draw(step, shard) for shard in range(4)]
        objectives.append(samples_of_shards[0].objective)
        languages = {tuple(dict.fromkeys(samples.types.tolist())) for samples in samples_of_shards}
        assert len(languages) == 1
        languages_by_kind.setdefault(sampler.kind_of(step), set()).update(languages)

    assert objectives == ["mlm", "tlm"] * 20
    assert list_languages(shards) == ["de", "en", "fr"]
    assert languages_by_kind == {
        "mlm/de": {(0,)}, "mlm/fr": {(2,)}, "tlm/en-de": {(0, 1), (1, 0)}, "tlm/en-fr": {(1, 2), (2, 1)},
    }  # fmt: skip


def test_clm_predicts_every_token_of_a_window_but_the_first(tiny_shards):
    samples = XLMSampler(open_shards(tiny_shards), config_of("XLM-CLM")).draw(0, 0)

    windows = samples.inputs.flat.reshape(2, 24)
    assert samples.target_ids.tolist() == windows[:, 1:].ravel().tolist()
    assert samples.target_rows.tolist() == [*range(23), *range(24, 47)]


def test_xlm_drops_pairs_with_a_long_side(tiny_shards):
    shards = open_shards(tiny_shards)
    sampler = XLMSampler(shards, config_of("XLM MLM+TLM", batches={"side_tokens": 5}, objectives={"mlm": 0.0}))

    assert max(sampler.draw(step, 0).inputs.lengths.max() for step in range(20)) == 2 * 5 + 4
    with pytest.raises(CorpusTooSmall, match="TLM needs pairs with sides of at most 2 tokens"):
        XLMSampler(shards, config_of("XLM MLM+TLM", batches={"side_tokens": 2}))


@pytest.mark.item("A28")
def test_changed_next_token_changes_no_earlier_output_of_a_causal_model(tiny_shards):
    learner = learner_of(config_of("XLM-CLM"), open_shards(tiny_shards))
    learner.module.eval()
    batch = learner.batches(0)[0]
    changed_ids = batch.ids.clone()
    changed_ids[10] = 63 if changed_ids[10] != 63 else 62
    changed_batch = replace(batch, ids=changed_ids)

    before = logits_of(learner, batch)[0]
    after = logits_of(learner, changed_batch)[0]

    assert torch.equal(before[:10], after[:10])
    assert not torch.allclose(before[10:23], after[10:23])
    assert torch.equal(before[23:], after[23:])  # another window
    mlm_before = logits_of(learner, replace(batch, objective="mlm"))[0]
    mlm_after = logits_of(learner, replace(changed_batch, objective="mlm"))[0]
    assert not torch.allclose(mlm_before[:10], mlm_after[:10])


# BERT


@pytest.mark.item("A19")
def test_bert_samples_have_two_segments_and_no_masked_special_tokens(tiny_shards):
    sampler = BERTSampler(open_shards(tiny_shards), config_of("mBERT"))

    for step in range(50):
        samples = sampler.draw(step, 1)
        original_ids = samples.inputs.flat.copy()
        original_ids[samples.target_rows] = samples.target_ids
        starts = samples.inputs.lengths.cumsum()[:-1]
        for ids, types in zip(np.split(original_ids, starts), np.split(samples.types, starts), strict=True):
            first_end, second_end = np.flatnonzero(ids == 2)
            assert ids[0] == 0
            assert second_end == len(ids) - 1 <= 23
            assert types.tolist() == [0] * (first_end + 1) + [1] * (second_end - first_end)
        assert samples.target_ids.min() > 3


@pytest.mark.item("A19")
def test_smallest_blocks_hold_two_segments_of_a_token(tiny_shards):
    sampler = BERTSampler(open_shards(tiny_shards), config_of("mBERT", batches={"block_tokens": 5}))

    lengths = [length for step in range(20) for length in sampler.draw(step, 0).inputs.lengths]

    assert set(lengths) == {5}
    with pytest.raises(ConfigError, match=r"^batches\.block_tokens: .*greater than or equal to 5, not 4"):
        config_of("mBERT", batches={"block_tokens": 4})


def test_half_of_the_second_parts_come_from_another_document(tmp_path):
    shards = open_shards(write_shards(tmp_path, {"one": 40 * DOCUMENT_SENTENCES}))
    sampler = BERTSampler(shards, config_of("mBERT"))
    rng = make_rng("next")
    table = sampler.tables[0]
    text = table.tokens[table.tokens != 2].tolist()

    labels = []
    for row in range(4000):
        first, second, label = sampler._draw_pair(0, row % len(table), rng)
        tokens = [*first.tolist(), *second.tolist()]
        is_truncated = len(tokens) == 21
        assert len(tokens) <= 21
        if label == 0 and not is_truncated:
            assert any(text[i : i + len(tokens)] == tokens for i in range(len(text)))
        labels.append(label)

    assert np.mean(labels) == pytest.approx(0.5, abs=3 * 0.5 / len(labels) ** 0.5)


def test_another_document_is_drawn_from_all_others_of_the_language(tiny_shards):
    sampler = BERTSampler(open_shards(tiny_shards), config_of("mBERT"))
    rng = make_rng("other")

    documents = {sampler._draw_other_document(Document(0, 1), rng) for _ in range(200)}

    assert documents == {(0, 0), (1, 0)}  # 40 sentences are two documents, 25 are one; tables 2 and 3 are French


def test_language_of_one_document_is_refused(tmp_path):
    shards = open_shards(write_shards(tmp_path, {"one": DOCUMENT_SENTENCES}))

    with pytest.raises(CorpusTooSmall, match=r"two documents of 32 sentences of each language, but de has 1"):
        BERTSampler(shards, config_of("mBERT"))


def test_longer_part_is_truncated_at_either_end():
    longer = np.arange(10)
    shorter = np.arange(100, 104)
    rng = make_rng("cut")

    results = [truncate(longer, shorter, 8, rng) for _ in range(200)]

    assert all(second.tolist() == shorter.tolist() for _, second in results)
    assert all(first.tolist() == list(range(first[0], first[0] + 4)) for first, _ in results)
    assert {first[0] for first, _ in results} == set(range(7))  # 0 to 6 of its 10 tokens are dropped at the front


# Hugging Face


def pad_batch(batch: TextBatch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return a packed batch as Hugging Face's padded inputs (B, L), and which of their tokens are not padding."""
    is_token = torch.arange(max(batch.lengths))[None] < torch.tensor(batch.lengths)[:, None]
    inputs = {"attention_mask": is_token.long()}
    for name, values in {"input_ids": batch.ids, "position_ids": batch.positions, "langs": batch.types}.items():
        rows = values.split(list(batch.lengths))
        inputs[name] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)
    return inputs, is_token


@pytest.mark.item("A22", "A32")
@pytest.mark.parametrize("row", ["XLM-CLM", "XLM-MLM", "XLM MLM+TLM"])
def test_exported_xlm_has_our_logits_in_hugging_face(tiny_shards, tmp_path, row):
    learner = learner_of(config_of(row), open_shards(tiny_shards))
    add_noise_to_weights(learner)
    export(learner, open_shards(tiny_shards), tmp_path)
    hugging_face_model = XLMWithLMHeadModel.from_pretrained(tmp_path).double()
    learner.module.double()

    for step in range(2):
        batch = learner.batches(step)[0]
        inputs, is_token = pad_batch(batch)
        with torch.inference_mode():
            expected = hugging_face_model(**inputs).logits[is_token][batch.target_rows]
            logits, _ = logits_of(learner, batch)
        # transformers computes XLM's softmax in fp32 even so: 2**-24 of a logit of size 1 and more, layer by layer
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert hugging_face_model.config.lang2id == {"de": 0, "en": 1, "fr": 2}
    assert hugging_face_model.config.causal == (row == "XLM-CLM")


@pytest.mark.item("A22", "A32")
def test_exported_bert_has_our_logits_in_hugging_face(tiny_shards, tmp_path):
    learner = learner_of(config_of("mBERT"), open_shards(tiny_shards))
    add_noise_to_weights(learner)
    export(learner, open_shards(tiny_shards), tmp_path)
    hugging_face_model = BertForPreTraining.from_pretrained(tmp_path).double()
    learner.module.double()

    batch = learner.batches(0)[0]
    inputs, is_token = pad_batch(batch)
    inputs["token_type_ids"] = inputs.pop("langs") * is_token  # padding is segment 0
    inputs["position_ids"] = inputs["position_ids"] * is_token
    with torch.inference_mode():
        expected = hugging_face_model(**inputs)
        logits, sentence_logits = logits_of(learner, batch)

    expected_logits = expected.prediction_logits[is_token][batch.target_rows]
    torch.testing.assert_close(logits, expected_logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(sentence_logits["nsp"], expected.seq_relationship_logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("row", ["XLM-MLM", "mBERT"])
def test_run_starts_from_an_exported_model(tiny_shards, tmp_path, row):
    shards = open_shards(tiny_shards)
    exported = learner_of(config_of(row), shards)
    add_noise_to_weights(exported)
    export(exported, shards, tmp_path)
    config = config_of(row, model={"start": str(tmp_path), "layers": 7})

    started = learner_of(config, shards)

    pairs = zip(exported.module.parameters(), started.module.parameters(), strict=True)
    assert all(torch.equal(weight, started_weight) for weight, started_weight in pairs)
    config_file = tmp_path / "config.json"
    config_file.write_text(re.sub(r'layers": 2', 'layers": 3', config_file.read_text()))
    with pytest.raises(InputError, match=r"has no weight .*: give a complete model"):
        learner_of(config, shards)


@pytest.mark.parametrize(
    ("row", "change", "reason"),
    [
        ("XLM-MLM", {"vocab_size": "many"}, r"config\.json cannot be read \(.*vocab_size.*expected int, got str"),
        ("XLM-MLM", {"n_heads": 0}, r"config\.json: 0 attention heads do not divide a hidden size of 16"),
        ("mBERT", {"hidden_size": None}, r"config\.json cannot be read \(.*hidden_size.*expected int, got NoneType"),
        ("mBERT", {"num_attention_heads": 3}, r"config\.json: 3 attention heads do not divide a hidden size of 16"),
        ("XLM-MLM", {"gelu_activation": False}, r"config\.json: gelu_activation is False, not True"),
        ("mBERT", {"hidden_act": "relu"}, r"config\.json: hidden_act is 'relu', not 'gelu'"),
    ],
)
def test_start_with_a_damaged_or_unsupported_config_is_refused(tiny_shards, tmp_path, row, change, reason):
    shards = open_shards(tiny_shards)
    export(learner_of(config_of(row), shards), shards, tmp_path)
    config_file = tmp_path / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | change))

    with pytest.raises(InputError, match=reason):
        learner_of(config_of(row, model={"start": str(tmp_path)}), shards)


def test_tokenizer_with_other_special_ids_is_refused(tiny_shards):
    shards = open_shards(tiny_shards)
    facts = shards.manifest["facts"] | {"vocabulary": asdict(replace(shards.vocabulary, begin=5))}

    with pytest.raises(TokenizerMismatch, match=r"needs XLM-R's ids .* begin with 5 and end with 2: set tokenization"):
        learner_of(config_of("mBERT"), replace(shards, manifest={"facts": facts}))


@pytest.mark.parametrize("row", ["XLM-MLM", "mBERT"])
def test_start_with_another_vocabulary_of_the_same_size_is_refused(tmp_path, row):
    shards = []
    for number, pairs in enumerate((messages(0)[:300], messages(0)[300:])):
        text = {"en": [english for english, _ in pairs], "de": [german for _, german in pairs]}
        corpus = write_corpus(tmp_path / f"corpus{number}", text, {})
        config = TokenizationConfig(vocabulary_size=80, processes=1)
        shards.append(open_shards(tokenized(config, corpus, tmp_path / f"shards{number}")))
    export(learner_of(config_of(row), shards[0]), shards[0], tmp_path / "model")
    config = config_of(row, model={"start": str(tmp_path / "model")})

    learner_of(config, shards[0])  # its own vocabulary
    with pytest.raises(TokenizerMismatch, match=r"tokenize with the model's own \(tokenization.model: .*bpe.model"):
        learner_of(config, shards[1])


def test_xlm_of_other_languages_is_refused_as_start(tiny_shards, tmp_path):
    shards = open_shards(tiny_shards)
    export(learner_of(config_of("XLM-MLM"), shards), shards, tmp_path / "model")
    other_shards = open_shards(write_shards(tmp_path / "shards", {"one": 9}, languages=("de", "ru")))

    with pytest.raises(ConfigError, match=r"has the languages \['de', 'en', 'fr'\], but the shards have"):
        learner_of(config_of("XLM-MLM", model={"start": str(tmp_path / "model")}), other_shards)


@pytest.mark.parametrize(
    ("row", "ids", "pair_ids", "pair_types"),
    [
        ("XLM-MLM", [2, 4, 5, 2], [2, 4, 2, 5, 2], [0, 0, 0, 0, 0]),
        ("mBERT", [0, 4, 5, 2], [0, 4, 2, 5, 2], [0, 0, 0, 1, 1]),
    ],
)
def test_exported_tokenizer_has_the_layout_of_the_system(tiny_shards, tmp_path, row, ids, pair_ids, pair_types):
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁a", -1.0), ("▁b", -1.0)]
    tokenizer = Tokenizer(Unigram(pieces, unk_id=3))
    tokenizer.pre_tokenizer = Metaspace()
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    shards = replace(open_shards(tiny_shards), directory=tmp_path)

    export(learner_of(config_of(row), shards), shards, tmp_path / "model")

    exported = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert exported("a b")["input_ids"] == ids
    encoded_pair = exported("a", "b", return_token_type_ids=True)
    assert encoded_pair["input_ids"] == pair_ids
    assert encoded_pair["token_type_ids"] == pair_types


# training


@pytest.mark.parametrize("row", ["XLM-CLM", "mBERT"])
def test_losses_and_gradients_equal_those_of_all_logits(tiny_shards, row):
    learner = learner_of(config_of(row, model={"hidden": 32, "ffn": 128}), open_shards(tiny_shards))
    add_noise_to_weights(learner)
    parameters = list(learner.module.parameters())
    batch = learner.batches(0)[0]
    logits, sentence_logits = logits_of(learner, batch)
    token_loss = cross_entropy(logits, batch.target_ids)
    expected_loss = 0.5 * token_loss
    for name, labels in batch.labels.items():
        expected_loss = expected_loss + 0.25 * cross_entropy(sentence_logits[name], labels)
    expected_gradients = torch.autograd.grad(expected_loss, parameters, materialize_grads=True)

    loss, sums = learner.losses(batch, {"clm": 0.5, "mlm": 0.5, "nsp": 0.25})
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)

    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(sums[batch.objective], token_loss, rtol=1e-6, atol=0)
    gradient = torch.cat([part.flatten() for part in gradients])
    expected_gradient = torch.cat([part.flatten() for part in expected_gradients])
    assert (gradient - expected_gradient).norm() < 1e-6 * expected_gradient.norm()


def test_initial_weights_of_xlm_have_its_standard_deviations(tiny_shards):
    model = SYSTEMS["xlm"].build(config_of("XLM-MLM", model={"hidden": 64, "ffn": 256}), open_shards(tiny_shards))

    assert model.encoder.token_embedding.weight.std().item() == pytest.approx(1 / 8, rel=0.05)
    assert model.encoder.type_embedding.weight.std().item() == pytest.approx(1 / 8, rel=0.2)
    assert model.encoder.layers[0].up.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_xlm_refuses_an_ffn_size_other_than_four_times_the_hidden_size(tiny_shards):
    with pytest.raises(ConfigError, match=r"model.ffn \(32\) must be 4 \* model.hidden \(64\) with system xlm"):
        learner_of(config_of("XLM-MLM", model={"ffn": 32}), open_shards(tiny_shards))


@pytest.mark.parametrize("row", ["XLM MLM+TLM", "mBERT"])
def test_micro_batches_contain_the_samples_in_their_order(tiny_shards, row):
    samples = learner_of(config_of(row, batches={"virtual_shards": 1}), open_shards(tiny_shards)).sampler.draw(1, 0)

    [full_batch] = micro_batches(samples, 8, 5, 0)
    batches = micro_batches(samples, 3, 5, 0)

    assert [batch.rng_key for batch in batches] == [(5, 0, 0), (5, 0, 1), (5, 0, 2)]
    for name in ("ids", "positions", "types", "target_ids"):
        assert torch.equal(torch.cat([getattr(batch, name) for batch in batches]), getattr(full_batch, name))
    for name, labels in full_batch.labels.items():
        assert torch.equal(torch.cat([batch.labels[name] for batch in batches]), labels)
    assert sum((batch.target_counts for batch in batches), ()) == full_batch.target_counts
    masked_ids = torch.cat([batch.ids[batch.target_rows] for batch in batches])
    assert torch.equal(masked_ids, full_batch.ids[full_batch.target_rows])


@pytest.mark.item("A32")
@pytest.mark.parametrize("row", PUBLISHED)
def test_every_published_system_is_a_config_that_computes_a_loss(tiny_shards, row):
    learner = learner_of(config_of(row), open_shards(tiny_shards))
    learner.after_step(0)

    loss, _ = learner.losses(learner.batches(0)[0], dict.fromkeys(learner.weights.by_name, 1.0))

    assert loss.item() > 0


@pytest.mark.item("A32")
def test_every_row_of_the_comparison_trains_on_as_many_tokens_and_is_on_the_page(tmp_path):
    pairs = messages(0)
    text = {"en": [english for english, _ in pairs], "de": [german for _, german in pairs]}
    corpus = write_corpus(tmp_path / "corpus", text, {"en-de": pairs})
    shards = tokenized(TokenizationConfig(vocabulary_size=96, processes=1), corpus, tmp_path / "shards")
    results = []
    for row, settings in COMPARED.items():
        tokens = {} if row == "untrained" else {"tokens": 4000}
        config = config_of(row, model={"max_tokens": 64}, batches={"side_tokens": 28}, **tokens)
        figures = pretrain(config, shards, tmp_path / row, tmp_path / "runs" / row)
        metrics = measure(tmp_path / row / "encoder", pairs[:20])
        metrics |= {name: figures[name] for name in ("steps", "tokens_seen")}
        results.append((Trial.parse({"variant": row, "seed": 1, "what": settings["what"]}), metrics))
    summary = summarise_metrics("systems", results)
    page.write_sweep_report(tmp_path, "comparison", summary)

    tokens_seen = {row: variant.costs["tokens_seen"].mean for row, variant in summary.variants.items()}
    del tokens_seen["untrained"]
    assert all(count == pytest.approx(4000, rel=0.15) for count in tokens_seen.values())  # whole steps
    perplexity = {row: variant.metrics["perplexity/mean"].mean for row, variant in summary.variants.items()}
    assert [row for row, value in perplexity.items() if value is None] == ["XLM-CLM"]
    assert all(variant.metrics["retrieval/served"].n == 1 for variant in summary.variants.values())
    html = (tmp_path / "comparison.html").read_text()
    assert "tokens seen" in html
    assert all(escape(settings["what"]) in html for settings in COMPARED.values())


def measure(encoder: Path, pairs: list[tuple[str, str]]) -> dict[str, float]:
    """Return the metrics of an encoder in retrieval and, if it has a masked-LM head, in perplexity."""
    sentences = {"de": [german for _, german in pairs]}
    questions = Questions("en", {"de": len(pairs)}, {"de": pairs}, sentences, {"de": torch.ones(len(pairs)).bool()})
    metrics = {}
    for task in (TASKS["retrieval"], Perplexity()):
        scores = task.measure_held_out(questions, encoder, EvaluationConfig())
        if scores is not None:
            metrics |= task.name_metrics(scores, questions, task.name)
    return metrics
