"""Layouts, masks, mixup and sampling (acceptance items A15 - A18)."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from infoxlm_core import manifests
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data import samples
from infoxlm_core.data.batches import PackedBatch, add_missing_rows, pack_micro_batches
from infoxlm_core.data.layouts import Sequences, lay_out
from infoxlm_core.data.mixup import mix
from infoxlm_core.data.samples import Sampler
from infoxlm_core.data.sampling import TableSampler, make_rng, probabilities
from infoxlm_core.data.shards import Table, make_blocks, open_shards
from infoxlm_core.data.vocabulary import Vocabulary
from infoxlm_core.data.writing import write_table
from infoxlm_core.errors import CorpusTooSmall
from tests.toys.pretraining import VOCABULARY, make_pairs, tiny_config, write_shards

XLM_R = Vocabulary.xlm_r(250_002)
# GB of parallel text and the probabilities of InfoXLM's Table 9, alpha 0.7
PAIRS = {"ar": (5.88, 0.1288), "bg": (0.49, 0.0226), "de": (4.21, 0.1020), "el": (2.28, 0.0664), "es": (7.09, 0.1469),
         "fr": (7.63, 0.1546), "hi": (0.62, 0.0267), "ru": (7.72, 0.1559), "sw": (0.06, 0.0052), "th": (0.47, 0.0220),
         "tr": (0.34, 0.0175), "ur": (0.39, 0.0193), "vi": (0.86, 0.0335), "zh": (4.02, 0.0987)}  # fmt: skip

# GB of monolingual text of Table 8
TEXT = (
    "af .2 am .4 ar 16.1 as .1 az .8 ba .2 be .5 bg 7.0 bn 5.5 ca 3.0 ckb .6 cs 14.9 cy .4 da 6.9 de 99.0 "
    "el 13.1 en 731.6 eo .5 es 85.6 et 1.4 eu 1.0 fa 19.0 fi 5.9 fr 89.9 ga .2 gl 1.5 gu .3 he 4.4 hi 5.0 "
    "hr 1.4 hu 9.5 hy .7 id 17.2 is .5 it 47.2 ja 86.8 ka 1.0 kk .6 km .2 kn .3 ko 40.0 ky .5 la .3 lo .2 "
    "lt 2.3 lv 1.3 mk .6 ml 1.3 mn .4 mr .5 ms .7 mt .2 my .4 ne .6 nl 25.9 nn .4 no 5.5 or .3 pa .8 pl 28.6 "
    "ps .4 pt 39.4 ro 11.0 ru 253.3 sa .2 sd .2 si 1.3 sk 13.6 sl 6.2 sq 3.0 sr 7.2 sv 60.4 sw .3 ta 7.9 "
    "te 2.3 tg .7 th 33.0 tl 1.2 tr 56.4 tt .6 ug .2 uk 13.4 ur 3.0 uz .1 vi 74.5 yi .3 zh 96.8 "
)
LANGUAGES = TEXT.split()[::2]
SIZES = np.array([round(float(gigabytes) * 10) for gigabytes in TEXT.split()[1::2]])


def sequences(*rows: list[int]) -> Sequences:
    """Return packed sequences of these token ids."""
    return Sequences(np.array([*itertools.chain(*rows)], np.int64), np.array([len(row) for row in rows]))


def to_lists(packed: Sequences) -> list[list[int]]:
    """Return the token ids of each sequence."""
    return [row.tolist() for row in packed.rows]


@pytest.mark.item("A16")
def test_a_pair_has_one_begin_token_and_an_end_token_after_each_side_that_is_not_empty():
    pairs = lay_out([sequences([10, 11], [12], [13]), sequences([20], [21, 22, 23], [])], XLM_R)

    assert to_lists(pairs) == [[0, 10, 11, 2, 20, 2], [0, 12, 2, 21, 22, 23, 2], [0, 13, 2]]


MODES = ["c1 d1|c2 d2", "d1 c1|c2 d2", "c1 d1|d2 c2", "d1 c1|d2 c2",
         "c2 d2|c1 d1", "c2 d2|d1 c1", "d2 c2|c1 d1", "d2 c2|d1 c1"]  # fmt: skip
TOKENS = {"c1": 10, "c2": 20, "d1": 30, "d2": 40}


@pytest.mark.item("A17")
@pytest.mark.parametrize(("mode", "views"), enumerate(MODES))
def test_mixup_modes_are_those_of_the_specification(mode, views):
    query, key = mix(
        (sequences([10]), sequences([20])), (sequences([30]), sequences([40])),
        np.array([mode]), np.array([False]), np.array([True]), XLM_R,
    )  # fmt: skip

    expected_views = []
    for view in views.split("|"):
        first, second = [TOKENS[name] for name in view.split()]
        expected_views.append([0, first, 2, second, 2])
    assert [*to_lists(query), *to_lists(key)] == expected_views


@pytest.mark.item("A17")
def test_crossed_mixup_is_the_papers_example():
    query, key = mix(
        (sequences([10]), sequences([20])), (sequences([30]), sequences([40])),
        np.array([2]), np.array([True]), np.array([True]), XLM_R,
    )  # fmt: skip

    assert to_lists(query) == [[0, 10, 2, 40, 2]]  # c1 d2
    assert to_lists(key) == [[0, 30, 2, 20, 2]]  # d1 c2


@pytest.mark.item("A17")
def test_without_mixup_only_the_sides_are_exchanged():
    query, key = mix(
        (sequences([10], [11]), sequences([20], [21])), (sequences([30], [31]), sequences([40], [41])),
        np.array([3, 7]), np.array([False, False]), np.array([False, False]), XLM_R,
    )  # fmt: skip

    assert to_lists(query) == [[0, 10, 2], [0, 21, 2]]
    assert to_lists(key) == [[0, 20, 2], [0, 11, 2]]


@pytest.mark.item("A18")
def test_language_pairs_are_drawn_with_the_papers_probabilities():
    sizes = np.array([round(gigabytes * 100) for gigabytes, _ in PAIRS.values()])

    assert probabilities(sizes, 0.7) == pytest.approx([probability for _, probability in PAIRS.values()], abs=5e-5)
    assert probabilities(np.array([1, 3]), 1.0).tolist() == [0.25, 0.75]
    assert probabilities(np.array([1, 3, 0]), 0.0).tolist() == [0.5, 0.5, 0.0]


@pytest.mark.item("A18")
@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (0.7, {"en": 0.19138, "ru": 0.09109, "de": 0.04719, "zh": 0.04645, "ur": 0.00408, "sw": 0.00081,
               "uz": 0.00038}),
        (1.0, {"en": 0.35205, "sw": 0.00014}),
        (0.3, {"en": 0.05115, "sw": 0.00493}),
    ],
)  # fmt: skip
def test_languages_are_drawn_with_the_papers_probabilities(alpha, expected):
    probability_of = dict(zip(LANGUAGES, probabilities(SIZES, alpha), strict=True))

    assert len(probability_of) == 87
    assert SIZES.sum() / 10 == pytest.approx(2078.1)
    assert {language: probability_of[language] for language in expected} == pytest.approx(expected, abs=5e-6)


@pytest.mark.item("A18")
def test_ten_million_draws_follow_the_probabilities(record_property):
    sampler = TableSampler([[size] for size in SIZES], alpha=0.7)
    counts = np.zeros(len(SIZES))
    for million in range(10):
        tables, _ = sampler.draw(1_000_000, make_rng("golden", million))
        counts += np.bincount(tables, minlength=len(SIZES))

    p = probabilities(SIZES, 0.7)
    errors = np.abs(counts / 1e7 - p)
    largest_error = (errors / p)[p > 0.02].max()
    record_property("figure", f"10^7 draws: off by {largest_error:.2%} at most where p > 0.02")
    assert largest_error <= 0.01
    assert (errors <= 4 * np.sqrt(p * (1 - p) / 1e7)).all()


@pytest.mark.item("A18")
def test_a_language_is_drawn_by_its_size_and_then_each_of_its_samples_equally_often():
    sampler = TableSampler([[300, 100], [50]], alpha=0.7)

    tables, rows = sampler.draw(1_000_000, make_rng("draws"))

    p = 400**0.7 / (400**0.7 + 50**0.7)
    assert np.bincount(tables, minlength=3) / 1e6 == pytest.approx([0.75 * p, 0.25 * p, 1 - p], rel=0.01)
    assert set(rows[tables == 1]) == set(range(100))
    assert rows[tables == 2].max() == 49


@pytest.mark.item("A17")
def test_partners_come_from_another_corpus_by_the_same_distribution():
    sampler = TableSampler([[300, 100], [50, 30]], alpha=0.7)
    tables = np.repeat([0, 3], 200_000)

    partner_tables, rows = sampler.draw_partners(tables, ["one", "two", "one", "two"], make_rng("partners"))

    assert set(partner_tables[tables == 0]) == {1, 3}
    assert set(partner_tables[tables == 3]) == {0, 2}
    weights = np.array([400**0.7 * 100 / 400, 80**0.7 * 30 / 80])  # p(language) x share of corpus two in it
    share_of_table_1 = (partner_tables[tables == 0] == 1).mean()
    assert share_of_table_1 == pytest.approx(weights[0] / weights.sum(), abs=0.005)
    assert rows[partner_tables == 3].max() == 29


@pytest.mark.item("A17")
def test_with_one_corpus_the_partner_is_another_pair_of_it(tmp_path):
    shards = open_shards(write_shards(tmp_path, {"only": 6}, ("de",)))
    sampler = Sampler(shards, tiny_config(batches={"global_batch_size": 400, "virtual_shards": 1}))

    sentence_ids = sampler.draw(0, range(1)).xlco.sentence_ids

    assert (sentence_ids[:, 0] != sentence_ids[:, 1]).all()
    assert set(sentence_ids.flat) == set(shards.pairs["en-de"][0].read_pairs().sentence_ids)


@pytest.mark.item("A17")
def test_a_pair_whose_only_partner_in_other_corpora_is_the_same_sentence_gets_one_of_its_corpus(tmp_path):
    directory = write_shards(tmp_path, {"many": 6}, ("de",))
    [many] = open_shards(directory).pairs["en-de"]
    sentence_id = many.read_pairs().sentence_ids[:1]
    facts = manifests.load(directory)["facts"]
    single_pair = make_pairs(np.array([5]), np.array([6]), np.array([1]), sentence_id)
    facts["tables"]["pairs/en-de/single"] = write_table(directory, "pairs/en-de/single", [single_pair])
    manifests.write(directory, "shards", facts)
    sampler = Sampler(open_shards(directory), tiny_config(batches={"global_batch_size": 400, "virtual_shards": 1}))

    views = sampler.draw(0, range(1)).xlco

    assert (views.sentence_ids[:, 0] != views.sentence_ids[:, 1]).all()
    is_in_many = views.group_ids == sampler.group_names.index("xlco/en-de/many")
    has_same_sentence = views.sentence_ids[:, 0] == sentence_id
    assert (views.sentence_ids[is_in_many & ~has_same_sentence, 1] == sentence_id).all()  # of the other corpus


def test_the_number_of_draws_of_a_pair_is_predicted_and_too_many_are_reported(tmp_path, caplog, monkeypatch):
    shards = open_shards(write_shards(tmp_path, {"large": 400, "small": 20}, ("de",)))
    config = tiny_config(batches={"global_batch_size": 400, "virtual_shards": 1}, contrast={"mixup": 0.5})
    sampler = Sampler(shards, config)
    draw_counts = Counter()
    draw = sampler.pair_sampler.draw

    def count_draws(*arguments):
        tables, rows = draw(*arguments)
        draw_counts.update(tables.tolist())
        return tables, rows

    monkeypatch.setattr(sampler.pair_sampler, "draw", count_draws)
    table_of = {}  # by sentence id
    for number, table in enumerate(sampler.pairs):
        table_of |= dict.fromkeys(table.read_pairs().sentence_ids.tolist(), number)
    for step in range(25):
        for first, second in sampler.draw(step, range(1)).xlco.sentence_ids.tolist():
            if first != second:  # the second sentence is that of a partner
                draw_counts[table_of[second]] += 1

    expected = sampler.count_draws_per_pair(25)
    sampler.log_draw_counts(25)

    assert {"en-de/large": draw_counts[0] / 400, "en-de/small": draw_counts[1] / 20} == pytest.approx(
        expected, rel=0.03
    )
    assert expected["en-de/small"] > 4 * expected["en-de/large"]  # nearly all partners come from the small corpus
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "en-de/small (286)" in warning
    assert "en-de/large" not in warning


def test_mixup_of_a_single_pair_is_refused(tmp_path):
    shards = open_shards(write_shards(tmp_path, {"only": 1}, ("de",)))

    with pytest.raises(CorpusTooSmall, match="at least 2, but the shards contain 1"):
        Sampler(shards, tiny_config())


@pytest.mark.item("A17")
def test_views_translate_each_other_and_crossed_views_mix_languages(tiny_shards):
    sampler = Sampler(open_shards(tiny_shards), tiny_config(batches={"global_batch_size": 64}))
    views = sampler.draw(3, range(4)).xlco
    half = (VOCABULARY - 5) // 2  # in the toy text, a translation is the same token plus half the pieces

    def count_meanings(view: list[int]) -> Counter:
        return Counter((token - 4) % half for token in view if token >= 4)

    def count_foreign_tokens(view: list[int]) -> int:
        return sum(token >= 4 + half for token in view)

    for query, key in zip(to_lists(views.queries), to_lists(views.keys), strict=True):
        assert (query.count(0), query.count(2), query[-1]) == (1, 2, 2)
        assert count_meanings(query) == count_meanings(key)
        assert count_foreign_tokens(query) == sum(token >= 4 for token in key) - count_foreign_tokens(key)


@pytest.mark.item("A16")
def test_both_orders_of_tlm_are_equally_likely(tiny_shards):
    config = tiny_config(batches={"global_batch_size": 4000, "virtual_shards": 1}, objectives={"mlm": 0, "xlco": 0})

    sampled = Sampler(open_shards(tiny_shards), config).draw(0, range(1)).tlm.sequences

    is_english_first = [sequence[1] < 4 + (VOCABULARY - 5) // 2 for sequence in to_lists(sampled)]
    assert np.mean(is_english_first) == pytest.approx(0.5, abs=3 * 0.5 / 4000**0.5)


@pytest.mark.item("A17")
def test_the_eight_modes_of_mixup_are_equally_likely(tiny_shards, monkeypatch, record_property):
    drawn_modes = []

    def record_modes(pairs, partners, modes, *decisions):
        drawn_modes.extend(modes.tolist())
        return mix(pairs, partners, modes, *decisions)

    monkeypatch.setattr(samples, "mix", record_modes)
    config = tiny_config(batches={"global_batch_size": 4000, "virtual_shards": 1})
    Sampler(open_shards(tiny_shards), config).draw(0, range(1))

    counts = np.bincount(drawn_modes, minlength=8)
    chi_square = ((counts - 500) ** 2 / 500).sum()
    record_property("figure", f"chi square of 8 modes {chi_square:.1f} (limit 24.32)")
    assert len(counts) == 8
    assert chi_square < 24.32  # p > 0.001 with seven degrees of freedom


@pytest.mark.item("A16")
def test_the_papers_lengths_never_exceed_512_tokens():
    batches = PretrainingConfig().batches

    assert batches.side_tokens == 254
    assert 2 * batches.side_tokens + 3 == 511
    assert batches.block_tokens == PretrainingConfig().max_sequence_tokens == 512


def list_samples(batches: list[PackedBatch]) -> tuple[list, ...]:
    """Return the MLM and TLM sequences, views, keys, targets and sentence ids of micro-batches.

    Micro-batches alternate between MLM and TLM, so their sequences and targets are sorted.
    """
    lm, views, keys, targets, sentence_ids = [], [], [], [], []
    for batch in batches:
        rows = [row.tolist() for row in batch.ids.split(batch.lengths)]
        lm += rows[: batch.lm_sequences]
        views += rows[batch.lm_sequences :]
        keys += [row.tolist() for row in batch.key_ids.split(batch.key_lengths)]
        targets += batch.target_ids.tolist()
        sentence_ids += batch.sentence_ids.tolist()
    return sorted(lm), views, keys, sorted(targets), sentence_ids


@pytest.mark.item("A18")
def test_samples_do_not_depend_on_the_number_of_workers_or_the_micro_batch(tiny_shards):
    sampler = Sampler(open_shards(tiny_shards), tiny_config())

    single = pack_micro_batches(sampler.draw(5, range(4)), 8)
    split = pack_micro_batches(sampler.draw(5, range(2)), 1) + pack_micro_batches(sampler.draw(5, range(2, 4)), 1)

    assert (len(single), len(split)) == (1, 8)
    assert list_samples(single) == list_samples(split)
    assert list_samples(pack_micro_batches(sampler.draw(6, range(4)), 8)) != list_samples(single)


def test_special_tokens_have_the_ids_that_the_shards_record(tmp_path):
    bert_like = Vocabulary(begin=1, end=2, pad=0, unk=63, mask=3, special_ids=(0, 1, 2, 3, 63), size=VOCABULARY)
    shards = open_shards(write_shards(tmp_path, {"one": 40}, vocabulary=bert_like))
    draw = Sampler(shards, tiny_config()).draw(0, range(4))

    assert shards.vocabulary == bert_like
    for packed in (draw.mlm.sequences, draw.tlm.sequences, draw.xlco.queries, draw.xlco.keys):
        assert {(row[0], row[-1]) for row in packed.rows} == {(1, 2)}
        assert {0, 3, 63}.isdisjoint(packed.flat)
    changed_ids = draw.tlm.masked_ids[draw.tlm.masked_ids != draw.tlm.sequences.flat]
    assert 3 in changed_ids
    assert {0, 1, 2, 63}.isdisjoint(changed_ids)
    [batch] = pack_micro_batches(draw, 8)
    assert set(batch.pad_for_gpu(64, bert_like.pad).ids.tolist()) - set(batch.ids.tolist()) == {0}


@pytest.mark.item("A15")
def test_targets_are_the_original_tokens_at_the_rows_that_the_batch_names(tiny_shards):
    draw = Sampler(open_shards(tiny_shards), tiny_config()).draw(1, range(4))
    original_ids = np.concatenate([draw.mlm.sequences.flat, draw.tlm.sequences.flat])
    masked_ids = np.concatenate([draw.mlm.masked_ids, draw.tlm.masked_ids])

    [batch] = pack_micro_batches(draw, 8)

    assert batch.ids[: len(masked_ids)].tolist() == masked_ids.tolist()
    assert batch.target_ids.tolist() == original_ids[batch.target_rows].tolist()
    assert set(np.flatnonzero(original_ids != masked_ids)) <= set(batch.target_rows.tolist())
    sequence_of_row = np.repeat(range(batch.lm_sequences), batch.lengths[: batch.lm_sequences])
    target_counts = np.bincount(sequence_of_row[batch.target_rows], minlength=16)
    assert target_counts.tolist() == list(batch.target_counts)


@pytest.mark.parametrize(
    ("lengths", "starts", "block_lengths"),
    [
        ([3, 4, 2, 5, 1], [0, 7], [7, 8]),
        ([9, 9, 2], [0, 9, 18], [8, 8, 2]),  # sentences above the limit are truncated
        ([0, 8, 0, 1], [0, 8], [8, 1]),
        ([0, 0], [0], [0]),
        ([], [], []),
    ],
)
@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_blocks_join_as_many_sentences_as_fit(lengths, starts, block_lengths, dtype):
    offsets = np.cumsum([0, *lengths]).astype(dtype)

    blocks = make_blocks(Table(np.zeros(offsets[-1], np.uint32), offsets), max_tokens=8)

    assert blocks.starts.tolist() == starts
    assert blocks.lengths.tolist() == block_lengths


@pytest.mark.item("A16")
def test_sides_and_blocks_are_truncated_at_their_limits(tiny_shards):
    config = tiny_config(batches={"side_tokens": 3, "block_tokens": 6})

    draw = Sampler(open_shards(tiny_shards), config).draw(0, range(4))

    assert draw.tlm.sequences.lengths.max() == 3 + 3 + 3
    assert draw.xlco.queries.lengths.max() <= 9
    assert draw.mlm.sequences.lengths.max() <= 6


def test_every_sequence_without_a_target_row_gets_its_first_row():
    target_rows = add_missing_rows(torch.tensor([1, 3, 9]), (2, 0, 1, 0), (4, 3, 3, 5))

    assert target_rows.rows.tolist() == [1, 3, 4, 9, 10]
    assert target_rows.counts == (2, 1, 1, 1)
    assert target_rows.rows[target_rows.rows_with_target].tolist() == [1, 3, 9]
    assert add_missing_rows(torch.tensor([1, 3]), (1, 1), (3, 3)).rows_with_target is None
