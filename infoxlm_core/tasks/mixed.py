"""Two languages in one example: premise and hypothesis, paragraph and question. Section 6: within and across."""

from collections.abc import Mapping
from statistics import fmean


def within_and_across(cells: Mapping[tuple[str, str], float]) -> tuple[float, float]:
    """Means over languages: of the cell where both are this language; of those where only one is.

    Args:
        cells: (language of premise or paragraph, language of hypothesis or question) -> score; some may be missing.
    """
    languages = dict.fromkeys(first for first, second in cells if first == second)
    others = [
        [score for pair, score in cells.items() if language in pair and pair[0] != pair[1]] for language in languages
    ]
    within = fmean(cells[language, language] for language in languages)
    return within, fmean(fmean(scores) for scores in others if scores)
