"""Layouts, masks, mixup and sampling (acceptance items A15 - A18)."""

from collections import Counter

import numpy as np
import pytest
import torch

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.batches import add_missing_rows, micro_batches
from infoxlm_core.data.layouts import Sequences, lay_out, mix
from infoxlm_core.data.samples import Sampler
from infoxlm_core.data.sampling import TableSampler, generator, probabilities
from infoxlm_core.data.shards import Table, make_blocks, open_shards
from infoxlm_core.data.vocabulary import Vocabulary
from infoxlm_core.errors import CorpusTooSmall
from tests.toys.pretraining import VOCABULARY, tiny_config, write_shards

XLM_R = Vocabulary.xlm_r(250_002)
# GB of parallel text and the probabilities of InfoXLM's Table 9, alpha 0.7
PAIRS = {"ar": (5.88, 0.1288), "bg": (0.49, 0.0226), "de": (4.21, 0.1020), "el": (2.28, 0.0664), "es": (7.09, 0.1469),
         "fr": (7.63, 0.1546), "hi": (0.62, 0.0267), "ru": (7.72, 0.1559), "sw": (0.06, 0.0052), "th": (0.47, 0.0220),
         "tr": (0.34, 0.0175), "ur": (0.39, 0.0193), "vi": (0.86, 0.0335), "zh": (4.02, 0.0987)}  # fmt: skip


# the same for monolingual text, Table 8
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


def of(*rows: list[int]) -> Sequences:
    return Sequences(np.concatenate([np.array(r, np.int64) for r in rows]), np.array([len(row) for row in rows]))


def rows_of(sequences: Sequences) -> list[list[int]]:
    return [part.tolist() for part in np.split(sequences.flat, sequences.lengths.cumsum()[:-1])]


@pytest.mark.item("A16")
def test_layouts_have_one_bos_and_one_eos_after_each_side():
    laid = lay_out([of([10, 11], [12]), of([20], [21, 22, 23])], XLM_R)

    assert rows_of(laid) == [[0, 10, 11, 2, 20, 2], [0, 12, 2, 21, 22, 23, 2]]


@pytest.mark.item("A16")
def test_a_missing_second_side_brings_no_eos():
    laid = lay_out([of([10, 11]), Sequences(np.empty(0, np.int64), np.zeros(1, np.int64))], XLM_R)

    assert rows_of(laid) == [[0, 10, 11, 2]]


MODES = ["c1 d1|c2 d2", "d1 c1|c2 d2", "c1 d1|d2 c2", "d1 c1|d2 c2",
         "c2 d2|c1 d1", "c2 d2|d1 c1", "d2 c2|c1 d1", "d2 c2|d1 c1"]  # fmt: skip
CODES = {"c1": 10, "c2": 20, "d1": 30, "d2": 40}


@pytest.mark.item("A17")
@pytest.mark.parametrize(("mode", "views"), list(enumerate(MODES)))
def test_mixup_modes_are_those_of_the_specification(mode, views):
    first, second = (of([10]), of([20])), (of([30]), of([40]))

    query, key = mix(first, second, np.array([mode]), np.array([False]), np.array([True]), XLM_R)

    expected = [[0, *(token for name in side.split() for token in (CODES[name], 2))] for side in views.split("|")]
    assert [*rows_of(query), *rows_of(key)] == expected


@pytest.mark.item("A17")
def test_crossed_mixup_is_the_papers_example():
    query, key = mix(
        (of([10]), of([20])), (of([30]), of([40])), np.array([2]), np.array([True]), np.array([True]), XLM_R
    )  # fmt: skip

    assert rows_of(query) == [[0, 10, 2, 40, 2]]  # c1 d2
    assert rows_of(key) == [[0, 30, 2, 20, 2]]  # d1 c2


@pytest.mark.item("A17")
def test_without_mixup_only_the_sides_are_exchanged():
    query, key = mix(
        (of([10], [11]), of([20], [21])), (of([30], [31]), of([40], [41])),
        np.array([3, 7]), np.array([False, False]), np.array([False, False]), XLM_R,
    )  # fmt: skip

    assert rows_of(query) == [[0, 10, 2], [0, 21, 2]]
    assert rows_of(key) == [[0, 20, 2], [0, 11, 2]]


@pytest.mark.item("A18")
def test_language_probabilities_are_the_papers():
    shares = probabilities(np.array([round(gb * 100) for gb, _ in PAIRS.values()]), 0.7)

    assert dict(zip(PAIRS, shares, strict=True)) == pytest.approx({k: p for k, (_, p) in PAIRS.items()}, abs=5e-5)
    assert probabilities(np.array([1, 3]), 1.0).tolist() == [0.25, 0.75]
    assert probabilities(np.array([1, 3, 0]), 0.0).tolist() == [0.5, 0.5, 0.0]


