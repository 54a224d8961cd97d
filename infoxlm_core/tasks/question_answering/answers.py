"""Scores of extracted answers: F1 and exact match as MLQA counts them in seven languages, and as SQuAD and XQuAD do.

Pure functions of strings; what a normaliser removes (case, punctuation, articles) no answer is blamed for.
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

METRICS = ("f1", "exact_match")

_ARTICLES = {  # whole words; Arabic writes its article as the first letters of the word, and MLQA removes it anywhere
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
    """Whether MLQA deletes it: a Unicode category P*, or punctuation of ASCII (which holds symbols such as `$`)."""
    return character in string.punctuation or unicodedata.category(character).startswith("P")


def normalise(text: str, language: str) -> str:
    """Lower case, no punctuation, no articles of the language, tokens parted by one space (MLQA, section 6).

    Chinese has no spaces: every ideograph is a token of its own.

    Raises:
        InputError: the language is none of MLQA's seven.
    """
    if language not in _ARTICLES:
        raise InputError(f"language {language!r} is not one of MLQA's ({', '.join(_ARTICLES)}): score it with SQuAD's")
    text = "".join(character for character in text.lower() if not is_punctuation(character))
    if articles := _ARTICLES[language]:
        text = re.sub(articles, " ", text)
    if language == "zh":
        text = _IDEOGRAPH.sub(r" \1 ", text)
    return " ".join(text.split())


def normalise_squad(text: str) -> str:
    """SQuAD v1.1's and XQuAD's, in every language: only ASCII punctuation and English articles go."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text).split())


def f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall of the tokens, as multisets, of two normalised strings: 0 to 1.

    No common token, so also two empty strings: 0.
    """
    found, wanted = prediction.split(), answer.split()
    common = (Counter(found) & Counter(wanted)).total()
    return 2 * common / (len(found) + len(wanted)) if common else 0.0


def cleaner(normaliser: Literal["mlqa", "squad"], language: str) -> Callable[[str], str]:
    """The normaliser of answers in a language; InputError if MLQA has none for it."""
    if normaliser == "squad":
        return normalise_squad
    normalise("", language)
    return partial(normalise, language=language)


def score(
    predictions: Mapping[str, str], answers: Mapping[str, Sequence[str]], clean: Callable[[str], str]
) -> dict[str, float]:
    """F1 and exact match from 0 to 1, the best over the gold answers of a question, then the mean over questions.

    Both mappings are by the id of a question; one that has no prediction scores 0.

    Raises:
        InputError: there is no question, or one without a gold answer.
    """
    if not answers or not all(answers.values()):
        raise InputError("no questions, or a question without a gold answer: nothing to score")
    found: dict[str, list[float]] = {name: [] for name in METRICS}
    for question, gold in answers.items():
        given = clean(predictions[question]) if question in predictions else None
        golds = [clean(answer) for answer in gold]
        found["f1"].append(0.0 if given is None else max(f1(given, answer) for answer in golds))
        found["exact_match"].append(float(given in golds))
    return {name: fmean(values) for name, values in found.items()}
