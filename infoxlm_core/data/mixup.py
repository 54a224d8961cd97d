"""Mixup: join two translation pairs on both sides, so that contrast has to tell their order (InfoXLM, section 3.3).

With letters as tokens, mixup joins the pairs (ab, xyz) and (c, uv) of two corpora in mode 0 as

    query view  <s> a b </s> c </s>          key view  <s> x y z </s> u v </s>
"""

import numpy as np

from infoxlm_core.data.layouts import Sequences, add_special_tokens
from infoxlm_core.data.vocabulary import Vocabulary

# Bits of a mode, which say how a joined pair is arranged.
REVERSE_SOURCE = 1
REVERSE_TARGET = 2
EXCHANGE_SIDES = 4


def mix(
    first: tuple[Sequences, Sequences],
    second: tuple[Sequences, Sequences],
    modes: np.ndarray,
    is_crossed: np.ndarray,
    is_joined: np.ndarray,
    vocabulary: Vocabulary,
) -> tuple[Sequences, Sequences]:
    """Return the query and key views of translation pairs after mixup (InfoXLM, section 3.3).

    Args:
        first: both sides of N pairs, c1 and c2 in the paper.
        second: both sides of the N pairs to join with them, d1 and d2 in the paper.
        modes: (N,) in 0…7, the sum of the changes to apply: `REVERSE_SOURCE`, `REVERSE_TARGET`, `EXCHANGE_SIDES`.
        is_crossed: (N,) whether d1 and d2 are exchanged first, so that each view mixes languages.
        is_joined: (N,) whether the second pair is used; without it only `EXCHANGE_SIDES` has an effect.
        vocabulary: ids of the special tokens.
    """
    query_segments = []
    key_segments = []
    pairs = zip(first[0].rows, first[1].rows, second[0].rows, second[1].rows, strict=True)
    decisions = zip(modes.tolist(), is_crossed.tolist(), is_joined.tolist(), strict=True)
    for (c1, c2, d1, d2), (mode, crosses, joins) in zip(pairs, decisions, strict=True):
        if crosses:
            d1, d2 = d2, d1
        source = [c1]
        target = [c2]
        if joins:
            source.append(d1)
            target.append(d2)
        if mode & REVERSE_SOURCE:
            source.reverse()
        if mode & REVERSE_TARGET:
            target.reverse()
        if mode & EXCHANGE_SIDES:
            source, target = target, source
        query_segments.append(source)
        key_segments.append(target)
    return add_special_tokens(query_segments, vocabulary), add_special_tokens(key_segments, vocabulary)
