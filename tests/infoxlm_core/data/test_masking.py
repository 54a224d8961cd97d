"""Masking: the variants of XLM-R's release, XLM and BERT, and whole words (specification, section 3.1)."""

import json
from pathlib import Path

import numpy as np
import pytest

from infoxlm_core.config import ObjectivesConfig
from infoxlm_core.data import masking
from infoxlm_core.data.sampling import make_rng
from infoxlm_core.data.vocabulary import Vocabulary
from infoxlm_core.errors import InputError

pytestmark = pytest.mark.item("A15")
LENGTH, COUNT = 37, 4000
MASK = 49
XLM_R = Vocabulary.xlm_r(50)
MBERT = Vocabulary(begin=6, end=7, pad=0, unk=5, mask=8, special_ids=(0, 5, 6, 7, 8), size=50)


def make_sequences(vocabulary: Vocabulary = XLM_R) -> tuple[np.ndarray, np.ndarray]:
    """Return 4000 times the sequence `<s> 9 9 … 9 </s>`, as ids and lengths."""
    ids = np.full((COUNT, LENGTH), 9)
    ids[:, 0], ids[:, -1] = vocabulary.begin, vocabulary.end
    return ids.ravel(), np.full(COUNT, LENGTH)


def mask(masking_variant: str, **settings) -> tuple[np.ndarray, np.ndarray]:
    """Return the masked ids and target indices of `make_sequences`."""
    config = ObjectivesConfig(masking=masking_variant, **settings)
    return masking.mask(*make_sequences(), XLM_R, config, make_rng("masking", masking_variant))


def mask_mbert(**settings) -> tuple[np.ndarray, np.ndarray]:
    """Return the masked ids and target indices of sequences with mBERT's special ids. All tokens are targets."""
    return masking.mask(
        *make_sequences(MBERT), MBERT, ObjectivesConfig(mask_ratio=1.0, **settings), make_rng("ids"),
        np.zeros(50, bool),
    )  # fmt: skip


@pytest.mark.parametrize(("variant", "candidates"), [("exact", 45), ("released", 46), ("xlm", 50), ("bert", 50)])
def test_80_10_and_10_percent_of_targets_become_mask_stay_or_become_random_ids(variant, candidates):
    masked_ids, targets = mask(variant)

    original_ids, _ = make_sequences()
    assert np.array_equal(np.delete(masked_ids, targets), np.delete(original_ids, targets))
    probability_of_id = 0.1 / candidates  # that a target becomes a certain id at random
    mask_probability = 0.8 + (probability_of_id if variant != "exact" else 0)
    keep_probability = 0.1 + probability_of_id
    is_word = original_ids[targets] == 9
    is_kept = masked_ids[targets][is_word] == 9
    assert (masked_ids[targets] == MASK).mean() == approx_share(mask_probability, len(targets))
    assert is_kept.mean() == approx_share(keep_probability, len(targets))
    random_ids = set(masked_ids[targets][is_word]) - {MASK, 9}
    lowest_id = 0 if variant in ("xlm", "bert") else 4
    assert random_ids == set(range(lowest_id, MASK)) - {9}


def approx_share(probability: float, draws: int):
    """Return a probability that an observed share equals within 3 standard deviations."""
    return pytest.approx(probability, abs=3 * (probability * (1 - probability) / draws) ** 0.5)


