"""The packed encoder against Hugging Face's (acceptance items A5, A6, A9, A22)."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from transformers import XLMRobertaConfig, XLMRobertaForMaskedLM

from infoxlm_core.data.batches import micro_batches
from infoxlm_core.data.layouts import number_positions
from infoxlm_core.data.samples import Sampler
from infoxlm_core.data.shards import open_shards
from infoxlm_core.errors import InputError
from infoxlm_core.model.encoder import Encoder, EncoderSize, can_compile, compiler_for, initialise
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
def ours(hugging_face, tmp_path) -> InfoXLM:
    hugging_face.save_pretrained(tmp_path)
    model = InfoXLM(SIZE, contrast_layer=2, pooling="cls", normalise=False).eval()
    initialise(model, seed=1)
    pretrained.load_into(model.double(), tmp_path)
    return model


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(5))


def padded(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = ids.split(LENGTHS)
    batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)
    return batch, (batch != 1).long()


def where(lengths=LENGTHS) -> torch.Tensor:
    return torch.from_numpy(number_positions(torch.tensor(lengths).numpy()))


@pytest.mark.item("A6", "A9")
def test_every_layer_equals_hugging_face_on_the_padded_batch(hugging_face, ours, ids):
    batch, mask = padded(ids)
    theirs = hugging_face(batch, attention_mask=mask, output_hidden_states=True).hidden_states

    for layer, expected in enumerate(theirs):
        hidden = ours.encoder(ids, where(), LENGTHS, last=layer)
        torch.testing.assert_close(hidden, expected[mask.bool()], atol=1e-9, rtol=0)


@pytest.mark.item("A22")
def test_masked_lm_logits_equal_hugging_face(hugging_face, ours, ids):
    batch, mask = padded(ids)
    expected = hugging_face(batch, attention_mask=mask).logits[mask.bool()]

    logits = ours.head(ours.encoder(ids, where(), LENGTHS), ours.encoder.token_embedding.weight)

    torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)


@pytest.mark.item("A6")
def test_the_contrast_feature_is_position_zero_of_hidden_states_at_the_universal_layer(hugging_face, ours, ids):
    batch, mask = padded(ids)
    expected = hugging_face(batch, attention_mask=mask, output_hidden_states=True).hidden_states[2][:, 0]

    truncated = Encoder(SIZE, layers=2).double()
    truncated.load_state_dict({n: p for n, p in ours.encoder.state_dict().items() if not n.startswith("layers.2.")})
    starts = torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)
    feature = truncated(ids, where(), LENGTHS)[starts]

    torch.testing.assert_close(feature, expected, atol=1e-9, rtol=0)
    assert torch.equal(feature, ours.encoder(ids, where(), LENGTHS, last=2)[starts])


@pytest.mark.item("A6")
def test_a_last_layer_of_few_rows_equals_these_rows_of_the_whole_layer(ours, ids):
    rows, counts = torch.tensor([0, 3, 6, 7, 15]), (2, 0, 2, 1)  # the second sequence has none

    some = ours.encoder.run(ours.encoder.embed(ids, where()), LENGTHS, 0, 3, rows, counts)

    torch.testing.assert_close(some, ours.encoder(ids, where(), LENGTHS)[rows], atol=1e-9, rtol=0)


@pytest.mark.item("A9")
def test_a_sentence_does_not_notice_its_neighbours_in_the_pack(ours, ids):
    alone = ours.encoder(ids[6:15], where((9,)), (9,))

    torch.testing.assert_close(ours.encoder(ids, where(), LENGTHS)[6:15], alone, atol=1e-9, rtol=0)


@pytest.mark.item("A9")
def test_the_order_of_sequences_in_the_pack_does_not_matter(ours, ids):
    parts = ids.split(LENGTHS)
    order = (2, 0, 3, 1)

    turned = ours.encoder(torch.cat([parts[i] for i in order]), where([LENGTHS[i] for i in order]),
                          [LENGTHS[i] for i in order]).split([LENGTHS[i] for i in order])  # fmt: skip

    straight = ours.encoder(ids, where(), LENGTHS).split(LENGTHS)
    for place, i in enumerate(order):
        torch.testing.assert_close(turned[place], straight[i], atol=1e-9, rtol=0)


@pytest.mark.item("A6")
def test_a_key_encoder_that_ends_at_the_universal_layer_equals_the_whole_one_there_bit_by_bit(ours, ids):
    short = KeyEncoder(ours.float())

    assert len(short.encoder.layers) == 2 < len(ours.encoder.layers)
    assert torch.equal(short.encoder(ids, where(), LENGTHS), ours.encoder(ids, where(), LENGTHS, last=2))


@pytest.mark.item("A5")
def test_a_translation_pair_whose_second_side_is_padding_has_the_loss_of_the_first_alone(hugging_face, ours):
    alone = torch.tensor([0, 10, VOCABULARY - 1, 12, 2])
    padded_pair = torch.cat([alone, torch.full((6,), 1)])[None]
    theirs = hugging_face(padded_pair, attention_mask=(padded_pair != 1).long()).logits[0, 2:3]

    hidden = ours.encoder(alone, where((5,)), (5,))[2:3]
    loss, _ = ours.head.loss(hidden, ours.encoder.token_embedding.weight, torch.tensor([11]), torch.ones(1))

    assert loss.item() == pytest.approx(F.cross_entropy(theirs, torch.tensor([11])).item(), abs=1e-9)


@pytest.mark.item("A4")
def test_the_loss_of_random_weights_is_near_the_log_of_the_vocabulary():
    model = InfoXLM(EncoderSize(250_002, layers=1, hidden=64, ffn=64, heads=2, positions=34), 1, "cls", False)
    initialise(model, seed=1)
    ids = torch.randint(4, 250_001, (30,), generator=torch.Generator().manual_seed(1))

    hidden = model.encoder(ids, where((30,)), (30,))
    _, losses = model.head.loss(hidden, model.encoder.token_embedding.weight, ids.roll(7), torch.ones(30))

    assert losses.mean().item() == pytest.approx(math.log(250_002), abs=0.3)


@pytest.mark.item("A5")
def test_loss_on_one_side_of_a_translation_pair_reaches_the_other_side(ours):
    ids = torch.tensor([0, 10, 11, 2, 20, 21, 2])
    hidden = ours.encoder.embed(ids, where((7,))).detach().requires_grad_()
    top = ours.encoder.run(hidden, (7,), 0, 3)

    cross_entropy(ours.head(top[1:2], ours.encoder.token_embedding.weight), torch.tensor([12])).backward()

    assert hidden.grad[4:6].abs().min() > 0


@pytest.mark.item("A22")
def test_export_loads_in_hugging_face_and_comes_back_bit_by_bit(ours, ids, tmp_path):
    ours.float().double()  # models are written in fp32
    pretrained.export(ours, tmp_path / "no tokenizer", tmp_path / "out")

    theirs = XLMRobertaForMaskedLM.from_pretrained(tmp_path / "out").double().eval()
    # Transformers reads both only when others fine-tune the export; 0.1 is XLM-R's value.
    assert theirs.config.hidden_dropout_prob == theirs.config.attention_probs_dropout_prob == 0.1
    batch, mask = padded(ids)
    logits = ours.head(ours.encoder(ids, where(), LENGTHS), ours.encoder.token_embedding.weight)
    torch.testing.assert_close(theirs(batch, attention_mask=mask).logits[mask.bool()], logits, atol=1e-9, rtol=0)
    again = InfoXLM(SIZE, contrast_layer=2, pooling="cls", normalise=False)
    pretrained.load_into(again, tmp_path / "out")
    assert all(torch.equal(a.double(), b) for a, b in zip(again.parameters(), ours.parameters(), strict=True))


@pytest.mark.item("A22")
def test_an_incomplete_model_is_refused_by_name(hugging_face, tmp_path):
    weights = {n: p.clone() for n, p in hugging_face.state_dict().items() if "layer.1.output.dense.bias" not in n}
    hugging_face.save_pretrained(tmp_path, state_dict=weights)

    with pytest.raises(InputError, match=r"no roberta\.encoder\.layer\.1\.output\.dense\.bias"):
        pretrained.load_into(InfoXLM(SIZE, 2, "cls", False), tmp_path)


@pytest.mark.usefixtures("in_fp64")
def test_one_forward_of_all_objectives_equals_each_alone(tiny_shards):
    config = tiny_config(contrast={"layer": 1, "pooling": "mean"})
    sampler = Sampler(open_shards(tiny_shards), config)
    (batch,) = micro_batches(sampler.draw(0, range(4)), 8)
    model = InfoXLM(EncoderSize(VOCABULARY, 2, 16, 32, 2, 34), 1, "mean", True).eval()
    initialise(model, 1)

    outputs = model(batch)

    hidden = model.encoder(batch.ids, batch.positions, batch.lengths)
    logits = model.head(hidden[batch.target_rows], model.encoder.token_embedding.weight)
    expected = F.cross_entropy(logits, batch.target_ids, reduction="none")
    torch.testing.assert_close(outputs.losses, expected, atol=1e-9, rtol=0)
    assert outputs.loss.item() == pytest.approx(expected.sum().item(), rel=1e-9)
    first = model.encoder(batch.ids, batch.positions, batch.lengths, last=1).split(batch.lengths)
    means = torch.stack([view.mean(0) for view in first[batch.lm_sequences :]])
    expected = torch.nn.functional.normalize(means @ model.projection, dim=1)
    torch.testing.assert_close(outputs.queries, expected, atol=1e-9, rtol=0)


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_batch_that_is_aligned_for_a_gpu_has_the_losses_vectors_and_gradients_of_the_batch_itself(
    tiny_shards, pooling
):
    sampler = Sampler(open_shards(tiny_shards), tiny_config(objectives={"mask_ratio": 0.04}))
    (batch,) = micro_batches(sampler.draw(0, range(4)), 8)
    model = InfoXLM(EncoderSize(VOCABULARY, 2, 16, 32, 2, 34), 1, pooling, True).eval()
    initialise(model, 1)
    keys, found = KeyEncoder(model), []
    aligned = batch.aligned(32, 1)

    for one in (batch, aligned):
        model.zero_grad()
        outputs = model(one)
        (outputs.loss + outputs.queries.square()[:, 0].sum()).backward()
        vectors = keys(one.key_ids, one.key_positions, one.key_lengths)[: len(batch.sentence_ids)]
        found.append([outputs.losses, outputs.queries, vectors, *(parameter.grad for parameter in model.parameters())])

    lm = sum(aligned.lengths[: aligned.lm_sequences])
    assert 0 in batch.target_counts and min(aligned.target_counts) == 1
    assert lm % 32 == len(aligned.ids) % 32 == len(aligned.key_ids) % 32 == 0 < aligned.padding
    assert aligned.counts == batch.counts
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain, atol=1e-12, rtol=0)


def test_layers_that_compute_again_give_the_same_gradients_bit_by_bit_and_what_dropout_draws():
    encoder = Encoder(replace(SIZE, layers=3), dropout=0.1).train()
    initialise(encoder, 1)
    torch.manual_seed(1)
    ids, rows, runs, found = torch.randint(5, 40, (30,)), torch.tensor([0, 3, 14]), [], []
    encoder.layers[1].register_forward_pre_hook(lambda *_: runs.append(1))

    for encoder.recompute in (False, True):
        torch.manual_seed(2)
        encoder.zero_grad()
        hidden = encoder.embed(ids, torch.cat([torch.arange(12), torch.arange(18)]))
        hidden = encoder.run(hidden, (12, 18), 0, 3, rows, (2, 1))
        hidden.pow(3).sum().backward()
        found.append([hidden, torch.rand(3), *(p.grad for p in encoder.parameters())])

    assert len(runs) == 1 + 2
    assert all(torch.equal(plain, again) for plain, again in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_layers_are_compiled_where_a_small_one_can_be_and_elsewhere_a_line_says_why_not(caplog, dropout):
    cpu, before = torch.device("cpu"), torch.get_rng_state()

    assert can_compile("aot_eager", cpu, dropout) and "not compiled" not in caplog.text
    assert not can_compile("no such compiler", cpu, dropout) and "not compiled" in caplog.text
    assert compiler_for(cpu, dropout) == ""
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_fifty_ragged_batches_run_through_the_graphs_of_the_first_two_and_no_graph_breaks(tiny_shards, kind):
    config = tiny_config(contrast={"layer": 1, "pooling": "mean"})
    sampler, model = Sampler(open_shards(tiny_shards), config), InfoXLM(replace(SIZE, layers=2), 1, "mean", True)
    initialise(model, 1)
    plain = copy.deepcopy(model)
    model.encoder.compiler = "aot_eager"  # its graphs are those of inductor
    keys = KeyEncoder(model)

    graphs, gaps, shapes = [], [], set()
    torch._dynamo.reset()
    counters.clear()
    for step in range(52):
        (batch,) = micro_batches(sampler.draw(step, range(4)), 8)
        shapes.add(batch.lengths)
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == torch.bfloat16):
            outputs, expected = model(batch), plain(batch)
            keys(batch.key_ids, batch.key_positions, batch.key_lengths)
        (outputs.loss + outputs.queries.sum()).backward()
        gaps.append(abs(outputs.loss.item() / expected.loss.item() - 1))
        graphs.append(counters["stats"]["unique_graphs"])

    assert len(shapes) > 40 and graphs[1] == graphs[-1] == 3  # all rows; targets alone; keys, without gradient
    assert not counters["graph_break"]
    assert max(gaps) < (1e-6 if kind == torch.float32 else 1e-3)
