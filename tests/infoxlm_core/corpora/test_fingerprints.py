"""Keys of texts: which two texts count as equal, as near, as the very same."""

from infoxlm_core.corpora.fingerprints import keys, runs


def test_case_and_width_make_another_text_but_not_another_to_compare():
    plain, shouted, other = (keys([text]) for text in ("Open the file", "OPEN THE FILE", "Close the window"))

    assert plain.equal == shouted.equal and plain.near == shouted.near
    assert plain.exact != shouted.exact
    assert all(set(one).isdisjoint(another) for one, another in zip(plain, other, strict=True))


def test_a_side_of_a_pair_has_the_keys_of_its_text_alone():
    pair = keys(["Open the file", "Öffne die Datei"])

    assert [tuple(map(list, pair.of(side))) for side in (0, 1)] == [
        tuple(map(list, keys([text]))) for text in ("Open the file", "Öffne die Datei")
    ]


def test_texts_that_share_some_words_in_a_row_share_a_run_whatever_stands_between_and_around():
    words = "one two three four five"

    assert not set(runs(f"Now {words.upper()}!", 5)).isdisjoint(runs("one, two — three four “five” six", 5))
    assert set(runs(words, 5)).isdisjoint(runs("one two three four six", 5))
    assert not set(runs("我们明天早上坐火车去", 5)).isdisjoint(
        runs("他说：明天早上坐 train", 5)
    )  # a sign is a word there
    assert runs("one two three four", 5) == runs(words, 0) == []
