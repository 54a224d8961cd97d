"""Token shards are stored in parts."""

import numpy as np

from infoxlm_core.data.shards import make_blocks, open_shards
from tests.toys.pretraining import write_shards


def test_parts_contain_the_rows_of_a_table_and_end_where_blocks_end(tmp_path):
    single = open_shards(write_shards(tmp_path / "single", {"one": 400}, ("de",)))
    split = open_shards(write_shards(tmp_path / "split", {"one": 400}, ("de",), part_tokens=700))

    text = single.mono["de"][0].read_text()
    split_table = split.mono["de"][0]
    split_text = split_table.read_text()
    pairs = single.pairs["en-de"][0].read_pairs()
    split_pairs = split.pairs["en-de"][0].read_pairs()
    assert split_table.part_count > 3
    assert split_table.block_counts.sum() == len(make_blocks(text, 511)) == single.mono["de"][0].block_counts[0]
    assert max(len(split_table.read_part(number)["tokens"]) for number in range(split_table.part_count)) <= 700
    tables = [(text, split_text), (pairs.source, split_pairs.source), (pairs.target, split_pairs.target)]
    for expected, joined in tables:
        assert np.array_equal(joined.tokens, expected.tokens)
        assert np.array_equal(joined.offsets, expected.offsets)
    assert np.array_equal(split_pairs.sentence_ids, pairs.sentence_ids)
