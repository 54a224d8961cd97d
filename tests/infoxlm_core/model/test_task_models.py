"""Models of a task equal Hugging Face's own, before and after they are written, whatever the encoder (A22)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
    XLMConfig,
    XLMModel,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
    XLMRobertaModel,
)

from infoxlm_core.data.examples import Examples, encode
from infoxlm_core.errors import InputError
from infoxlm_core.model import task_models
from infoxlm_core.model.huggingface import pretrained, tokenizers
from infoxlm_core.model.padded import Padded
from infoxlm_core.tasks import TASKS
from tests.toys.models import NUMBERED, write_tokenizer

LABELS = ["contradiction", "entailment", "neutral"]
SIZES = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
SMALL = {"vocab_size": 48, "n_layers": 2, "n_heads": 2, "pad_token_id": 1}
KINDS = {
    "XLM-R": lambda: XLMRobertaForMaskedLM(XLMRobertaConfig(**SIZES, max_position_embeddings=26, pad_token_id=1)),
    "bare XLM-R": lambda: XLMRobertaModel(XLMRobertaConfig(**SIZES, max_position_embeddings=26, pad_token_id=1)),
    "RoBERTa": lambda: RobertaModel(RobertaConfig(**SIZES, max_position_embeddings=26, layer_norm_eps=1e-4)),
    "BERT": lambda: BertForPreTraining(BertConfig(**SIZES, max_position_embeddings=24, pad_token_id=1)),
    "bare BERT": lambda: BertModel(BertConfig(**SIZES, max_position_embeddings=24), add_pooling_layer=False),
    "BERT of one type": lambda: BertModel(BertConfig(**SIZES, max_position_embeddings=24, type_vocab_size=1)),
    "BERT with ReLU": lambda: BertModel(BertConfig(**SIZES, max_position_embeddings=24, hidden_act="relu")),
    "XLM": lambda: XLMModel(XLMConfig(**SMALL, emb_dim=16, max_position_embeddings=26, n_langs=1)),
    "DistilBERT": lambda: DistilBertModel(DistilBertConfig(**SMALL, dim=16, hidden_dim=24, max_position_embeddings=24)),
}  # fmt: skip
PADDED = {"BERT with ReLU", "XLM", "DistilBERT"}


def shake(model: PreTrainedModel) -> PreTrainedModel:
    """Random weights so large that every part of the model decides."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


@pytest.fixture(params=KINDS)
def encoder(request, tmp_path) -> Path:
    torch.manual_seed(5)
    shake(KINDS[request.param]()).save_pretrained(tmp_path / "encoder")
    write_tokenizer(tmp_path / "encoder", bert="BERT" in request.param and "one type" not in request.param)
    (tmp_path / "encoder/kind").write_text(request.param)
    return tmp_path / "encoder"


def texts(count: int = 9) -> tuple[list[str], list[str]]:
    rng = np.random.default_rng(2)
    one, two = ([" ".join(rng.choice(NUMBERED, rng.integers(1, 9))) for _ in range(count)] for _ in "ab")
    return one, two


def theirs(directory: Path, kind: str) -> torch.Tensor:
    """Logits of plain transformers on the padded batch of all texts: (N, labels), or (T, 2) without padding."""
    auto = AutoModelForSequenceClassification if kind == "classification" else AutoModelForQuestionAnswering
    model, tokenizer = auto.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)
    batch = tokenizer(*texts(), padding=True, return_tensors="pt")
    with torch.inference_mode():
        found = model(**batch)
    if kind == "classification":
        return found.logits
    return torch.stack([found.start_logits, found.end_logits], dim=2)[batch["attention_mask"].bool()]


def examples(directory: Path) -> Examples:
    return encode(tokenizers.load(directory), *texts(), max_tokens=24)


@pytest.mark.item("A22")
@pytest.mark.parametrize("kind", ["classification", "question_answering"])
def test_a_new_model_is_written_so_that_transformers_gives_its_logits_and_comes_back_bit_by_bit(
    encoder, tmp_path, kind
):
    module = shake(task_models.create(encoder, TASKS[kind].head, LABELS if kind == "classification" else ()))
    assert isinstance(module, Padded) == ((encoder / "kind").read_text() in PADDED)

    ours = task_models.compute_logits(module, examples(encoder), tokens_per_batch=40)
    task_models.export(module, encoder, tmp_path / "out")

    again = task_models.load(tmp_path / "out", TASKS[kind].head)
    if kind == "question_answering":
        lengths = examples(encoder).lengths.tolist()
        assert [len(part) for part in ours] == lengths
        ours, back = torch.cat(ours), torch.cat(task_models.compute_logits(again, examples(tmp_path / "out"), 40))
    else:
        assert again.labels == tuple(LABELS)
        back = task_models.compute_logits(again, examples(tmp_path / "out"), 40)
    torch.testing.assert_close(ours, theirs(tmp_path / "out", kind), atol=1e-5, rtol=0)
    assert torch.equal(ours, back)
    assert (tmp_path / "out/sentencepiece.bpe.model").read_bytes() == b"goes along"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 24