@pytest.mark.parametrize("variant", ["exact", "released"])
def test_targets_are_the_exact_share_of_all_tokens_special_tokens_included(variant):
    _, targets = mask(variant)

    counts = np.bincount(targets // LENGTH, minlength=COUNT)
    assert set(counts) == {5, 6}  # 0.15 * 37 = 5.55
    assert counts.mean() == pytest.approx(5.55, abs=3 * 0.5 / COUNT**0.5)
    assert np.bincount(targets % LENGTH, minlength=LENGTH).min() > 0.8 * len(targets) / LENGTH


@pytest.mark.parametrize(("variant", "drawn_special_ids"), [("exact", set()), ("released", {MBERT.mask})])
def test_random_ids_are_ordinary_wherever_a_vocabulary_has_its_special_ids(variant, drawn_special_ids):
    masked_ids, _ = mask_mbert(masking=variant, mask_share=0.0, keep_share=0.0)

    assert set(masked_ids) == set(range(50)) - set(MBERT.special_ids) | drawn_special_ids


def test_special_ids_are_those_of_the_vocabulary():
    masked_ids, _ = mask_mbert(mask_share=1.0, keep_share=0.0)
    _, targets_of_bert = mask_mbert(masking="bert")
    _, targets_of_words = mask_mbert(whole_words=True)

    assert set(masked_ids) == {MBERT.mask}
    assert set(make_sequences(MBERT)[0][targets_of_bert]) == {9}
    assert len(targets_of_words) == LENGTH * COUNT  # a special token is a word, and so is the text between two


def test_xlm_chooses_each_token_but_the_first_independently():
    _, targets = mask("xlm")

    by_position = np.bincount(targets % LENGTH, minlength=LENGTH) / COUNT
    assert by_position[0] == 0
    assert by_position[1:] == pytest.approx(np.full(LENGTH - 1, 0.15), abs=4 * (0.15 * 0.85 / COUNT) ** 0.5)
    counts = np.bincount(targets // LENGTH, minlength=COUNT)
    assert counts.var() == pytest.approx((LENGTH - 1) * 0.15 * 0.85, rel=0.1)  # binomial


@pytest.mark.item("A19")
def test_bert_rounds_the_number_of_targets_and_chooses_no_special_token():
    _, targets = mask("bert")

    assert set(np.bincount(targets // LENGTH)) == {6}  # 0.15 * 37 = 5.55, special tokens counted
    positions = np.bincount(targets % LENGTH, minlength=LENGTH)
    assert positions[0] == positions[-1] == 0
    assert (positions[1:-1] > 0).all()


def test_bert_chooses_at_least_one_token_if_there_is_one():
    ids, lengths = np.array([0, 9, 2, 2, 0, 2]), np.array([4, 2, 0])

    _, targets = masking.mask(ids, lengths, XLM_R, ObjectivesConfig(masking="bert"), make_rng("few"))

    assert targets.tolist() == [1]


@pytest.mark.parametrize("variant", ["exact", "released", "xlm", "bert"])
def test_whole_word_masking_chooses_all_pieces_of_a_word_or_none(variant):
    starts_word = np.zeros(XLM_R.size, bool)
    starts_word[20:30] = True
    sequence = [0, 20, 21, 30, 22, 31, 32, 23, 24, 33, 2]
    word_of_token = np.array([0, 1, 2, 2, 3, 3, 3, 4, 5, 5, 6])  # special tokens count as words
    config = ObjectivesConfig(masking=variant, whole_words=True, mask_ratio=0.3)

    _, targets = masking.mask(
        np.array(sequence * COUNT), np.full(COUNT, len(sequence)), XLM_R, config, make_rng("words"), starts_word
    )

    is_target = np.zeros((COUNT, len(sequence)), bool)
    is_target.flat[targets] = True
    shares = np.empty(7)
    for word in range(7):
        pieces = is_target[:, word_of_token == word]
        assert (pieces.all(axis=1) == pieces.any(axis=1)).all()
        shares[word] = pieces[:, 0].mean()
    expected_shares = {"bert": [0, *5 * [0.4], 0], "xlm": [0, *6 * [0.3]]}  # BERT: 2 of 5 words
    assert shares == pytest.approx(np.array(expected_shares.get(variant, 7 * [0.3])), abs=0.03)


@pytest.mark.parametrize(
    ("model", "ids_that_start_words"),
    [
        ({"vocab": [["<s>", 0.0], ["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0], ["▁Hell", -1.0], ["o", -2.0],
                    ["▁", -3.0]]}, [4, 6]),
        ({"vocab": {"[PAD]": 0, "[unused1]": 1, "Hell": 2, "##o": 3, "new": 4}, "continuing_subword_prefix": "##"},
         [0, 1, 2, 4]),
        ({"vocab": {"<s>": 0, "Hell": 1, "o": 2, "ĠHell": 3, "Ġ": 4, "▁new": 5}, "continuing_subword_prefix": ""},
         [3, 4, 5]),
    ],
    ids=["unigram", "WordPiece", "BPE"],
)  # fmt: skip
def test_words_start_at_pieces_with_a_space_mark_or_without_two_hashes(tmp_path, model, ids_that_start_words):
    write_tokenizer(tmp_path, model)

    assert np.flatnonzero(masking.find_word_starts(tmp_path, 8)).tolist() == ids_that_start_words


def write_tokenizer(directory: Path, model: dict) -> None:
    (directory / "tokenizer.json").write_text(json.dumps({"model": model}))


def test_whole_words_are_refused_if_a_tokenizer_marks_only_the_ends_of_words(tmp_path):
    write_tokenizer(tmp_path, {"vocab": {"<s>": 0, "Hell": 1, "o</w>": 2}, "end_of_word_suffix": "</w>"})

    with pytest.raises(InputError, match=r"tokenizer.json: no piece begins a word: set .*whole_words to false"):
        masking.find_word_starts(tmp_path, 3)


def test_whole_words_without_a_tokenizer_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"tokenizer.json: no such file: whole-word masking"):
        masking.find_word_starts(tmp_path, 8)
    with pytest.raises(InputError, match="whole-word masking needs the tokenizer"):
        mask("exact", whole_words=True)


@pytest.mark.parametrize("variant", ["exact", "released", "xlm", "bert"])
def test_the_mask_depends_only_on_its_key(variant):
    config = ObjectivesConfig(masking=variant)

    first, second, other = [
        masking.mask(*make_sequences(), XLM_R, config, make_rng("step", step))[0].tolist() for step in (5, 5, 6)
    ]

    assert first == second
    assert first != other
