"""Masking: the variants of XLM-R's release, XLM and BERT, and whole words (specification, section 3.1)."""

import json

import numpy as np
import pytest

from infoxlm_core.config import ObjectivesConfig
from infoxlm_core.data import masking
from infoxlm_core.data.sampling import generator
from infoxlm_core.data.vocabulary import Vocabulary
from infoxlm_core.errors import InputError

pytestmark = pytest.mark.item("A15")
VOCABULARY, LENGTH, COUNT = Vocabulary.xlm_r(50), 37, 4000
MASK = 49
MBERT = Vocabulary(begin=6, end=7, pad=0, unk=5, mask=8, special_ids=(0, 5, 6, 7, 8), size=50)  # gaps and pieces around


def sequences() -> tuple[np.ndarray, np.ndarray]:
    """Many times `<s> 9 9 … 9 </s>`."""
    flat = np.full((COUNT, LENGTH), 9)
    flat[:, 0], flat[:, -1] = 0, 2
    return flat.ravel(), np.full(COUNT, LENGTH)


def masked(variant: str, **more) -> tuple[np.ndarray, np.ndarray]:
    config = ObjectivesConfig(masking=variant, **more)
    return masking.mask(*sequences(), VOCABULARY, config, generator("masking", variant))


@pytest.mark.item("A15")
@pytest.mark.parametrize(
    ("variant", "candidates"), [("exact", 45), ("released", 46), ("xlm", 50), ("bert", 50)]
)  # fmt: skip
def test_fates_are_80_10_10_and_random_ids_come_from_where_the_variant_says(variant, candidates):
    seen, rows = masked(variant)

    original = sequences()[0]
    assert (np.delete(seen, rows) == np.delete(original, rows)).all()
    fates, plain, n = seen[rows], original[rows] == 9, len(rows)
    chance = 0.1 / candidates  # of a random id to be one certain id
    shares = {
        "mask": (0.8 + (variant != "exact") * chance, (fates == MASK).mean()),
        "keep": (0.1 + chance, (fates == original[rows])[plain].mean()),
    }
    for share, found in shares.values():
        assert found == pytest.approx(share, abs=3 * (share * (1 - share) / n) ** 0.5)
    ids = set(fates[plain & (fates != 9)]) - {MASK}
    lowest = 0 if variant in ("xlm", "bert") else 4
    assert ids == set(range(lowest, MASK)) - {9}