def test_the_encoder_under_a_new_head_is_the_pre_trained_one(encoder):
    """Whatever it was saved from: a bare encoder, a language model, one with a pooler."""
    from transformers import AutoModel

    module = task_models.create(encoder, TASKS["question_answering"].head).eval()
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    batch = tokenizer(*texts(), padding=True, return_tensors="pt")
    hidden = AutoModel.from_pretrained(encoder).eval()(**batch).last_hidden_state[batch["attention_mask"].bool()]

    head = module.model.qa_outputs if isinstance(module, Padded) else module.output
    found = torch.cat(task_models.compute_logits(module, examples(encoder)))

    torch.testing.assert_close(found, head(hidden).detach(), atol=1e-5, rtol=0)


def test_a_new_model_drops_out_from_its_first_step_and_one_that_is_loaded_does_not(encoder, tmp_path):
    """As fine-tuning calls them, by the seed of a step; in the encoder, so for any architecture."""
    inputs = examples(encoder).take(range(4))
    tensors = torch.from_numpy(inputs.ids), torch.from_numpy(inputs.types), tuple(inputs.lengths.tolist())
    module = task_models.create(encoder, TASKS["classification"].head, LABELS, dropout=0.5)
    task_models.export(module, encoder, tmp_path / "out")

    def logits(model: torch.nn.Module, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model(*tensors)

    assert torch.equal(logits(module, 1), logits(module, 1)) and not torch.equal(logits(module, 1), logits(module, 2))
    loaded = task_models.load(tmp_path / "out", TASKS["classification"].head)
    assert torch.equal(logits(loaded, 1), logits(loaded, 2))


def test_dropout_follows_the_settings_and_not_the_config_of_the_encoder(encoder):
    inputs = examples(encoder).take(range(4))
    tensors = torch.from_numpy(inputs.ids), torch.from_numpy(inputs.types), tuple(inputs.lengths.tolist())

    module = task_models.create(encoder, TASKS["classification"].head, LABELS, dropout=0.0, head_dropout=0.0).train()

    assert torch.equal(module(*tensors), module(*tensors))


def test_the_head_is_random_by_the_seed_alone(encoder):
    one, same, other = (
        task_models.create(encoder, TASKS["classification"].head, LABELS, seed=seed) for seed in (1, 1, 2)
    )

    pairs = list(zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True))

    assert all(torch.equal(value, again) for (_, value), again, _ in pairs)
    assert any(not torch.equal(value, third) for (_, value), _, third in pairs)


@pytest.mark.parametrize("kind", ["XLM-R", "XLM"])
def test_a_fine_tuned_model_whose_weights_are_no_numbers_is_not_measured(tmp_path, kind):
    KINDS[kind]().save_pretrained(tmp_path / "encoder")
    write_tokenizer(tmp_path / "encoder", bert=False)
    module = task_models.create(tmp_path / "encoder", TASKS["classification"].head, LABELS)
    with torch.no_grad():
        next(module.parameters()).fill_(torch.nan)
    task_models.export(module, tmp_path / "encoder", tmp_path / "out")

    with pytest.raises(InputError, match=r"out.*: .* contains NaN or infinity: its training failed"):
        task_models.load(tmp_path / "out", TASKS["classification"].head)


def test_a_bert_begins_with_its_pre_trained_pooler(tmp_path):
    bert = shake(KINDS["BERT"]())
    bert.save_pretrained(tmp_path)

    module = task_models.create(tmp_path, TASKS["classification"].head, LABELS)

    assert torch.equal(module.dense.weight, bert.bert.pooler.dense.weight)


def test_the_first_token_of_a_causal_xlm_reads_the_whole_text_after_fine_tuning(tmp_path):
    config = XLMConfig(**SMALL, emb_dim=16, max_position_embeddings=26, n_langs=1, causal=True)
    shake(XLMModel(config)).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, bert=False)
    module = task_models.create(tmp_path, TASKS["classification"].head, LABELS).eval()

    texts_with_other_ends = encode(tokenizers.load(tmp_path), ["w1 w2", "w1 w3"], max_tokens=24)
    first_logits, second_logits = task_models.compute_logits(module, texts_with_other_ends)

    assert not torch.allclose(first_logits, second_logits)


