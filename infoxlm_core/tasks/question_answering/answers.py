"""Score extracted answers by F1 and exact match, with the rules of MLQA (seven languages) or of SQuAD and XQuAD.

Answers are normalised first, so that case, punctuation and articles do not affect the scores.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal

from infoxlm_core.errors import InputError

Normaliser = Literal["mlqa", "squad"]
_ARTICLES = {  # patterns of whole words; the Arabic article is a prefix, but MLQA removes its letters anywhere
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
    """Return whether MLQA deletes a character: ASCII punctuation including `$`, and the Unicode categories P*."""
    return character in string.punctuation or unicodedata.category(character).startswith("P")


def normalise_mlqa(text: str, language: str) -> str:
    """Remove case, punctuation and articles from a text by MLQA's rules (section 6).

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
    """Remove case, ASCII punctuation and English articles by the rules of SQuAD v1.1 and XQuAD, in any language."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text).split())


def normalise(text: str, normaliser: Normaliser, language: str) -> str:
    """Normalise an answer for scoring. Raise InputError if the normaliser does not support the language."""
    if normaliser == "squad":
        return normalise_squad(text)
    return normalise_mlqa(text, language)


def check_language(normaliser: Normaliser, language: str) -> None:
    """Raise InputError if the normaliser does not support a language, before hours of training or inference."""
    normalise("", normaliser, language)


def token_f1(prediction: str, answer: str) -> float:
    """Return the token F1 of two normalised texts. Repeated tokens count repeatedly."""
    predicted_tokens = prediction.split()
    answer_tokens = answer.split()
    num_common = (Counter(predicted_tokens) & Counter(answer_tokens)).total()
    if num_common == 0:  # including two empty texts
        return 0.0
    return 2 * num_common / (len(predicted_tokens) + len(answer_tokens))


def score(
    predictions: Mapping[str, str], gold_answers: Mapping[str, Sequence[str]], normaliser: Normaliser, language: str
) -> dict[str, float]:
    """Return the mean F1 and exact match over questions. If a question has several gold answers, the best score counts.

    Args:
        predictions: mapping from question id to answer; a question without a prediction scores 0.
        gold_answers: mapping from question id to correct answers.
        normaliser: rules for normalising predictions and gold answers.
        language: language of the answers.

    Raises:
        InputError: there are no questions, or a question has no gold answer.
    """
    if not gold_answers or not all(gold_answers.values()):
        raise InputError("There are no questions, or a question has no gold answer. Nothing can be scored.")
    f1_scores = []
    exact_matches = []
    for question_id, answers in gold_answers.items():
        if question_id not in predictions:
            f1_scores.append(0.0)
            exact_matches.append(0.0)
            continue
        prediction = normalise(predictions[question_id], normaliser, language)
        normalised_answers = [normalise(answer, normaliser, language) for answer in answers]
        f1_scores.append(max(token_f1(prediction, answer) for answer in normalised_answers))
        exact_matches.append(float(prediction in normalised_answers))
    return {"f1": fmean(f1_scores), "exact_match": fmean(exact_matches)}