@pytest.mark.item("A18")
@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (
            0.7,
            {"en": 0.19138, "ru": 0.09109, "de": 0.04719, "zh": 0.04645, "ur": 0.00408, "sw": 0.00081, "uz": 0.00038},
        ),
        (1.0, {"en": 0.35205, "sw": 0.00014}),
        (0.3, {"en": 0.05115, "sw": 0.00493}),
    ],
)
def test_monolingual_probabilities_are_the_papers(alpha, expected):
    shares = dict(zip(LANGUAGES, probabilities(SIZES, alpha), strict=True))

    assert len(shares) == 87 and SIZES.sum() / 10 == pytest.approx(2078.1)
    assert {code: shares[code] for code in expected} == pytest.approx(expected, abs=5e-6)


@pytest.mark.item("A18")
def test_ten_million_draws_follow_the_golden_table(record_property):
    sampler, draws = TableSampler([[size] for size in SIZES], alpha=0.7), 10_000_000
    counts = np.zeros(len(SIZES))
    for part in range(10):
        counts += np.bincount(sampler.draw(draws // 10, generator("golden", part))[0], minlength=len(SIZES))

    p = probabilities(SIZES, 0.7)
    off = np.abs(counts / draws - p)
    record_property("figure", f"10^7 draws: off by {(off / p)[p > 0.02].max():.2%} at most where p > 0.02")
    assert (off[p > 0.02] <= 0.01 * p[p > 0.02]).all()
    assert (off <= 4 * np.sqrt(p * (1 - p) / draws)).all()


@pytest.mark.item("A18")
def test_draws_follow_the_distribution_over_languages_and_are_uniform_within():
    sampler = TableSampler([[300, 100], [50]], alpha=0.7)

    tables, rows = sampler.draw(1_000_000, generator("draws"))

    p = 400**0.7 / (400**0.7 + 50**0.7)
    shares = np.bincount(tables, minlength=3) / 1e6
    assert shares == pytest.approx([0.75 * p, 0.25 * p, 1 - p], rel=0.01)
    assert np.bincount(rows[tables == 1]).min() > 0 and rows[tables == 1].max() == 99
    assert rows[tables == 2].max() == 49


@pytest.mark.item("A17")
def test_partners_come_from_another_corpus_by_the_same_distribution():
    sampler, corpora = TableSampler([[300, 100], [50, 30]], alpha=0.7), ["one", "two", "one", "two"]

    tables, rows = sampler.draw_partners(np.repeat([0, 3], 200_000), corpora, generator("partners"))

    first, second = tables[:200_000], tables[200_000:]
    assert set(first) == {1, 3} and set(second) == {0, 2}
    weights = np.array([400**0.7 * 100 / 400, 80**0.7 * 30 / 80])  # p(language) x share of corpus two in it
    assert (first == 1).mean() == pytest.approx(weights[0] / weights.sum(), abs=0.005)
    assert rows[tables == 3].max() == 29


@pytest.mark.item("A17")
def test_with_one_corpus_the_partner_is_another_pair_of_it(tmp_path):
    shards = open_shards(write_shards(tmp_path, {"only": 6}, ("de",)))
    sampler = Sampler(shards, tiny_config(batches={"global_batch_size": 400, "virtual_shards": 1}))

    sentence_ids = sampler.draw(0, range(1)).xlco.sentence_ids

    assert (sentence_ids[:, 0] != sentence_ids[:, 1]).all()
    assert set(sentence_ids.flat) == set(shards.pairs["en-de"][0].read_pairs().sentence_ids)


def test_how_often_a_pair_is_drawn_is_known_before_a_training_and_warned_of_where_it_is_too_often(tmp_path, caplog):
    shards = open_shards(write_shards(tmp_path, {"large": 400, "small": 20}, ("de",)))
    config = tiny_config(batches={"global_batch_size": 400, "virtual_shards": 1}, contrast={"mixup": 0.5})
    sampler, drawn = Sampler(shards, config), Counter()
    owner = {
        int(sentence): corpus
        for corpus, pairs in zip(sampler.corpora, sampler.pairs, strict=True)
        for sentence in pairs.read_pairs().sentence_ids
    }
    draw = sampler.pair_sampler.draw
    sampler.pair_sampler.draw = lambda *arguments: (found := draw(*arguments), drawn.update(found[0].tolist()))[0]
    for step in range(25):
        first, second = sampler.draw(step, range(1)).xlco.sentence_ids.T.tolist()
        drawn.update(sampler.corpora.index(owner[two]) for one, two in zip(first, second, strict=True) if one != two)

    expected = sampler.draws_per_pair(25)
    sampler.log_draws(25)

    assert {"en-de/large": drawn[0] / 400, "en-de/small": drawn[1] / 20} == pytest.approx(expected, rel=0.03)
    assert expected["en-de/small"] > 4 * expected["en-de/large"]  # it gives nearly all partners
    (warned,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "en-de/small (286)" in warned and "en-de/large" not in warned


def test_one_pair_alone_cannot_be_mixed(tmp_path):
    shards = open_shards(write_shards(tmp_path, {"only": 1}, ("de",)))

    with pytest.raises(CorpusTooSmall, match="have=1 need=2"):
        Sampler(shards, tiny_config())


@pytest.mark.item("A17")
def test_views_translate_each_other(tiny_shards):
    sampler = Sampler(open_shards(tiny_shards), tiny_config(batches={"global_batch_size": 64}))
    draw = sampler.draw(3, range(4))
    half = (VOCABULARY - 5) // 2

    def meanings(row: list[int]) -> Counter:
        return Counter((token - 4) % half for token in row if token >= 4)

    def foreign(row: list[int]) -> int:
        return sum(token >= 4 + half for token in row)

    for query, key in zip(rows_of(draw.xlco.queries), rows_of(draw.xlco.keys), strict=True):
        assert query.count(0) == 1 and query.count(2) == 2 and query[-1] == 2
        assert meanings(query) == meanings(key)
        assert foreign(query) == sum(token >= 4 for token in key) - foreign(key)


@pytest.mark.item("A16")
def test_both_orders_of_tlm_are_equally_likely(tiny_shards):
    config = tiny_config(batches={"global_batch_size": 4000, "virtual_shards": 1}, objectives={"mlm": 0, "xlco": 0})
    draw = Sampler(open_shards(tiny_shards), config).draw(0, range(1))

    english_first = np.mean([row[1] < 4 + (VOCABULARY - 5) // 2 for row in rows_of(draw.tlm.sequences)])
    assert english_first == pytest.approx(0.5, abs=3 * 0.5 / 4000**0.5)


@pytest.mark.item("A17")
def test_the_eight_modes_of_mixup_are_equally_likely(tiny_shards, record_property):
    shards = open_shards(tiny_shards)
    config = tiny_config(batches={"global_batch_size": 4000, "virtual_shards": 1}, contrast={"cross": 0.0})
    draw = Sampler(shards, config).draw(0, range(1))
    sides = {}  # meaning -> (English, its translation)
    for tables in shards.pairs.values():
        for table in [stored.read_pairs() for stored in tables]:
            for row, meaning in enumerate(table.sentence_ids.tolist()):
                cut = slice(table.source.offsets[row], table.source.offsets[row + 1])
                sides[meaning] = tuple(side.tokens[cut].tolist() for side in (table.source, table.target))

    modes = Counter()
    sentence_ids = draw.xlco.sentence_ids.tolist()
    for query, key, (c, d) in zip(rows_of(draw.xlco.queries), rows_of(draw.xlco.keys), sentence_ids, strict=True):
        views = [sides[c][0], sides[d][0]], [sides[c][1], sides[d][1]]  # source, target
        found = [
            mode
            for mode in range(8)
            if [
                [0, *first, 2, *second, 2]
                for first, second in (
                    views[0][:: -1 if mode & 1 else 1], views[1][:: -1 if mode & 2 else 1]
                )[:: -1 if mode & 4 else 1]
            ]
            == [query, key]
        ]  # fmt: skip
        assert len(found) == 1
        modes[found[0]] += 1

    chi_square = sum((modes[mode] - 500) ** 2 / 500 for mode in range(8))
    record_property("figure", f"chi square of 8 modes {chi_square:.1f} (limit 24.32)")
    assert chi_square < 24.32  # p > 0.001 with seven degrees of freedom


@pytest.mark.item("A16")
def test_the_papers_lengths_never_exceed_512_tokens():
    batches = PretrainingConfig().batches

    assert batches.side_tokens == 254 and 2 * batches.side_tokens + 3 == 511
    assert batches.block_tokens == PretrainingConfig().longest == 512


@pytest.mark.item("A18")
def test_samples_do_not_depend_on_the_number_of_workers_or_the_micro_batch(tiny_shards):
    sampler = Sampler(open_shards(tiny_shards), tiny_config())
    whole = micro_batches(sampler.draw(5, range(4)), 8)
    split = [b for shards in (range(0, 2), range(2, 4)) for b in micro_batches(sampler.draw(5, shards), 1)]

    def samples(batches):
        lm = sorted(tuple(p.tolist()) for b in batches for p in b.ids.split(b.lengths)[: b.lm_sequences])
        views = [tuple(p.tolist()) for b in batches for p in b.ids.split(b.lengths)[b.lm_sequences :]]
        keys = [tuple(p.tolist()) for b in batches for p in b.key_ids.split(b.key_lengths)]
        answers = sorted(answer for b in batches for answer in b.target_ids.tolist())
        return lm, views, keys, answers, [m for b in batches for m in b.sentence_ids.tolist()]

    assert len(whole) == 1 and len(split) == 8
    assert samples(whole) == samples(split)
    assert samples(micro_batches(sampler.draw(6, range(4)), 8)) != samples(whole)


def test_special_tokens_have_the_ids_that_the_shards_record(tmp_path):
    bert_like = Vocabulary(begin=1, end=2, pad=0, unk=63, mask=3, special_ids=(0, 1, 2, 3, 63), size=VOCABULARY)
    shards = open_shards(write_shards(tmp_path, {"one": 40}, vocabulary=bert_like))
    draw = Sampler(shards, tiny_config()).draw(0, range(4))

    assert shards.vocabulary == bert_like
    for sequences in (draw.mlm.sequences, draw.tlm.sequences, draw.xlco.queries, draw.xlco.keys):
        assert {(row[0], row[-1]) for row in sequences.rows} == {(1, 2)}
        assert {0, 3, 63}.isdisjoint(sequences.flat)
    changed_ids = draw.tlm.masked_ids[draw.tlm.masked_ids != draw.tlm.sequences.flat]
    assert 3 in changed_ids and {0, 1, 2, 63}.isdisjoint(changed_ids)
    (batch,) = micro_batches(draw, 8)
    assert (set(batch.aligned(64, bert_like.pad).ids.tolist()) - set(batch.ids.tolist())) == {0}


@pytest.mark.item("A15")
def test_targets_stand_where_the_batch_says(tiny_shards):
    sampler = Sampler(open_shards(tiny_shards), tiny_config())
    draw = sampler.draw(1, range(4))
    original = np.concatenate([draw.mlm.sequences.flat, draw.tlm.sequences.flat])
    seen = np.concatenate([draw.mlm.masked_ids, draw.tlm.masked_ids])
    (batch,) = micro_batches(draw, 8)

    assert batch.ids[: len(seen)].tolist() == seen.tolist()
    assert batch.target_ids.tolist() == original[batch.target_rows].tolist()
    changed = np.flatnonzero(original != seen)
    assert set(changed) <= set(batch.target_rows.tolist())
    owners = torch.repeat_interleave(
        torch.arange(batch.lm_sequences), torch.tensor(batch.lengths[: batch.lm_sequences])
    )
    assert torch.bincount(owners[batch.target_rows], minlength=16).tolist() == list(batch.target_counts)


@pytest.mark.parametrize("part", [1, 3, 10, 1000])
@pytest.mark.parametrize("shortest", [0, 1])
def test_blocks_are_those_of_a_walk_from_the_first_row_to_the_last(part, shortest):
    rng = np.random.default_rng(part)
    for limit in range(1, 40):
        offsets = np.concatenate([[0], rng.integers(shortest, 20, rng.integers(0, 60)).cumsum()])
        table = Table(np.zeros(offsets[-1], np.uint32), offsets)
        expected, row = [], 0
        while row < len(table):
            stop = row + 1
            while stop < len(table) and offsets[stop + 1] - offsets[row] <= limit:
                stop += 1
            expected.append((offsets[row], min(limit, offsets[stop] - offsets[row])))
            row = stop

        blocks = make_blocks(table, limit, part)

        assert list(zip(blocks.starts, blocks.lengths, strict=True)) == expected


@pytest.mark.item("A16")
def test_sides_are_cut_at_the_limit(tiny_shards):
    config = tiny_config(batches={"side_tokens": 3, "block_tokens": 6})

    draw = Sampler(open_shards(tiny_shards), config).draw(0, range(4))

    assert draw.tlm.sequences.lengths.max() == 3 + 3 + 3 and draw.xlco.queries.lengths.max() <= 9
    assert draw.mlm.sequences.lengths.max() <= 6


def test_a_sequence_without_an_answer_gets_its_first_row_and_the_others_keep_theirs():
    rows, counts, answered = add_missing_rows(torch.tensor([1, 3, 9]), (2, 0, 1, 0), (4, 3, 3, 5))

    assert rows.tolist() == [1, 3, 4, 9, 10] and counts == (2, 1, 1, 1)
    assert rows[answered].tolist() == [1, 3, 9]
    assert add_missing_rows(torch.tensor([1, 3]), (1, 1), (3, 3))[2] is None