def test_a_head_of_another_task_does_not_come_along(tmp_path):
    one = task_models.create(_roberta(tmp_path), TASKS["classification"].head, ["yes", "no"], seed=3)
    task_models.export(one, tmp_path / "encoder", tmp_path / "tuned")

    other = task_models.create(tmp_path / "tuned", TASKS["classification"].head, LABELS, seed=1)

    assert other.output.weight.shape == (3, 16)
    assert not torch.equal(other.dense.weight, one.dense.weight)


def _roberta(folder: Path) -> Path:
    KINDS["XLM-R"]().save_pretrained(folder / "encoder")
    write_tokenizer(folder / "encoder", bert=False)
    return folder / "encoder"


def test_an_old_bert_calls_its_layer_norm_gamma_and_beta(tmp_path):
    from safetensors.torch import load_file, save_file

    shake(BertForMaskedLM(BertConfig(**SIZES, max_position_embeddings=24))).save_pretrained(tmp_path)
    expected = task_models.create(tmp_path, TASKS["question_answering"].head)
    weights = load_file(tmp_path / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in weights.items()
    }
    save_file(old, tmp_path / "model.safetensors")

    found = task_models.create(tmp_path, TASKS["question_answering"].head)

    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))


def test_a_large_model_in_several_files_is_read_whole(tmp_path):
    model = shake(KINDS["XLM-R"]())
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(pretrained.find_weight_files(tmp_path)) > 1

    encoder = task_models.create(tmp_path, TASKS["classification"].head, LABELS).encoder

    assert torch.equal(encoder.layers[1].down.weight, model.roberta.encoder.layer[1].output.dense.weight)


@pytest.mark.parametrize("kind", ["XLM-R", "BERT", "DistilBERT"])
def test_an_encoder_is_no_fine_tuned_model_and_a_part_of_an_encoder_no_encoder(tmp_path, kind):
    model = KINDS[kind]()
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="qa_outputs"):
        task_models.load(tmp_path, TASKS["question_answering"].head)
    weights = {name: value.clone() for name, value in model.state_dict().items() if "layer.1" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)

    with pytest.raises(InputError, match="give a complete model"):
        task_models.create(tmp_path, TASKS["question_answering"].head)


def test_a_directory_without_model_or_of_an_unknown_kind_is_refused_in_one_line(tmp_path):
    with pytest.raises(InputError, match="no such file: give a Hugging Face model"):
        task_models.create(tmp_path, TASKS["classification"].head, LABELS)
    (tmp_path / "config.json").write_text('{"model_type": "tomorrow"}')
    with pytest.raises(InputError, match="unknown or damaged model") as refusal:
        task_models.create(tmp_path, TASKS["classification"].head, LABELS)
    assert "\n" not in str(refusal.value)


def test_batches_hold_every_row_once_and_no_more_tokens_than_asked_even_padded():
    lengths = np.array([3, 50, 7, 7, 1, 120, 9])

    parts = task_models.split_by_length(lengths, tokens=60)

    assert sorted(np.concatenate(parts).tolist()) == list(range(7))
    assert all(len(part) == 1 or len(part) * lengths[part].max() <= 60 for part in parts)


def test_a_pair_that_is_too_long_loses_of_its_longer_side(tmp_path):
    write_tokenizer(tmp_path, bert=True)
    tokenizer = tokenizers.load(tmp_path)

    found = encode(tokenizer, ["w1 w2 w3 w4 w5 w6", "w1"], ["w7 w8", "w9"], max_tokens=8)

    assert found.lengths.tolist() == [8, 5]
    assert found.take([0]).ids.tolist() == [0, 5, 6, 7, 2, 11, 12, 2]
    assert found.take([0]).types.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert found.take([1, 0, 1]).ids.tolist() == [0, 5, 2, 13, 2, 0, 5, 6, 7, 2, 11, 12, 2, 0, 5, 2, 13, 2]


@pytest.mark.slow
def test_a_compiled_classifier_has_two_graphs_for_all_batches_and_gives_the_same_logits(tmp_path):
    torch.manual_seed(5)
    shake(KINDS["XLM-R"]()).save_pretrained(tmp_path)
    head = TASKS["classification"].head
    plain, compiled = (task_models.create(tmp_path, head, LABELS).eval() for _ in range(2))
    compiled.encoder.compiler = "aot_eager"  # its graphs are those of inductor
    rng, graphs = np.random.default_rng(2), []
    torch._dynamo.reset()
    counters.clear()

    for _ in range(6):
        lengths = tuple(rng.integers(3, 20, rng.integers(2, 9)).tolist())
        ids = torch.from_numpy(rng.integers(5, 40, sum(lengths)))
        found, expected = (module(ids, torch.zeros_like(ids), lengths) for module in (compiled, plain))
        found.sum().backward()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])

    assert graphs[0] == graphs[-1] == 2  # all rows; the first of each sequence
    assert not counters["graph_break"]
