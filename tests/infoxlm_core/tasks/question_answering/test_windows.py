"""Windows of paragraphs: layouts that a tokenizer makes itself, and answers that survive the way to tokens and back."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from infoxlm_core.errors import InputError
from infoxlm_core.model.huggingface import tokenizers
from infoxlm_core.tasks.question_answering.answers import normalise_squad
from infoxlm_core.tasks.question_answering.windows import Windows, find_targets, make_windows, tokenise
from tests.toys.questions import SCRIPTS, write_bert_tokenizer, write_xlmr_tokenizer

pytestmark = pytest.mark.item("A21")
TEXTS = list(SCRIPTS.values())


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("tokenizers")
    # letters twice: once with the sentence, once alone, so that all of them are pieces
    letters = TEXTS + [" ".join(text) for text in TEXTS]
    return {
        "xlmr": tokenizers.load(write_xlmr_tokenizer(folder / "xlmr", TEXTS * 20, 300)),
        "letters": tokenizers.load(write_xlmr_tokenizer(folder / "letters", letters, 400, "char")),
        "bert": tokenizers.load(write_bert_tokenizer(folder / "bert", TEXTS)),
    }


def windows_of(tokenizer, question: str, paragraph: str, max_tokens=512, question_tokens=64, stride=8) -> Windows:
    return make_windows(tokenizer, [question], [paragraph], [0], max_tokens, question_tokens, stride)


def rows(windows: Windows) -> list[list[int]]:
    return [part.tolist() for part in np.split(windows.examples.ids, windows.examples.lengths.cumsum()[:-1])]


def answers_of(windows: Windows, paragraph: str, span: tuple[int, int]) -> list[str | None]:
    """Of each window the text of its targets, None if it has none."""
    found = []
    for number, (first, last) in enumerate(find_targets(windows, [span])):
        shift = windows.first_tokens[number] - windows.offsets[number]
        start, end = windows.paragraphs.starts[first + shift], windows.paragraphs.ends[last + shift]
        found.append(None if (first, last) == (0, 0) else paragraph[start:end])
    return found


@pytest.mark.parametrize("kind", ["xlmr", "bert"])
@pytest.mark.parametrize("language", SCRIPTS)
def test_windows_are_laid_out_as_the_tokenizer_does_it(made, kind, language):
    tokenizer, question, paragraph = made[kind], SCRIPTS["en"], SCRIPTS[language] * 3
    asked = len(tokenizer(question, add_special_tokens=False)["input_ids"])
    limit = asked + 4 + 20

    ours = windows_of(tokenizer, question, paragraph, limit, asked, 10)

    theirs = tokenizer(question, paragraph, truncation="only_second", max_length=limit, stride=10,
                       return_overflowing_tokens=True, return_token_type_ids=True)  # fmt: skip
    assert len(theirs["input_ids"]) > 1 and rows(ours) == theirs["input_ids"]
    if kind == "bert":
        assert ours.examples.types.tolist() == list(itertools.chain.from_iterable(theirs["token_type_ids"]))
        assert set(ours.examples.types) == {0, 1}
    else:
        assert not ours.examples.types.any()
        assert rows(ours)[0].count(2) == 3  # <s> question </s> </s> window </s>


def test_windows_overlap_by_the_stride_and_end_with_the_paragraph(made):
    # 7 tokens; [CLS] and two [SEP] and a question of 2 tokens leave room for 4
    windows = windows_of(made["bert"], "is", "a b e d i f g", max_tokens=9, question_tokens=2, stride=2)

    assert windows.first_tokens.tolist() == [0, 2, 4] and windows.token_counts.tolist() == [4, 4, 3]
    assert windows.offsets.tolist() == [4, 4, 4] and windows.examples.lengths.tolist() == [9, 9, 8]
    exact = windows_of(made["bert"], "is", "a b e d i f", max_tokens=9, question_tokens=2, stride=2)
    assert exact.first_tokens.tolist() == [0, 2] and exact.token_counts.tolist() == [4, 4]
    assert windows_of(made["bert"], "is", "a b e d", 9, 2, 2).token_counts.tolist() == [4]


def test_a_long_question_is_cut_and_a_short_one_leaves_its_room_to_the_paragraph(made):
    found = make_windows(made["bert"], ["a b e d i f g", "a", ""], ["n o p r s t u v w"], [0, 0, 0], 12, 3, 1)

    assert found.offsets[np.searchsorted(found.question_of, [0, 1, 2])].tolist() == [5, 3, 2]
    assert [found.token_counts[found.question_of == number].tolist() for number in range(3)] == [[6, 4], [8, 2], [9]]


def test_windows_that_would_not_move_on_are_refused(made):
    with pytest.raises(InputError, match=r"max_tokens \(13, .*question_tokens \(5\) \+ stride \(4\) \+ 4 special"):
        windows_of(made["xlmr"], "is", "a b c", max_tokens=13, question_tokens=5, stride=4)


def test_a_paragraph_of_nothing_that_a_tokenizer_knows_is_refused(made):
    with pytest.raises(InputError, match="question 'is': its paragraph has no token"):
        windows_of(made["bert"], "is", "\u200b")


def test_a_token_that_begins_with_a_space_does_not_own_the_space(made):
    paragraph = "  The old  bridge\u3000was built. "

    found = tokenise(made["xlmr"], [paragraph])

    texts = [paragraph[start:end] for start, end in zip(found.starts, found.ends, strict=True)]
    assert "".join(texts) == "Theoldbridgewasbuilt." and not any(text != text.strip() for text in texts)


@pytest.mark.parametrize(
    ("language", "answer"),
    [
        ("en", "1887"),
        ("en", "Mary's (Hill)"),
        ("de", "„schöne“ Turm"),
        ("ru", "Санкт-Петербург"),
        ("ar", "القاهرة"),
        ("hi", "क़ुतुब मीनार"),
        ("th", "ทำน้ำ"),
        ("th", "กรุงเทพมหานคร"),
        ("zh", "黑豹队"),
        ("zh", "½ 的人口"),
        ("zh", "北京"),
        ("ko", "24만 평방 킬로미터"),
    ],
)
def test_an_answer_of_whole_letters_is_found_again(made, language, answer):
    paragraph = SCRIPTS[language]
    start = paragraph.index(answer)

    windows = windows_of(made["letters"], "is", paragraph)

    assert answers_of(windows, paragraph, (start, start + len(answer))) == [answer]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", ["letters", "bert"])
def test_every_answer_of_every_script_survives_where_tokens_are_letters(made, kind, data):
    parts = data.draw(
        st.lists(st.sampled_from([*" ".join(TEXTS).split(), "  ", "\n", "\u3000"]), min_size=1, max_size=12)
    )
    paragraph = data.draw(st.sampled_from(["", " "])).join(parts)
    start = data.draw(st.integers(0, len(paragraph) - 1))
    end = data.draw(st.integers(start + 1, len(paragraph)))
    answer = paragraph[start:end].strip()
    assume(answer)
    start = paragraph.index(answer, start)
    end = start + len(answer)
    # a letter that is one with its marks (ö as o and ¨, क़) is not cut in two
    tokens = tokenise(made[kind], [paragraph])
    assume(not any(s < edge < e for s, e in zip(tokens.starts, tokens.ends, strict=True) for edge in (start, end)))

    (found,) = answers_of(windows_of(made[kind], "is", paragraph), paragraph, (start, end))

    assert found is not None and normalise_squad(found) == normalise_squad(answer)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_targets_are_the_fewest_tokens_that_hold_the_answer_in_each_window_that_has_all_of_it(made, data):
    paragraph = " ".join(data.draw(st.lists(st.sampled_from(" ".join(TEXTS).split()), min_size=3, max_size=20)))
    start = data.draw(st.integers(0, len(paragraph) - 1))
    end = data.draw(st.integers(start + 1, min(len(paragraph), start + 30)))
    answer = paragraph[start:end].strip()
    assume(answer)
    start = paragraph.index(answer, start)
    end = start + len(answer)
    windows = windows_of(made["xlmr"], "is", paragraph, max_tokens=40, question_tokens=6, stride=10)
    found = windows.paragraphs

    given_targets = find_targets(windows, [(start, end)])

    touching = [number for number, (s, e) in enumerate(zip(found.starts, found.ends, strict=True))
                if s < end and e > start and e > s]  # fmt: skip
    for number, (first, last) in enumerate(given_targets):
        begin = windows.first_tokens[number]
        window = range(begin, begin + windows.token_counts[number])
        if touching[0] in window and touching[-1] in window:
            shift = begin - windows.offsets[number]
            assert (first + shift, last + shift) == (touching[0], touching[-1])
        else:
            assert (first, last) == (0, 0)
    texts = answers_of(windows, paragraph, (start, end))
    assert all(text is None or answer in text for text in texts)


def test_an_answer_at_the_edge_is_in_the_windows_that_have_all_of_it(made):
    windows = windows_of(made["bert"], "is", "a b e d i f g", max_tokens=9, question_tokens=2, stride=2)

    # windows: abed, edif, ifg
    assert answers_of(windows, "a b e d i f g", (4, 7)) == ["e d", "e d", None]
    assert answers_of(windows, "a b e d i f g", (2, 5)) == ["b e", None, None]
    assert answers_of(windows, "a b e d i f g", (6, 13)) == [None, None, None]
    assert find_targets(windows, [(8, 9)]).tolist() == [[0, 0], [6, 6], [4, 4]]
