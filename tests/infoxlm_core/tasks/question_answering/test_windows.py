"""Windows are laid out as the tokenizer does it, and answers are found again after conversion to tokens."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from infoxlm_core.errors import InputError
from infoxlm_core.model.huggingface import tokenizers
from infoxlm_core.tasks.question_answering.answers import normalise_squad
from infoxlm_core.tasks.question_answering.windows import Windows, cut_into_windows, find_targets, tokenise
from tests.toys.questions import SCRIPTS, write_bert_tokenizer, write_xlmr_tokenizer

pytestmark = pytest.mark.item("A21")
TEXTS = list(SCRIPTS.values())
WORDS = " ".join(TEXTS).split()


@pytest.fixture(scope="module")
def tokenizer_by_kind(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("tokenizers")
    # Each letter is in a sentence and alone, so that all letters become pieces.
    letters = TEXTS + [" ".join(text) for text in TEXTS]
    return {
        "xlmr": tokenizers.load(write_xlmr_tokenizer(folder / "xlmr", TEXTS * 20, 300)),
        "letters": tokenizers.load(write_xlmr_tokenizer(folder / "letters", letters, 400, "char")),
        "bert": tokenizers.load(write_bert_tokenizer(folder / "bert", TEXTS)),
    }


@pytest.fixture(scope="module")
def bert(tokenizer_by_kind):
    return tokenizer_by_kind["bert"]


@pytest.fixture(scope="module")
def xlmr(tokenizer_by_kind):
    return tokenizer_by_kind["xlmr"]


def make(tokenizer, question: str, paragraph: str, max_tokens=512, question_tokens=64, stride=8) -> Windows:
    return cut_into_windows(tokenizer, [question], [paragraph], [0], max_tokens, question_tokens, stride)


def split_ids(windows: Windows) -> list[list[int]]:
    return [ids.tolist() for ids in np.split(windows.examples.ids, windows.examples.lengths.cumsum()[:-1])]


def find_answers(windows: Windows, paragraph: str, span: tuple[int, int]) -> list[str | None]:
    """Return the text of the target tokens of each window, or None if it has no answer."""
    answers = []
    for number, (first, last) in enumerate(find_targets(windows, [span])):
        shift = windows.first_tokens[number] - windows.offsets[number]
        start = windows.paragraphs.starts[first + shift]
        end = windows.paragraphs.ends[last + shift]
        answers.append(None if (first, last) == (0, 0) else paragraph[start:end])
    return answers


def draw_answer(data: st.DataObject, paragraph: str, max_length: int) -> tuple[int, int]:
    """Draw start and end of a text in the paragraph that neither begins nor ends with a space."""
    start = data.draw(st.integers(0, len(paragraph) - 1))
    end = data.draw(st.integers(start + 1, min(len(paragraph), start + max_length)))
    answer = paragraph[start:end].strip()
    assume(answer)
    start = paragraph.index(answer, start)
    return start, start + len(answer)


@pytest.mark.parametrize("kind", ["xlmr", "bert"])
@pytest.mark.parametrize("language", SCRIPTS)
def test_windows_are_laid_out_as_the_tokenizer_does_it(tokenizer_by_kind, kind, language):
    tokenizer, question, paragraph = tokenizer_by_kind[kind], SCRIPTS["en"], SCRIPTS[language] * 3
    question_tokens = len(tokenizer(question, add_special_tokens=False)["input_ids"])
    max_tokens = question_tokens + 4 + 20

    windows = make(tokenizer, question, paragraph, max_tokens, question_tokens, 10)

    expected = tokenizer(question, paragraph, truncation="only_second", max_length=max_tokens, stride=10,
                         return_overflowing_tokens=True, return_token_type_ids=True)  # fmt: skip
    assert len(expected["input_ids"]) > 1
    assert split_ids(windows) == expected["input_ids"]
    if kind == "bert":
        assert windows.examples.types.tolist() == list(itertools.chain.from_iterable(expected["token_type_ids"]))
        assert set(windows.examples.types) == {0, 1}
    else:
        assert not windows.examples.types.any()
        assert split_ids(windows)[0].count(2) == 3  # <s> question </s> </s> window </s>


@pytest.mark.parametrize(
    ("paragraph", "first_tokens", "token_counts"),
    [("a b e d i f g", [0, 2, 4], [4, 4, 3]), ("a b e d i f", [0, 2], [4, 4]), ("a b e d", [0], [4])],
)
def test_windows_overlap_by_the_stride_and_end_with_the_paragraph(bert, paragraph, first_tokens, token_counts):
    # [CLS], two [SEP] and a question of 2 tokens leave room for 4 tokens.
    windows = make(bert, "is", paragraph, max_tokens=9, question_tokens=2, stride=2)

    assert windows.first_tokens.tolist() == first_tokens
    assert windows.token_counts.tolist() == token_counts
    assert set(windows.offsets) == {4}
    assert windows.examples.lengths.tolist() == [count + 5 for count in token_counts]


def test_long_questions_are_truncated_and_short_ones_leave_room_to_the_paragraph(bert):
    windows = cut_into_windows(bert, ["a b e d i f g", "a", ""], ["n o p r s t u v w"], [0, 0, 0], 12, 3, 1)

    assert windows.question_indices.tolist() == [0, 0, 1, 1, 2]
    assert windows.offsets.tolist() == [5, 5, 3, 3, 2]
    assert windows.token_counts.tolist() == [6, 4, 8, 2, 9]


def test_windows_without_room_for_new_tokens_are_refused(xlmr):
    with pytest.raises(InputError, match=r"max_tokens \(13, .*question_tokens \(5\) \+ stride \(4\) \+ 4 special"):
        make(xlmr, "is", "a b c", max_tokens=13, question_tokens=5, stride=4)


def test_a_paragraph_without_tokens_is_refused(bert):
    with pytest.raises(InputError, match="question 'is': its paragraph has no token"):
        make(bert, "is", "\u200b")


def test_tokens_do_not_contain_the_spaces_around_words(xlmr):
    paragraph = "  The old  bridge\u3000was built. "

    tokens = tokenise(xlmr, [paragraph])

    texts = [paragraph[start:end] for start, end in zip(tokens.starts, tokens.ends, strict=True)]
    assert "".join(texts) == "Theoldbridgewasbuilt."
    assert all(text == text.strip() for text in texts)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", ["letters", "bert"])
def test_answers_at_token_edges_are_found_again_in_any_script(tokenizer_by_kind, kind, data):
    parts = data.draw(st.lists(st.sampled_from([*WORDS, "  ", "\n", "\u3000"]), min_size=1, max_size=12))
    paragraph = data.draw(st.sampled_from(["", " "])).join(parts)
    start, end = draw_answer(data, paragraph, len(paragraph))
    # A letter and its marks (ö as o and ¨, क़) are one token, which no answer divides.
    tokens = tokenise(tokenizer_by_kind[kind], [paragraph])
    for edge in (start, end):
        assume(not ((tokens.starts < edge) & (edge < tokens.ends)).any())

    (answer,) = find_answers(make(tokenizer_by_kind[kind], "is", paragraph), paragraph, (start, end))

    assert answer is not None
    assert normalise_squad(answer) == normalise_squad(paragraph[start:end])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_targets_are_the_fewest_tokens_that_contain_the_answer(xlmr, data):
    paragraph = " ".join(data.draw(st.lists(st.sampled_from(WORDS), min_size=3, max_size=20)))
    start, end = draw_answer(data, paragraph, 30)
    windows = make(xlmr, "is", paragraph, max_tokens=40, question_tokens=6, stride=10)

    targets = find_targets(windows, [(start, end)])

    tokens = windows.paragraphs
    touches_answer = (tokens.starts < end) & (tokens.ends > start) & (tokens.ends > tokens.starts)
    first_token, last_token = np.flatnonzero(touches_answer)[[0, -1]]
    for number, target in enumerate(targets):
        window_start = windows.first_tokens[number]
        window_end = window_start + windows.token_counts[number]
        shift = windows.offsets[number] - window_start
        is_inside = window_start <= first_token and last_token < window_end
        expected = (first_token + shift, last_token + shift) if is_inside else (0, 0)
        assert tuple(target) == expected
    for text in find_answers(windows, paragraph, (start, end)):
        assert text is None or paragraph[start:end] in text


@pytest.mark.parametrize(
    ("span", "answers"),
    [
        ((4, 7), ["e d", "e d", None]),
        ((2, 5), ["b e", None, None]),
        ((6, 13), [None, None, None]),
        ((8, 9), [None, "i", "i"]),
    ],
)
def test_an_answer_is_in_each_window_that_contains_all_of_it(bert, span, answers):
    paragraph = "a b e d i f g"  # windows: abed, edif, ifg
    windows = make(bert, "is", paragraph, max_tokens=9, question_tokens=2, stride=2)

    assert find_answers(windows, paragraph, span) == answers
