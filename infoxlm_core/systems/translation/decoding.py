"""Greedy translation of sentences, and BLEU, which counts the n-grams that translation and reference share."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from sacrebleu.metrics import BLEU as Metric

from infoxlm_core.corpora import tables
from infoxlm_core.data.encoding import encode
from infoxlm_core.data.shards import Shards
from infoxlm_core.data.vocabulary import FIRST_PIECE
from infoxlm_core.errors import InputError
from infoxlm_core.model.encoder import evaluating
from infoxlm_core.model.huggingface import tokenizers
from infoxlm_core.systems.text_batches import languages_of
from infoxlm_core.systems.translation.config import TranslationConfig, generated_tokens
from infoxlm_core.systems.translation.model import Translator
from infoxlm_core.systems.translation.samples import side
from infoxlm_core.training.learner import autocast

logger = logging.getLogger(__name__)
BLEU = "valid/bleu"  # the metric that decides when training stops: the mean of both directions


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """Return the corpus BLEU in percent, of text split at spaces, with 1- to 4-grams and without smoothing.

    Source: Papineni et al. 2002, as Moses' multi-bleu computes it with one reference.
    """
    metric = Metric(tokenize="none", smooth_method="none", force=True)
    return metric.corpus_score(list(translations), [list(references)]).score


def standard_bleu(translations: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Return sacreBLEU's default BLEU, which is comparable between papers, and the signature of its settings."""
    metric = Metric()
    score = metric.corpus_score(list(translations), [list(references)]).score
    return score, str(metric.get_signature())


def translate(
    model: Translator, sentences: Sequence[np.ndarray], source: int, target: int, batch_size: int = 32
) -> list[list[int]]:
    """Return greedy translations of sentences, in their order, as token ids without special tokens.

    Args:
        model: the translator.
        sentences: token ids without special tokens.
        source: number of the sentences' language.
        target: number of the translations' language.
        batch_size: number of sentences that are translated together.
    """
    order = np.argsort([len(words) for words in sentences], kind="stable")
    translations: list[list[int]] = [[] for _ in sentences]
    device = model.bias.device
    with evaluating(model):
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            batch = side([sentences[i] for i in chosen], source).to(device)
            limits = [generated_tokens(length, 1.5, 10) for length in batch.lengths]
            with torch.inference_mode(), autocast(device):
                for i, words in zip(chosen, model.generate(batch, target, limits), strict=True):
                    translations[i] = words
    return translations


@dataclass(frozen=True)
class Validation:
    """Held-out pairs: sentence i of one language is the translation of sentence i of the other."""

    languages: tuple[str, str]
    numbers: tuple[int, int]
    ids: tuple[list[np.ndarray], list[np.ndarray]]
    texts: tuple[list[str], list[str]]
    processor: sentencepiece.SentencePieceProcessor

    @classmethod
    def read(cls, config: TranslationConfig, shards: Shards, corpus: Path) -> "Validation":
        """Read and tokenize the first held-out pairs; InputError if there are none."""
        first, second = config.languages
        rows: list[tuple[str, str]] = []
        for name, columns in ((f"{first}-{second}", ("source", "target")), (f"{second}-{first}", ("target", "source"))):
            for path in sorted((corpus / "held_out" / name).glob("*.parquet")):
                with tables.reading(path, "prepare the text again"):
                    rows += ((first or "", second or "") for first, second in tables.read_text(path, columns))
        processor = sentencepiece.SentencePieceProcessor(str(shards.directory / "tokenizer" / tokenizers.MODEL))
        names = languages_of(shards)
        if not rows or not {first, second} <= set(names):
            raise InputError(f"{corpus}/held_out has no pairs of {first} and {second}: set languages to two it has")
        texts = [row[0] for row in rows], [row[1] for row in rows]
        ids = [encode(processor, column) for column in texts]
        short = [i for i in range(len(rows)) if max(len(ids[0][i]), len(ids[1][i])) <= config.side_tokens]
        short = short[: config.validation_pairs]
        return cls(
            config.languages,
            (names.index(first), names.index(second)),
            ([ids[0][i] for i in short], [ids[1][i] for i in short]),
            ([texts[0][i] for i in short], [texts[1][i] for i in short]),
            processor,
        )

    def score(self, model: Translator) -> dict[str, float]:
        """Return the BLEU of both directions, and their mean."""
        figures = {}
        for source, target in ((0, 1), (1, 0)):
            translations = translate(model, self.ids[source], self.numbers[source], self.numbers[target])
            texts = [self.text(words) for words in translations]
            name = f"{self.languages[source]}-{self.languages[target]}"
            figures[f"{BLEU}/{name}"] = bleu(texts, self.texts[target])
            standard, signature = standard_bleu(texts, self.texts[target])
            figures[f"valid/sacrebleu/{name}"] = standard
            logger.info("%s: BLEU %.2f, sacreBLEU %.2f (%s)", name, figures[f"{BLEU}/{name}"], standard, signature)
        return {BLEU: sum(figures[name] for name in figures if name.startswith(BLEU)) / 2} | figures

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        shift = FIRST_PIECE - 3  # the ids in the SentencePiece model are one lower
        last = self.processor.get_piece_size() + shift
        return self.processor.decode([i - shift for i in ids if FIRST_PIECE <= i < last])
