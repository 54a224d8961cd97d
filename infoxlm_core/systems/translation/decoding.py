"""Greedy translation of sentences, and BLEU, which counts the n-grams that translations share with references."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from sacrebleu.metrics import BLEU as Metric

from infoxlm_core import languages
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
from infoxlm_core.systems.translation.samples import pack_sentences
from infoxlm_core.training.learner import autocast

logger = logging.getLogger(__name__)
BLEU = "valid/bleu"  # the metric that decides when training stops: the mean of both directions
SEGMENTERS = {"zh": "zh", "ja": "char", "km": "char", "lo": "char", "my": "char", "th": "char"}
"""sacreBLEU's tokenizers of languages that are written without spaces. Its word segmenters for them need other packages
or a download."""


def bleu(translations: Sequence[str], references: Sequence[str], language: str) -> float:
    """Return the corpus BLEU in percent, with 1- to 4-grams and without smoothing.

    Text is split at spaces, or by `SEGMENTERS` in languages that are written without spaces.

    Source: Papineni et al. 2002, as Moses' multi-bleu computes it with one reference.
    """
    tokenizer = SEGMENTERS.get(languages.two_letters(language), "none")
    metric = Metric(tokenize=tokenizer, smooth_method="none", force=True)
    return metric.corpus_score(list(translations), [list(references)]).score


def sacrebleu(translations: Sequence[str], references: Sequence[str], language: str) -> tuple[float, str]:
    """Return sacreBLEU, which is comparable between papers, and the signature of its settings."""
    metric = Metric(tokenize=SEGMENTERS.get(languages.two_letters(language)))
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
    device = model.bias.device
    translations: list[list[int]] = [[] for _ in sentences]
    shortest_first = np.argsort([len(sentence) for sentence in sentences], kind="stable")  # similar lengths together
    with evaluating(model):
        for start in range(0, len(sentences), batch_size):
            indices = shortest_first[start : start + batch_size]
            batch = pack_sentences([sentences[index] for index in indices], source).to(device)
            max_lengths = [generated_tokens(length, 1.5, 10) for length in batch.lengths]
            with torch.inference_mode(), autocast(device):
                batch_translations = model.generate(batch, target, max_lengths)
            for index, translation in zip(indices, batch_translations, strict=True):
                translations[index] = translation
    return translations


@dataclass(frozen=True)
class Validation:
    """Held-out pairs: sentence i of one language is the translation of sentence i of the other."""

    languages: tuple[str, str]
    language_numbers: tuple[int, int]
    ids: tuple[list[np.ndarray], list[np.ndarray]]  # token ids of both languages' sentences, without special tokens
    texts: tuple[list[str], list[str]]
    processor: sentencepiece.SentencePieceProcessor

    @classmethod
    def read(cls, config: TranslationConfig, shards: Shards, corpus: Path) -> "Validation":
        """Read and tokenize the first held-out pairs whose sides are short enough; InputError if there are no pairs."""
        first, second = config.languages
        all_languages = languages_of(shards)
        pairs = _read_held_out(corpus, first, second)
        if not pairs or not {first, second} <= set(all_languages):
            raise InputError(f"{corpus}/held_out has no pairs of {first} and {second}: choose other languages")
        model_file = shards.directory / "tokenizer" / tokenizers.MODEL
        if not model_file.is_file():
            raise InputError(f"{model_file}: no such file: set tokenization.model to a SentencePiece model")
        processor = sentencepiece.SentencePieceProcessor(str(model_file))
        first_texts = [first_text for first_text, _ in pairs]
        second_texts = [second_text for _, second_text in pairs]
        first_ids = encode(processor, first_texts)
        second_ids = encode(processor, second_texts)
        short_rows = []
        for row in range(len(pairs)):
            if max(len(first_ids[row]), len(second_ids[row])) <= config.side_tokens:
                short_rows.append(row)
        chosen_rows = short_rows[: config.validation_pairs]
        return cls(
            languages=config.languages,
            language_numbers=(all_languages.index(first), all_languages.index(second)),
            ids=([first_ids[row] for row in chosen_rows], [second_ids[row] for row in chosen_rows]),
            texts=([first_texts[row] for row in chosen_rows], [second_texts[row] for row in chosen_rows]),
            processor=processor,
        )

    def score(self, model: Translator) -> dict[str, float]:
        """Return the BLEU of both directions, and their mean."""
        scores = {}
        bleu_of_directions = []
        for source, target in ((0, 1), (1, 0)):
            translated_ids = translate(
                model, self.ids[source], self.language_numbers[source], self.language_numbers[target]
            )
            translations = [self.decode(ids) for ids in translated_ids]
            references = [self.normalize(text) for text in self.texts[target]]
            language = self.languages[target]
            direction = f"{self.languages[source]}-{language}"
            direction_bleu = bleu(translations, references, language)
            direction_sacrebleu, signature = sacrebleu(translations, references, language)
            bleu_of_directions.append(direction_bleu)
            scores[f"{BLEU}/{direction}"] = direction_bleu
            scores[f"valid/sacrebleu/{direction}"] = direction_sacrebleu
            logger.info("%s: BLEU %.2f, sacreBLEU %.2f (%s)", direction, direction_bleu, direction_sacrebleu, signature)
        return {BLEU: sum(bleu_of_directions) / 2} | scores

    def signatures(self) -> dict[str, str]:
        """Return sacreBLEU's signature for each target language."""
        return {language: sacrebleu(["text"], ["text"], language)[1] for language in self.languages}

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        shift = FIRST_PIECE - 3  # the SentencePiece model has no <pad>, so its ids are one lower
        mask_id = self.processor.get_piece_size() + shift
        pieces = [token_id - shift for token_id in ids if FIRST_PIECE <= token_id < mask_id]
        return self.processor.decode(pieces)

    def normalize(self, text: str) -> str:
        """Encode and decode a reference, since translations have SentencePiece's normal form of Unicode and spaces.

        Characters that the vocabulary lacks stay in the reference, so that they count as errors of the translation.
        """
        return self.processor.decode(self.processor.encode(text, out_type=str))


def _read_held_out(corpus: Path, first: str, second: str) -> list[tuple[str, str]]:
    """Return the held-out pairs of two languages of a prepared corpus, in this order of the languages."""
    pairs: list[tuple[str, str]] = []
    for name, columns in ((f"{first}-{second}", ("source", "target")), (f"{second}-{first}", ("target", "source"))):
        for path in sorted((corpus / "held_out" / name).glob("*.parquet")):
            with tables.reading(path, "prepare the text again"):
                for first_text, second_text in tables.read_text(path, columns):
                    pairs.append((first_text or "", second_text or ""))
    return pairs
