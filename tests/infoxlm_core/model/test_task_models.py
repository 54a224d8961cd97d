"""Task models equal Hugging Face's classes for every type of encoder (acceptance item A22)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
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
CLASSIFICATION = TASKS["classification"].head
ANSWERING = TASKS["question_answering"].head
SIZES = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
SMALL = {"vocab_size": 48, "n_layers": 2, "n_heads": 2, "pad_token_id": 1}
ENCODERS = {
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


def enlarge_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Add large random numbers to the weights, so that every part of the model changes the logits."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def save_encoder(directory: Path, name: str) -> Path:
    """Write an encoder of `ENCODERS` and its tokenizer."""
    torch.manual_seed(5)
    enlarge_weights(ENCODERS[name]()).save_pretrained(directory)
    write_tokenizer(directory, bert="BERT" in name and "one type" not in name)
    return directory


@pytest.fixture(params=ENCODERS)
def encoder(request, tmp_path) -> Path:
    return save_encoder(tmp_path / "encoder", request.param)


def make_texts() -> tuple[list[str], list[str]]:
    """Return nine pairs of texts of different lengths."""
    rng = np.random.default_rng(2)
    texts = [" ".join(rng.choice(NUMBERED, rng.integers(1, 9))) for _ in range(18)]
    return texts[:9], texts[9:]


def encode_texts(directory: Path) -> Examples:
    return encode(tokenizers.load(directory), *make_texts(), max_tokens=24)


def compute_transformers_logits(directory: Path, task: str) -> torch.Tensor:
    """Return the logits of plain Transformers for the padded batch of all texts: (N, labels), or (T, 2)."""
    auto_class = AutoModelForSequenceClassification if task == "classification" else AutoModelForQuestionAnswering
    batch = AutoTokenizer.from_pretrained(directory)(*make_texts(), padding=True, return_tensors="pt")
    with torch.inference_mode():
        output = auto_class.from_pretrained(directory).eval()(**batch)
    if task == "classification":
        return output.logits
    return torch.stack([output.start_logits, output.end_logits], dim=2)[batch["attention_mask"].bool()]


@pytest.mark.item("A22")
@pytest.mark.parametrize("task", ["classification", "question_answering"])
def test_exported_task_model_has_our_logits_in_transformers_and_is_read_back(encoder, tmp_path, task, request):
    head = TASKS[task].head
    module = enlarge_weights(task_models.create(encoder, head, LABELS if task == "classification" else ()))
    assert isinstance(module, Padded) == (request.node.callspec.params["encoder"] in PADDED)

    logits = task_models.compute_logits(module, encode_texts(encoder), max_batch_tokens=40)
    task_models.export(module, encoder, tmp_path / "out")

    loaded = task_models.load(tmp_path / "out", head)
    loaded_logits = task_models.compute_logits(loaded, encode_texts(tmp_path / "out"), max_batch_tokens=40)
    if task == "question_answering":
        assert [len(example_logits) for example_logits in logits] == encode_texts(encoder).lengths.tolist()
        logits, loaded_logits = torch.cat(logits), torch.cat(loaded_logits)
    else:
        assert loaded.labels == tuple(LABELS)
    torch.testing.assert_close(logits, compute_transformers_logits(tmp_path / "out", task), atol=1e-5, rtol=0)
    assert torch.equal(logits, loaded_logits)
    assert (tmp_path / "out/sentencepiece.bpe.model").read_bytes() == b"goes along"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 24


def test_encoder_below_a_new_head_is_the_pretrained_one(encoder):
    module = task_models.create(encoder, ANSWERING).eval()
    batch = AutoTokenizer.from_pretrained(encoder)(*make_texts(), padding=True, return_tensors="pt")
    hidden = AutoModel.from_pretrained(encoder).eval()(**batch).last_hidden_state[batch["attention_mask"].bool()]

    head = module.model.qa_outputs if isinstance(module, Padded) else module.output
    logits = torch.cat(task_models.compute_logits(module, encode_texts(encoder)))

    torch.testing.assert_close(logits, head(hidden).detach(), atol=1e-5, rtol=0)


def test_dropout_is_active_in_new_models_and_follows_the_settings(encoder, tmp_path):
    examples = encode_texts(encoder).take(range(4))
    inputs = torch.from_numpy(examples.ids), torch.from_numpy(examples.types), tuple(examples.lengths.tolist())

    def depends_on_seed(module: torch.nn.Module) -> bool:
        logits = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            logits.append(module(*inputs))
        assert torch.equal(logits[0], logits[1])
        return not torch.equal(logits[0], logits[2])

    module = task_models.create(encoder, CLASSIFICATION, LABELS, dropout=0.5)
    task_models.export(module, encoder, tmp_path / "out")

    assert depends_on_seed(module)
    assert not depends_on_seed(task_models.load(tmp_path / "out", CLASSIFICATION))
    assert not depends_on_seed(task_models.create(encoder, CLASSIFICATION, LABELS, dropout=0.0).train())


@pytest.mark.parametrize("name", ["XLM-R", "XLM"])
def test_new_head_depends_only_on_the_seed(name, tmp_path):
    encoder = save_encoder(tmp_path, name)
    weights = []
    for seed in (1, 1, 2):
        module = task_models.create(encoder, CLASSIFICATION, LABELS, seed=seed)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))

    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("name", ["XLM-R", "XLM"])
def test_fine_tuned_model_with_nan_weights_is_refused(tmp_path, name):
    encoder = save_encoder(tmp_path / "encoder", name)
    module = task_models.create(encoder, CLASSIFICATION, LABELS)
    with torch.no_grad():
        next(module.parameters()).fill_(torch.nan)
    task_models.export(module, encoder, tmp_path / "out")

    with pytest.raises(InputError, match=r"out.*: .* contains NaN or infinity: its training failed"):
        task_models.load(tmp_path / "out", CLASSIFICATION)


def test_classifier_of_a_bert_begins_with_its_pretrained_pooler(tmp_path):
    bert = enlarge_weights(ENCODERS["BERT"]())
    bert.save_pretrained(tmp_path)

    module = task_models.create(tmp_path, CLASSIFICATION, LABELS)

    assert torch.equal(module.dense.weight, bert.bert.pooler.dense.weight)


def test_first_token_of_a_causal_xlm_attends_to_the_complete_text_after_fine_tuning(tmp_path):
    config = XLMConfig(**SMALL, emb_dim=16, max_position_embeddings=26, n_langs=1, causal=True)
    enlarge_weights(XLMModel(config)).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, bert=False)
    module = task_models.create(tmp_path, CLASSIFICATION, LABELS).eval()

    texts_with_different_ends = encode(tokenizers.load(tmp_path), ["w1 w2", "w1 w3"], max_tokens=24)
    first_logits, second_logits = task_models.compute_logits(module, texts_with_different_ends)

    assert not torch.allclose(first_logits, second_logits)


def test_head_of_another_task_is_not_reused(tmp_path):
    encoder = save_encoder(tmp_path / "encoder", "XLM-R")
    tuned = task_models.create(encoder, CLASSIFICATION, ["yes", "no"], seed=3)
    task_models.export(tuned, encoder, tmp_path / "tuned")

    module = task_models.create(tmp_path / "tuned", CLASSIFICATION, LABELS, seed=1)

    assert module.output.weight.shape == (3, 16)
    assert not torch.equal(module.dense.weight, tuned.dense.weight)


def test_old_names_of_layer_norm_in_bert_are_understood(tmp_path):
    enlarge_weights(BertForMaskedLM(BertConfig(**SIZES, max_position_embeddings=24))).save_pretrained(tmp_path)
    expected = task_models.create(tmp_path, ANSWERING)
    old_weights = {}
    for name, value in load_file(tmp_path / "model.safetensors").items():
        old_name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        old_weights[old_name] = value
    save_file(old_weights, tmp_path / "model.safetensors")

    module = task_models.create(tmp_path, ANSWERING)

    for parameter, expected_parameter in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, expected_parameter)


def test_model_in_several_files_is_read(tmp_path):
    model = enlarge_weights(ENCODERS["XLM-R"]())
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(pretrained.find_weight_files(tmp_path)) > 1

    encoder = task_models.create(tmp_path, CLASSIFICATION, LABELS).encoder

    assert torch.equal(encoder.layers[1].down.weight, model.roberta.encoder.layer[1].output.dense.weight)


@pytest.mark.item("A22")
@pytest.mark.parametrize("name", ["XLM-R", "BERT", "DistilBERT"])
def test_incomplete_models_are_refused_by_the_name_of_a_missing_weight(tmp_path, name):
    model = ENCODERS[name]()
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="qa_outputs"):
        task_models.load(tmp_path, ANSWERING)
    weights = {name: value.clone() for name, value in model.state_dict().items() if "layer.1" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)

    with pytest.raises(InputError, match=r"layer\.1\.attention\.\S+.*: give a complete model"):
        task_models.create(tmp_path, ANSWERING)


def test_missing_and_unknown_models_are_refused_in_one_line(tmp_path):
    with pytest.raises(InputError, match="no such file: give a Hugging Face model"):
        task_models.create(tmp_path, CLASSIFICATION, LABELS)
    (tmp_path / "config.json").write_text('{"model_type": "tomorrow"}')
    with pytest.raises(InputError, match="unknown or damaged model") as refusal:
        task_models.create(tmp_path, CLASSIFICATION, LABELS)
    assert "\n" not in str(refusal.value)


def test_batches_have_every_row_once_and_no_more_tokens_than_allowed():
    lengths = np.array([3, 50, 7, 7, 1, 120, 9])

    batches = task_models.split_by_length(lengths, max_batch_tokens=60)

    assert sorted(np.concatenate(batches).tolist()) == list(range(7))
    assert all(len(rows) == 1 or len(rows) * lengths[rows].max() <= 60 for rows in batches)


def test_longer_side_of_a_pair_that_is_too_long_is_truncated(tmp_path):
    write_tokenizer(tmp_path, bert=True)

    examples = encode(tokenizers.load(tmp_path), ["w1 w2 w3 w4 w5 w6", "w1"], ["w7 w8", "w9"], max_tokens=8)

    assert examples.lengths.tolist() == [8, 5]
    assert examples.ids.tolist() == [0, 5, 6, 7, 2, 11, 12, 2, 0, 5, 2, 13, 2]
    assert examples.take([0]).types.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
