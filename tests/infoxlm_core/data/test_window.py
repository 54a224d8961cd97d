"""The window of parts that a step draws from."""

import numpy as np
import pytest

from infoxlm_core.data.samples import DrawnSamples, Sampler
from infoxlm_core.data.sampling import make_rng
from infoxlm_core.data.shards import Pairs, open_shards
from infoxlm_core.data.window import MIN_PARTS, MovingWindow
from tests.toys.pretraining import tiny_config, write_shards


def ids_of(draw: DrawnSamples) -> list[int]:
    return [*draw.mlm.masked_ids.tolist(), *draw.tlm.masked_ids.tolist(), *draw.xlco.keys.flat.tolist()]


def test_text_that_fits_into_the_window_is_drawn_as_a_single_part_would_be(tmp_path):
    config = tiny_config(model={"max_tokens": 512}, batches={"block_tokens": 512})
    corpora = {"one": 400, "two": 130}
    single = Sampler(open_shards(write_shards(tmp_path / "single", corpora)), config)
    split = Sampler(open_shards(write_shards(tmp_path / "split", corpora, part_tokens=700)), config)

    for step in (0, 1, 7):
        assert ids_of(split.draw(step, range(4))) == ids_of(single.draw(step, range(4)))


def test_a_moving_window_depends_only_on_the_step_and_has_few_parts(tmp_path):
    shards = open_shards(write_shards(tmp_path, {"one": 400}, ("de",), part_tokens=200))
    config = tiny_config(batches={"window": 1})
    sampler = Sampler(shards, config)
    draws = [ids_of(sampler.draw(step, range(4))) for step in range(40)]

    table = shards.pairs["en-de"][0]
    assert table.part_count > 10
    assert len(sampler.pair_window.move_to(39).parts[0]) == MIN_PARTS
    for step in (39, 3, 20):
        assert ids_of(Sampler(shards, config).draw(step, range(4))) == draws[step]
    assert ids_of(Sampler(shards, tiny_config()).draw(39, range(4))) != draws[39]


@pytest.mark.parametrize("block_tokens, is_warned", [(512, False), (256, True)])
def test_large_text_whose_index_is_for_other_blocks_is_reported(tmp_path, caplog, block_tokens, is_warned):
    shards = open_shards(write_shards(tmp_path, {"one": 400}, ("de",)))

    Sampler(shards, tiny_config(model={"max_tokens": 512}, batches={"block_tokens": block_tokens, "window": 1}))

    assert ("set tokenization.block_tokens to batches.block_tokens (256)" in caplog.text) == is_warned


@pytest.mark.item("A18")
def test_each_sample_is_drawn_once_in_a_pass_on_average(tmp_path):
    """The counts of three passes are those of independent draws, although a step sees only a few of the parts."""
    shards = open_shards(write_shards(tmp_path, {"one": 4000}, ("de",), part_tokens=1000))
    table = shards.pairs["en-de"][0]
    draws_per_step, passes = 20, 3
    window = MovingWindow([table], [table.row_counts], np.array([draws_per_step]), 1, 1, Pairs.of_part)
    counts = dict.fromkeys(table.read_pairs().sentence_ids.tolist(), 0)
    for step in range(passes * len(table) // draws_per_step):
        current = window.move_to(step)
        rows = (make_rng("draws", step).random(draws_per_step) * current.row_counts[0]).astype(np.int64)
        parts, rows_in_parts = current.locate(np.zeros(draws_per_step, np.int64), rows)
        for pairs, row in zip(parts, rows_in_parts, strict=True):
            counts[int(pairs.sentence_ids[row])] += 1

    observed = np.array(list(counts.values()))
    assert table.part_count > 20
    assert observed.mean() == pytest.approx(passes)
    # At the start, the first parts are already leaving the window, so that some samples are drawn a little less often.
    assert observed.var() == pytest.approx(passes, rel=0.2)
    assert (observed == 0).mean() == pytest.approx(np.exp(-passes), abs=0.02)
