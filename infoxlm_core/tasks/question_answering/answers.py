"""Score extracted answers by F1 and exact match, as MLQA does in its seven languages, or as SQuAD and XQuAD do.

Texts are normalised first, so that case, punctuation and articles do not matter.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Literal

from infoxlm_core.errors import InputError

_ARTICLES = {  # whole words; Arabic's article is a prefix, and MLQA removes its letters anywhere
    "ar": "ال",
    "de": r"\b(?:ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "en": r"\b(?:a|an|the)\b",
    "es": r"\b(?:un|una|unos|unas|el|la|los|las)\b",
    "hi": None,
    "vi": r"\b(?:của|là|cái|chiếc|những)\b",
    "zh": None,
}
_IDEOGRAPH = re.compile("([\u4e00-\u9fa5])")


def is_punctuation(character: str) -> bool:
    """Return whether MLQA deletes a character: Unicode categories P*, and ASCII punctuation, which includes `$`."""
    return character in string.punctuation or unicodedata.category(character).startswith("P")


def normalise(text: str, language: str) -> str:
    """Return a text in lower case without punctuation and articles of its language, as MLQA does (section 6).

    Every ideograph becomes a token, because Chinese has no spaces between words.

    Raises:
        InputError: the language is not one of MLQA's seven.
    """
    if language not in _ARTICLES:
        raise InputError(f"language {language!r} is not one of MLQA's ({', '.join(_ARTICLES)}). Set normaliser: squad.")
    text = "".join(character for character in text.lower() if not is_punctuation(character))
    articles = _ARTICLES[language]
    if articles:
        text = re.sub(articles, " ", text)
    if language == "zh":
        text = _IDEOGRAPH.sub(r" \1 ", text)
    return " ".join(text.split())


def normalise_squad(text: str) -> str:
    """Return a text without ASCII punctuation and English articles, as SQuAD v1.1 and XQuAD do in every language."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text).split())


def f1(prediction: str, answer: str) -> float:
    """Return the F1 of the tokens of two normalised strings, each counted as often as it occurs."""
    predicted_tokens = prediction.split()
    answer_tokens = answer.split()
    num_common = (Counter(predicted_tokens) & Counter(answer_tokens)).total()
    if num_common == 0:  # also if both strings are empty
        return 0.0
    return 2 * num_common / (len(predicted_tokens) + len(answer_tokens))


def choose_normaliser(normaliser: Literal["mlqa", "squad"], language: str) -> Callable[[str], str]:
    """Return the normaliser of answers in a language. Raise InputError if MLQA has none for it."""
    if normaliser == "squad":
        return normalise_squad
    normalise("", language)  # raises the error now, not when the first answer is scored
    return partial(normalise, language=language)


def score(
    predictions: Mapping[str, str], answers: Mapping[str, Sequence[str]], normaliser: Callable[[str], str]
) -> dict[str, float]:
    """Return F1 and exact match from 0 to 1: the best over the gold answers of a question, then the mean.

    Args:
        predictions: question id -> answer; a question without a prediction scores 0.
        answers: question id -> gold answers.
        normaliser: applied to predictions and gold answers before they are compared.

    Raises:
        InputError: there are no questions, or a question has no gold answer.
    """
    if not answers or not all(answers.values()):
        raise InputError("There are no questions, or a question has no gold answer. Nothing can be scored.")
    f1_scores = []
    exact_matches = []
    for question_id, gold_answers in answers.items():
        if question_id not in predictions:
            f1_scores.append(0.0)
            exact_matches.append(0.0)
            continue
        prediction = normaliser(predictions[question_id])
        normalised_answers = [normaliser(answer) for answer in gold_answers]
        f1_scores.append(max(f1(prediction, answer) for answer in normalised_answers))
        exact_matches.append(float(prediction in normalised_answers))
    return {"f1": fmean(f1_scores), "exact_match": fmean(exact_matches)}
