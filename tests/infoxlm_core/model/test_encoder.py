"""The packed encoder equals Hugging Face's encoder (acceptance items A4, A5, A6, A9, A22)."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from transformers import XLMRobertaConfig, XLMRobertaForMaskedLM

from infoxlm_core.data.batches import pack_micro_batches
from infoxlm_core.data.layouts import number_positions
from infoxlm_core.data.samples import Sampler
from infoxlm_core.data.shards import open_shards
from infoxlm_core.errors import InputError
from infoxlm_core.model.encoder import Encoder, EncoderSize, can_compile, choose_compiler, initialise
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.model.momentum import KeyEncoder
from infoxlm_core.model.objectives import cross_entropy
from tests.toys.pretraining import VOCABULARY, tiny_config

SIZE = EncoderSize(vocabulary=VOCABULARY, layers=3, hidden=16, ffn=32, heads=2, positions=34, types=1)
LENGTHS = (5, 1, 9, 3)


@pytest.fixture(scope="module")
def hugging_face() -> XLMRobertaForMaskedLM:
    torch.manual_seed(3)
    model = XLMRobertaForMaskedLM(
        XLMRobertaConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=34, type_vocab_size=1, layer_norm_eps=1e-5, pad_token_id=1, bos_token_id=0,
            eos_token_id=2,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.double()


@pytest.fixture
def model(hugging_face, tmp_path) -> InfoXLM:
    """Our network with the weights of `hugging_face`."""
    hugging_face.save_pretrained(tmp_path)
    model = InfoXLM(SIZE, contrast_layer=2, pooling="cls", normalise=False).eval()
    initialise(model, seed=1)
    pretrained.load_weights(model.double(), tmp_path)
    return model


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(5))


def pad(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequences as a padded batch, and its attention mask."""
    batch = torch.nn.utils.rnn.pad_sequence(ids.split(LENGTHS), batch_first=True, padding_value=1)
    return batch, (batch != 1).long()


