"""Parts of token shards."""

import numpy as np

from infoxlm_core.data.shards import make_blocks, open_shards
from tests.toys.pretraining import write_shards


def test_parts_hold_the_rows_of_a_table_and_end_where_blocks_end(tmp_path):
    single = open_shards(write_shards(tmp_path / "single", {"one": 400}, ("de",)))
    split = open_shards(write_shards(tmp_path / "split", {"one": 400}, ("de",), part_tokens=700))

    table, same_table = single.mono["de"][0], split.mono["de"][0]
    text, same_text = table.read_text(), same_table.read_text()
    blocks = make_blocks(text, 511)
    pairs, same_pairs = single.pairs["en-de"][0].read_pairs(), split.pairs["en-de"][0].read_pairs()
    assert len(same_table.row_counts) > 3 and same_table.block_counts.sum() == len(blocks) == table.block_counts[0]
    assert max(len(same_table.reader.read(name)["tokens"]) for name in same_table.part_names) <= 700
    for left, right in ((text, same_text), (pairs.source, same_pairs.source), (pairs.target, same_pairs.target)):
        assert np.array_equal(left.tokens, right.tokens) and np.array_equal(left.offsets, right.offsets)
    assert np.array_equal(pairs.sentence_ids, same_pairs.sentence_ids)
