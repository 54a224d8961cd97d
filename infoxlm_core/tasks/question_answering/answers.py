"""Score extracted answers by F1 and exact match, as MLQA does in its seven languages, or as SQuAD and XQuAD do.

Texts are normalised first, so that case, punctuation and articles do not matter.
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


def normalise_mlqa(text: str, language: str) -> str:
    """Remove case, punctuation and the articles of a language from a text, as MLQA does (section 6).

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
    """Remove case, ASCII punctuation and English articles from a text, as SQuAD v1.1 and XQuAD do in every language."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text).split())


def normalise(text: str, normaliser: Normaliser, language: str) -> str:
    """Remove from an answer what does not matter for its score. Raise InputError if MLQA lacks the language."""
    if normaliser == "squad":
        return normalise_squad(text)
    return normalise_mlqa(text, language)


def check_language(normaliser: Normaliser, language: str) -> None:
    """Raise InputError if the normaliser cannot handle a language, before hours of training or inference."""
    normalise("", normaliser, language)


def token_f1(prediction: str, answer: str) -> float:
    """Return the F1 of the tokens of two normalised texts, each counted as often as it occurs."""
    predicted_tokens = prediction.split()
    answer_tokens = answer.split()
    num_common = (Counter(predicted_tokens) & Counter(answer_tokens)).total()
    if num_common == 0:  # also if both texts are empty
        return 0.0
    return 2 * num_common / (len(predicted_tokens) + len(answer_tokens))


def score(
    predictions: Mapping[str, str], gold_answers: Mapping[str, Sequence[str]], normaliser: Normaliser, language: str
) -> dict[str, float]:
    """Return the mean F1 and exact match of the questions. Of several gold answers, the best one counts.

    Args:
        predictions: question id -> answer; a question without a prediction scores 0.
        gold_answers: question id -> correct answers.
        normaliser: how predictions and gold answers are normalised before they are compared.
        language: of the answers.

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