def positions(lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    """Return the positions of packed tokens in sequences of these lengths."""
    return torch.from_numpy(number_positions(torch.tensor(lengths).numpy()))


def make_small_model(pooling: str) -> InfoXLM:
    """Return a network of two layers with random weights, whose universal layer is the first."""
    model = InfoXLM(replace(SIZE, layers=2, types=0), 1, pooling, True)
    initialise(model, 1)
    return model


@pytest.mark.item("A6", "A9")
def test_every_layer_equals_hugging_face_on_the_padded_batch(hugging_face, model, ids):
    batch, mask = pad(ids)
    hidden_states = hugging_face(batch, attention_mask=mask, output_hidden_states=True).hidden_states

    for layer, expected in enumerate(hidden_states):
        hidden = model.encoder(ids, positions(), LENGTHS, last_layer=layer)
        torch.testing.assert_close(hidden, expected[mask.bool()], atol=1e-9, rtol=0)


@pytest.mark.item("A6")
def test_encoder_that_ends_at_the_universal_layer_equals_the_complete_encoder_there(model, ids):
    truncated = Encoder(SIZE, layers=2).double()
    weights = {name: value for name, value in model.encoder.state_dict().items() if not name.startswith("layers.2.")}
    truncated.load_state_dict(weights)

    assert torch.equal(
        truncated(ids, positions(), LENGTHS), model.encoder(ids, positions(), LENGTHS, last_layer=2)
    )  # bit for bit


@pytest.mark.item("A6")
def test_chosen_rows_of_the_top_layer_equal_those_of_the_complete_layer(model, ids):
    rows, row_counts = torch.tensor([0, 3, 6, 7, 15]), (2, 0, 2, 1)

    hidden = model.encoder.run_layers(model.encoder.embed(ids, positions()), LENGTHS, 0, 3, rows, row_counts)

    torch.testing.assert_close(hidden, model.encoder(ids, positions(), LENGTHS)[rows], atol=1e-9, rtol=0)


@pytest.mark.item("A9")
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_vectors_do_not_depend_on_neighbours_or_their_order(model, ids, order):
    sequences = [ids.split(LENGTHS)[number] for number in order]
    lengths = tuple(len(sequence) for sequence in sequences)

    packed = model.encoder(torch.cat(sequences), positions(lengths), lengths).split(lengths)

    for sequence, hidden in zip(sequences, packed, strict=True):
        alone = model.encoder(sequence, positions((len(sequence),)), (len(sequence),))
        torch.testing.assert_close(hidden, alone, atol=1e-9, rtol=0)


@pytest.mark.item("A5")
def test_pair_whose_second_side_is_padding_has_the_mlm_loss_of_its_first_side(hugging_face, model):
    first_side = torch.tensor([0, 10, VOCABULARY - 1, 12, 2])
    pair = torch.cat([first_side, torch.full((6,), 1)])[None]
    target = torch.tensor([11])
    expected_logits = hugging_face(pair, attention_mask=(pair != 1).long()).logits[0, 2:3]

    hidden = model.encoder(first_side, positions((5,)), (5,))[2:3]
    loss, _ = model.head.loss(hidden, model.encoder.token_embedding.weight, target, torch.ones(1))

    assert loss.item() == pytest.approx(F.cross_entropy(expected_logits, target).item(), abs=1e-9)


@pytest.mark.item("A4")
def test_masked_lm_loss_with_random_weights_is_near_the_log_of_the_vocabulary_size():
    model = InfoXLM(EncoderSize(250_002, layers=1, hidden=64, ffn=64, heads=2, positions=34), 1, "cls", False)
    initialise(model, seed=1)
    ids = torch.randint(4, 250_001, (30,), generator=torch.Generator().manual_seed(1))

    hidden = model.encoder(ids, positions((30,)), (30,))
    _, losses = model.head.loss(hidden, model.encoder.token_embedding.weight, ids.roll(7), torch.ones(30))

    assert losses.mean().item() == pytest.approx(math.log(250_002), abs=0.3)


@pytest.mark.item("A5")
def test_loss_on_one_side_of_a_translation_pair_has_gradients_in_the_other_side(model):
    ids = torch.tensor([0, 10, 11, 2, 20, 21, 2])
    hidden = model.encoder.embed(ids, positions((7,))).detach().requires_grad_()
    output = model.encoder.run_layers(hidden, (7,), 0, 3)

    cross_entropy(model.head(output[1:2], model.encoder.token_embedding.weight), torch.tensor([12])).backward()

    assert hidden.grad[4:6].abs().min() > 0


@pytest.mark.item("A22")
def test_export_has_our_logits_in_hugging_face_and_is_read_back_bit_for_bit(model, ids, tmp_path):
    model.float().double()  # models are written in fp32
    pretrained.export(model, tmp_path / "no tokenizer", tmp_path / "out")

    exported = XLMRobertaForMaskedLM.from_pretrained(tmp_path / "out").double().eval()
    # Only Transformers reads these fields, when it fine-tunes the export; 0.1 is XLM-R's value.
    assert exported.config.hidden_dropout_prob == exported.config.attention_probs_dropout_prob == 0.1
    batch, mask = pad(ids)
    logits = model.head(model.encoder(ids, positions(), LENGTHS), model.encoder.token_embedding.weight)
    torch.testing.assert_close(exported(batch, attention_mask=mask).logits[mask.bool()], logits, atol=1e-9, rtol=0)
    loaded = InfoXLM(SIZE, contrast_layer=2, pooling="cls", normalise=False)
    pretrained.load_weights(loaded, tmp_path / "out")
    for loaded_parameter, parameter in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(loaded_parameter.double(), parameter)


@pytest.mark.item("A22")
def test_incomplete_start_is_refused_by_the_name_of_a_missing_weight(hugging_face, tmp_path):
    weights = {name: value.clone() for name, value in hugging_face.state_dict().items()}
    del weights["roberta.encoder.layer.1.output.dense.bias"]
    hugging_face.save_pretrained(tmp_path, state_dict=weights)

    with pytest.raises(InputError, match=r"no roberta\.encoder\.layer\.1\.output\.dense\.bias: give a complete model"):
        pretrained.load_weights(InfoXLM(SIZE, 2, "cls", False), tmp_path)


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.item("A6")
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_forward_pass_of_all_objectives_equals_separate_computations(tiny_shards, pooling):
    config = tiny_config(contrast={"layer": 1, "pooling": pooling})
    (batch,) = pack_micro_batches(Sampler(open_shards(tiny_shards), config).draw(0, range(4)), 8)
    model = make_small_model(pooling)

    outputs = model(batch)

    hidden = model.encoder(batch.ids, batch.positions, batch.lengths)
    logits = model.head(hidden[batch.target_rows], model.encoder.token_embedding.weight)
    expected_losses = F.cross_entropy(logits, batch.target_ids, reduction="none")
    torch.testing.assert_close(outputs.losses, expected_losses, atol=1e-9, rtol=0)
    assert outputs.loss.item() == pytest.approx(expected_losses.sum().item(), rel=1e-9)
    sequences = model.encoder(batch.ids, batch.positions, batch.lengths, last_layer=1).split(batch.lengths)
    views = sequences[batch.lm_sequences :]
    features = torch.stack([view[0] if pooling == "cls" else view.mean(0) for view in views])
    expected_queries = F.normalize(features @ model.projection, dim=1)
    torch.testing.assert_close(outputs.queries, expected_queries, atol=1e-9, rtol=0)


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_batch_padded_for_a_gpu_has_the_same_losses_vectors_and_gradients(tiny_shards, pooling):
    sampler = Sampler(open_shards(tiny_shards), tiny_config(objectives={"mask_ratio": 0.04}))
    (batch,) = pack_micro_batches(sampler.draw(0, range(4)), 8)
    padded_batch = batch.pad_for_gpu(32, 1)
    model = make_small_model(pooling)
    key_encoder = KeyEncoder(model)

    results = []
    for packed_batch in (batch, padded_batch):
        model.zero_grad()
        outputs = model(packed_batch)
        (outputs.loss + outputs.queries.square()[:, 0].sum()).backward()
        keys = key_encoder(packed_batch.key_ids, packed_batch.key_positions, packed_batch.key_lengths)
        keys = keys[: len(batch.sentence_ids)]
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append([outputs.losses, outputs.queries, keys, *gradients])

    lm_tokens = sum(padded_batch.lengths[: padded_batch.lm_sequences])
    assert lm_tokens % 32 == len(padded_batch.ids) % 32 == len(padded_batch.key_ids) % 32 == 0
    assert padded_batch.padding_tokens > 0
    assert 0 in batch.target_counts
    assert min(padded_batch.target_counts) == 1
    assert padded_batch.counts == batch.counts
    for expected, padded in zip(*results, strict=True):
        torch.testing.assert_close(padded, expected, atol=1e-12, rtol=0)


def test_recomputation_changes_no_bit_of_gradients_or_dropout():
    encoder = Encoder(SIZE, dropout=0.1).train()
    initialise(encoder, 1)
    torch.manual_seed(1)
    ids, rows = torch.randint(5, 40, (30,)), torch.tensor([0, 3, 14])
    calls = []
    encoder.layers[1].register_forward_pre_hook(lambda *_: calls.append(1))

    results = []
    for encoder.recompute in (False, True):
        torch.manual_seed(2)
        encoder.zero_grad()
        hidden = encoder.run_layers(encoder.embed(ids, positions((12, 18))), (12, 18), 0, 3, rows, (2, 1))
        hidden.pow(3).sum().backward()
        gradients = [parameter.grad for parameter in encoder.parameters()]
        results.append([hidden, torch.rand(3), *gradients])

    assert len(calls) == 1 + 2
    assert all(torch.equal(expected, recomputed) for expected, recomputed in zip(*results, strict=True))


@pytest.mark.slow
def test_layers_are_compiled_where_possible_and_the_log_says_why_not(caplog):
    cpu, random_state = torch.device("cpu"), torch.get_rng_state()

    assert can_compile("aot_eager", cpu, dropout=0.1)
    assert "not compiled" not in caplog.text
    assert not can_compile("no such compiler", cpu, dropout=0.1)
    assert "not compiled" in caplog.text
    assert choose_compiler(cpu, 0.1) == ""
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ragged_batches_use_the_graphs_of_the_first_two(tiny_shards, dtype):
    sampler = Sampler(open_shards(tiny_shards), tiny_config(contrast={"layer": 1, "pooling": "mean"}))
    model, eager_model = make_small_model("mean"), make_small_model("mean")
    model.encoder.compiler = "aot_eager"  # makes the same graphs as inductor
    key_encoder = KeyEncoder(model)

    graph_counts, differences, shapes = [], [], set()
    torch._dynamo.reset()
    counters.clear()
    for step in range(30):
        (batch,) = pack_micro_batches(sampler.draw(step, range(4)), 8)
        shapes.add(batch.lengths)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            outputs, expected = model(batch), eager_model(batch)
            key_encoder(batch.key_ids, batch.key_positions, batch.key_lengths)
        (outputs.loss + outputs.queries.sum()).backward()
        differences.append(abs(outputs.loss.item() / expected.loss.item() - 1))
        graph_counts.append(counters["stats"]["unique_graphs"])

    assert len(shapes) > 20
    assert graph_counts[1] == graph_counts[-1] == 3  # all rows, masked positions alone, and keys without gradient
    assert not counters["graph_break"]
    assert max(differences) < (1e-6 if dtype == torch.float32 else 1e-3)
