"""The answer is the best pair of start and end over all windows of a question."""

import itertools

import numpy as np
import pytest
import torch

from infoxlm_core.model.huggingface import tokenizers
from infoxlm_core.tasks.question_answering.spans import find_best_spans
from infoxlm_core.tasks.question_answering.windows import Windows, cut_into_windows
from tests.toys.questions import write_bert_tokenizer

LETTERS = "a b c d e f g h"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizers.load(write_bert_tokenizer(tmp_path_factory.mktemp("letters"), [LETTERS]))


def make_small_windows(tokenizer, questions: list[str], paragraphs: list[str], max_tokens: int) -> Windows:
    return cut_into_windows(tokenizer, questions, paragraphs, range(len(questions)), max_tokens, 2, 1)


def find_spans_by_brute_force(windows: Windows, logits: list[torch.Tensor], answer_tokens: int) -> list[list[int]]:
    candidates: dict[int, list[tuple[float, list[int]]]] = {}
    for number, question in enumerate(windows.question_indices):
        offset, first_token = windows.offsets[number], windows.first_tokens[number]
        for start, end in itertools.product(range(windows.token_counts[number]), repeat=2):
            if start <= end < start + answer_tokens:
                total = float(logits[number][offset + start, 0] + logits[number][offset + end, 1])
                first_character = int(windows.paragraphs.starts[first_token + start])
                last_character = int(windows.paragraphs.ends[first_token + end])
                candidates.setdefault(question, []).append((total, [first_character, last_character]))
    return [max(candidates[question])[1] for question in sorted(candidates)]


@pytest.mark.parametrize("answer_tokens", [1, 3, 30])
def test_the_answer_is_the_best_pair_of_all_windows(tokenizer, answer_tokens, monkeypatch):
    monkeypatch.setattr("infoxlm_core.tasks.question_answering.spans.CHUNK", 7)
    rng = np.random.default_rng(5)
    texts = [" ".join(rng.choice(LETTERS.split(), rng.integers(1, 25))) for _ in range(20)]
    windows = make_small_windows(tokenizer, ["a b"] * 20, texts, 10)
    logits = [torch.from_numpy(rng.normal(size=(length, 2))) for length in windows.examples.lengths]
    assert len(logits) > 40

    spans = find_best_spans(windows, logits, 100, answer_tokens)

    assert spans.tolist() == find_spans_by_brute_force(windows, logits, answer_tokens)


def test_an_answer_is_in_the_paragraph_and_not_too_long(tokenizer):
    windows = make_small_windows(tokenizer, ["a b"], ["c d e f g"], 20)
    logits = torch.zeros(len(windows.examples.ids), 2)
    assert windows.offsets.tolist() == [4]  # [CLS] a b [SEP] c d e f g [SEP]
    logits[[0, 1, 3, 9]] = 9.0  # tokens outside the paragraph
    logits[7, 0], logits[5, 1] = 3.0, 2.0  # f starts, d ends: not in this order
    logits[4, 0], logits[8, 1] = 2.0, 1.5  # c starts, g ends

    assert find_best_spans(windows, [logits], 20, 5).tolist() == [[6, 9]]  # f g: 3 + 1.5
    logits[7, 0] = 0.0
    assert find_best_spans(windows, [logits], 20, 5).tolist() == [[0, 3]]  # c d: 2 + 2
    logits[5, 1] = 0.0
    assert find_best_spans(windows, [logits], 20, 5).tolist() == [[0, 9]]  # the whole paragraph
    assert find_best_spans(windows, [logits], 20, 4).tolist() != [[0, 9]]


def test_the_sum_of_logits_decides_between_windows(tokenizer):
    windows = make_small_windows(tokenizer, ["a b", "a b"], ["c d e f g h", "h g"], 9)
    assert windows.question_indices.tolist() == [0, 0, 1]
    assert windows.first_tokens.tolist() == [0, 3, 6]
    logits = [torch.zeros(length, 2) for length in windows.examples.lengths]
    logits[0][4], logits[1][5], logits[2][5] = torch.tensor([[2.0, 2.0], [1.0, 3.5], [1.0, 1.0]])

    assert find_best_spans(windows, logits, 20, 30).tolist() == [[8, 9], [2, 3]]  # 1 + 3.5 is more than 2 + 2


def test_only_the_n_best_starts_and_ends_are_combined(tokenizer):
    windows = make_small_windows(tokenizer, ["a b"], ["c d e f g"], 20)
    logits = torch.zeros(len(windows.examples.ids), 2)
    logits[4:9, 0] = torch.tensor([1.0, 0.0, 0.0, 0.0, 5.0])
    logits[4:9, 1] = torch.tensor([6.0, 0.0, 0.0, 2.0, 1.0])

    assert find_best_spans(windows, [logits], 5, 9).tolist() == [[0, 1]]  # c: 1 + 6; g: 5 + 1
    assert find_best_spans(windows, [logits], 1, 9).tolist() == [[0, 0]]  # g starts, c ends: no answer