@pytest.mark.item("A15")
@pytest.mark.parametrize("variant", ["exact", "released"])
def test_masking_draws_the_exact_share_of_positions_specials_included(variant):
    _, rows = masked(variant)

    counts = np.bincount(rows // LENGTH, minlength=COUNT)
    assert set(counts) == {5, 6}  # 0.15 * 37 = 5.55
    assert counts.mean() == pytest.approx(5.55, abs=3 * 0.5 / COUNT**0.5)
    assert np.bincount(rows % LENGTH, minlength=LENGTH).min() > 0.8 * len(rows) / LENGTH


@pytest.mark.parametrize(("variant", "special"), [("exact", set()), ("released", {8})])
def test_random_ids_are_ordinary_ones_wherever_the_special_ids_lie(variant, special):
    flat = np.tile([6, *[9] * 35, 7], COUNT)
    everything = ObjectivesConfig(masking=variant, mask_ratio=1.0, mask_share=0.0, keep_share=0.0)

    seen, _ = masking.mask(flat, np.full(COUNT, 37), MBERT, everything, generator("ids"))

    assert set(seen) == set(range(50)) - set(MBERT.special_ids) | special
    always = everything.model_copy(update={"mask_share": 1.0})
    assert set(masking.mask(flat, np.full(COUNT, 37), MBERT, always, generator("ids"))[0]) == {8}
    bert, words = ObjectivesConfig(masking="bert", mask_ratio=1.0), ObjectivesConfig(mask_ratio=1.0, whole_words=True)
    assert set(flat[masking.mask(flat, np.full(COUNT, 37), MBERT, bert, generator("ids"))[1]]) == {9}
    all_rows = masking.mask(flat, np.full(COUNT, 37), MBERT, words, generator("ids"), np.zeros(50, bool))[1]
    assert len(all_rows) == len(flat)  # a special token is a word of its own, and so is the text between two


def test_only_the_release_puts_mask_tokens_where_a_random_one_belongs():
    nothing_masked = {"mask_share": 0.0, "keep_share": 0.0}

    assert (masked("exact", **nothing_masked)[0] != MASK).all()
    assert (masked("released", **nothing_masked)[0] == MASK).any()


def test_xlm_takes_each_position_but_the_first_with_the_ratio():
    _, rows = masked("xlm")

    by_position = np.bincount(rows % LENGTH, minlength=LENGTH) / COUNT
    assert by_position[0] == 0
    assert by_position[1:] == pytest.approx(np.full(LENGTH - 1, 0.15), abs=4 * (0.15 * 0.85 / COUNT) ** 0.5)
    counts = np.bincount(rows // LENGTH, minlength=COUNT)
    assert counts.var() == pytest.approx((LENGTH - 1) * 0.15 * 0.85, rel=0.1)  # binomial


@pytest.mark.item("A19")
def test_bert_rounds_the_count_and_masks_no_special_token():
    _, rows = masked("bert")

    assert set(np.bincount(rows // LENGTH)) == {6}  # 0.15 * 37 = 5.55, specials counted
    positions = np.bincount(rows % LENGTH, minlength=LENGTH)
    assert positions[0] == positions[-1] == 0 and (positions[1:-1] > 0).all()


def test_bert_masks_at_least_one_token_and_never_more_than_there_are():
    flat, lengths = np.array([0, 9, 2, 2, 0, 2]), np.array([4, 2, 0])

    _, rows = masking.mask(flat, lengths, VOCABULARY, ObjectivesConfig(masking="bert"), generator("few"))

    assert rows.tolist() == [1]


@pytest.mark.parametrize("variant", ["exact", "released", "xlm", "bert"])
def test_whole_word_masking_takes_all_pieces_of_a_word_or_none(variant):
    starts_word = np.zeros(VOCABULARY.size, bool)
    starts_word[20:30] = True
    words = [[20], [21, 30], [22, 31, 32], [23], [24, 33]]
    one = [0, *(piece for word in words for piece in word), 2]
    flat, lengths = np.array(one * COUNT), np.full(COUNT, len(one))
    config = ObjectivesConfig(masking=variant, whole_words=True, mask_ratio=0.3)

    _, rows = masking.mask(flat, lengths, VOCABULARY, config, generator("words"), starts_word)

    chosen = np.zeros(len(flat), bool)
    chosen[rows] = True
    of_word = np.repeat(range(7), [1, 1, 2, 3, 1, 2, 1])
    by_word = [chosen.reshape(COUNT, -1)[:, of_word == word] for word in range(7)]
    assert all((word.all(axis=1) == word.any(axis=1)).all() for word in by_word)
    shares = np.array([word[:, 0].mean() for word in by_word])
    if variant == "bert":
        assert shares[[0, 6]].max() == 0 and shares[1:6] == pytest.approx(np.full(5, 0.4), abs=0.03)  # 2 of 5 words
    else:
        first = 0.0 if variant == "xlm" else 0.3
        assert shares == pytest.approx(np.array([first] + 6 * [0.3]), abs=0.03)


def test_words_begin_at_the_pieces_with_a_space_mark(tmp_path):
    pieces = [["<s>", 0.0], ["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0], ["▁Hell", -1.0], ["o", -2.0], ["▁", -3.0]]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": pieces}}))

    assert np.flatnonzero(masking.word_starts(tmp_path, 8)).tolist() == [4, 6]


def test_pieces_of_wordpiece_continue_a_word_with_two_hashes(tmp_path):
    vocabulary = {"[PAD]": 0, "[unused1]": 1, "Hell": 2, "##o": 3, "new": 4}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordPiece", "vocab": vocabulary}}))

    assert np.flatnonzero(masking.word_starts(tmp_path, 8)).tolist() == [0, 1, 2, 4]


def test_whole_words_without_a_tokenizer_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"tokenizer.json: no such file: whole-word masking"):
        masking.word_starts(tmp_path, 8)
    with pytest.raises(InputError, match="whole-word masking needs the tokenizer"):
        masked("exact", whole_words=True)


@pytest.mark.item("A15")
@pytest.mark.parametrize("variant", ["exact", "released", "xlm", "bert"])
def test_the_same_key_gives_the_same_mask_and_another_key_another(variant):
    config = ObjectivesConfig(masking=variant)
    first, same, other = (
        masking.mask(*sequences(), VOCABULARY, config, generator("step", step))[0].tolist() for step in (5, 5, 6)
    )

    assert first == same != other
