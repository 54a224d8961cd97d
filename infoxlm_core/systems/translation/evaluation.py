"""A translator's scores: BLEU on held-out pairs in both directions, and chrF for the gate.

scores.json contains every sentence and its translation, so that translators can be compared on the same sentences:

    {"model": NAME, "pivot": "en", "test_set": DIGEST, "curve": {"en-fr": [[100, 3.2], …]},
     "directions": {"en-fr": {"bleu": 21.3, "signature": "nrefs:1|…", "sources": […], "references": […],
                              "translations": […]}}}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from sacrebleu.metrics import CHRF

from infoxlm_core import manifests
from infoxlm_core.corpora import tables
from infoxlm_core.errors import InputError
from infoxlm_core.systems.translation.config import TRANSLATION_METRIC
from infoxlm_core.systems.translation.decoding import TextTranslator, compute_bleu
from infoxlm_core.tasks.questions import tabulate_outcomes
from infoxlm_core.training.finetuning.best_checkpoints import read_dev_scores

METRIC = "translation/bleu"


@dataclass(frozen=True)
class TranslatedText:
    """Sentences with references and translations, and the BLEU score of the translations."""

    bleu: float
    signature: str
    sources: list[str]
    references: list[str]
    translations: list[str]


@dataclass(frozen=True)
class HeldOutPairs:
    """Aligned held-out sentences in two languages."""

    texts: Mapping[str, list[str]]  # language -> sentences

    @classmethod
    def read(cls, corpus: Path, pair: tuple[str, str]) -> "HeldOutPairs":
        """Read a prepared corpus's held-out pairs for two languages. Raise InputError if there are none."""
        first, second = pair
        texts: dict[str, list[str]] = {first: [], second: []}
        for source, target in ((first, second), (second, first)):  # the corpus stores pairs in only one direction
            for path in sorted((corpus / "held_out" / f"{source}-{target}").glob("*.parquet")):
                with tables.translate_arrow_errors(path, "prepare the text again"):
                    for source_text, target_text in tables.read_text_columns(path, ("source", "target")):
                        texts[source].append(source_text or "")
                        texts[target].append(target_text or "")
        if not all(texts.values()):
            raise InputError(f"{corpus}/held_out has no pairs of {' and '.join(pair)}: choose other languages")
        return cls(texts)

    def take(self, count: int) -> "HeldOutPairs":
        """Return the first pairs, which a training run uses for validation."""
        return HeldOutPairs({language: texts[:count] for language, texts in self.texts.items()})

    def skip(self, count: int) -> "HeldOutPairs":
        """Return the remaining pairs, which are used for evaluation. Raise InputError if there are none."""
        remaining = HeldOutPairs({language: texts[count:] for language, texts in self.texts.items()})
        if not all(remaining.texts.values()):
            raise InputError(f"the validation uses all held-out pairs: lower translation.validation_pairs ({count})")
        return remaining

    def translate(self, translator: TextTranslator) -> dict[str, TranslatedText]:
        """Translate the text of both languages. Return a mapping from direction, such as `en-fr`, to result."""
        results = {}
        for target, references in self.texts.items():
            source = translator.find_source_language(target)
            translations = translator.translate(self.texts[source], target)
            score, signature = compute_bleu(translations, references, target)
            results[f"{source}-{target}"] = TranslatedText(
                score, signature, self.texts[source], references, translations
            )
        return results


def name_metrics(scores: Mapping[str, Any]) -> dict[str, float]:
    """Return a translator's metrics: BLEU in percent by direction, mean BLEU, and the gate's metric."""
    bleu_by_direction = {direction: result["bleu"] for direction, result in scores["directions"].items()}
    metrics = {METRIC: sum(bleu_by_direction.values()) / len(bleu_by_direction)}
    metrics |= {f"{METRIC}/{direction}": score for direction, score in bleu_by_direction.items()}
    return metrics | {TRANSLATION_METRIC: scores["chrf"]}


def score_sentences(direction: str, result: TranslatedText) -> pd.DataFrame:
    """Return a table of outcomes with the chrF (0 to 1) of every sentence in one direction."""
    source, target = direction.split("-")
    metric = CHRF()
    questions = []
    chrf_scores = []
    texts = zip(result.sources, result.references, result.translations, strict=True)
    for row, (text, reference, translation) in enumerate(texts):
        # Both directions of a pair count as one question, because their scores are not independent.
        questions.append(manifests.digest([row, *sorted((text, reference))]))
        chrf_scores.append(metric.sentence_score(translation, [reference]).score / 100)
    return tabulate_outcomes("translation", target, questions, chrf_scores, direction=f"from_{source}")


def read_bleu_curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Read a training run's validation BLEU from its metrics: direction -> list of (step, BLEU)."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for scores in read_dev_scores(path):  # the "languages" of a translator are its directions, such as en-fr
        for direction, bleu in scores.languages.items():
            curves.setdefault(direction, []).append((scores.step, bleu))
    return curves
