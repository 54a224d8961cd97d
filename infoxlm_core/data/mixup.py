"""Mixup: join two translation pairs on both sides for contrast (InfoXLM, section 3.3).

With letters as tokens, mixup in mode 0 joins the pairs (ab, xyz) and (c, uv) from two corpora to

    query view  <s> a b </s> c </s>          key view  <s> x y z </s> u v </s>
"""

import numpy as np

from infoxlm_core.data.layouts import Sequences, add_special_tokens
from infoxlm_core.data.vocabulary import Vocabulary

# Bits of a mode: the arrangement of a joined pair.
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
    """Join each translation pair with its partner, and return the query and key views (InfoXLM, section 3.3).

    Args:
        first: both sides of N pairs, c1 and c2 in the paper.
        second: both sides of the N partners, d1 and d2 in the paper.
        modes: sum of the changes to each pair (N,), 0…7: `REVERSE_SOURCE`, `REVERSE_TARGET`, `EXCHANGE_SIDES`.
        is_crossed: mask of the pairs (N,) for which d1 and d2 are first exchanged, so that each view mixes languages.
        is_joined: mask of the pairs (N,) that receive a partner. Otherwise, only `EXCHANGE_SIDES` has an effect.
        vocabulary: vocabulary with the special ids.
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
