"""Measure the perplexity of a masked language model on held-out sentences, in the stage `evaluate`.

Perplexity is the exponential of the mean cross-entropy over masked tokens. Every masked token is replaced by `<mask>`.
The choice of masked tokens depends only on the seed and the tokens, so models with the same tokenizer get the same
questions. Perplexities of different tokenizers are not comparable.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from infoxlm_core.config import EvaluationConfig
from infoxlm_core.data.sampling import make_rng
from infoxlm_core.model.huggingface import tokenizers
from infoxlm_core.model.huggingface.any_encoder import has_language_model_head, load_encoder
from infoxlm_core.tasks.embedding import Features, encode, iterate_batches
from infoxlm_core.tasks.questions import Questions
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.tasks.task import Task
from infoxlm_core.training.learner import autocast

if TYPE_CHECKING:
    from infoxlm_core.model.huggingface.any_encoder import Model

MASK_RATIO = 0.15
MAX_LOSS = 700  # `math.exp` raises OverflowError above 709


class Perplexity(Task[EvaluationConfig]):
    """Perplexity of masked tokens in held-out sentences, for comparing models with the same tokenizer.

    This task is not available in suites.
    """

    name: ClassVar[str] = "perplexity"
    metrics: ClassVar[tuple[str, ...]] = ("perplexity",)
    unit: ClassVar[str] = "sentences"

    def measure_held_out(self, questions: Questions, model: Path, config: EvaluationConfig) -> Scores | None:
        """Measure the perplexity in each language. Return None if the model cannot predict masked tokens."""
        if not has_language_model_head(model) or tokenizers.load(model).mask_token_id is None:
            return None
        encoder, tokenizer = load_encoder(model)
        scores = {}
        for language, texts in questions.sentences.items():
            perplexity = compute_perplexity(
                encoder, tokenizer, texts, config.batch_size, config.max_tokens, config.seed, language
            )
            scores[language] = {"perplexity": perplexity}
        mean = fmean(language_scores["perplexity"] for language_scores in scores.values())
        counts = {language: len(texts) for language, texts in questions.sentences.items()}
        return Scores(self.name, scores, {"perplexity": mean}, counts, questions.digest)


def choose_masked_positions(num_tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Choose floor(0.15 n + u) of n tokens to mask, with u uniform in [0, 1), but at least one token."""
    num_masked = max(1, math.floor(MASK_RATIO * num_tokens + rng.random()))
    return np.sort(rng.permutation(num_tokens)[:num_masked])


@torch.inference_mode()
def compute_perplexity(
    model: "Model",
    tokenizer: Tokenizer,
    sentences: Sequence[str],
    batch_size: int,
    max_tokens: int,
    seed: int,
    language: str | None = None,
) -> float:
    """Compute a masked language model's perplexity on sentences. Return NaN if all sentences are empty.

    Each sentence is truncated to `max_tokens` and masked once. `seed` determines the choice of masked tokens, and
    `language` is for models with language embeddings.
    """
    features = encode(model, tokenizer, sentences, max_tokens)
    masked_sentences = _mask_sentences(tokenizer, features, seed)
    masked_features = [sentence.feature for sentence in masked_sentences]
    total_loss = 0.0
    num_masked = 0
    for indices, batch in iterate_batches(model, tokenizer, masked_features, batch_size, language):
        batch_sentences = [masked_sentences[index] for index in indices]
        # `rows` and `columns` are the coordinates of all masked tokens in the batch.
        masked_per_sentence = [len(sentence.positions) for sentence in batch_sentences]
        rows = torch.from_numpy(np.repeat(np.arange(len(indices)), masked_per_sentence))
        columns = torch.from_numpy(np.concatenate([sentence.positions for sentence in batch_sentences]))
        targets = torch.from_numpy(np.concatenate([sentence.targets for sentence in batch_sentences]))
        logits = _predict_positions(model, batch, rows.to(model.device), columns.to(model.device))
        total_loss += F.cross_entropy(logits.float(), targets.to(model.device), reduction="sum").item()
        num_masked += len(targets)
    if num_masked == 0:
        return math.nan
    mean_loss = total_loss / num_masked
    return math.exp(mean_loss) if mean_loss < MAX_LOSS else math.inf  # avoids an OverflowError


class _MaskedSentence(NamedTuple):
    """A sentence with M masked tokens."""

    feature: dict[str, list[int]]  # the model's inputs
    positions: np.ndarray  # (M,) positions of the masked tokens
    targets: np.ndarray  # (M,) original ids of the masked tokens


def _mask_sentences(tokenizer: Tokenizer, features: Features, seed: int) -> list[_MaskedSentence]:
    """Mask tokens of each sentence, but no special tokens. Drop sentences with special tokens only."""
    masked_sentences = []
    for sentence_index, feature in enumerate(features):
        ids = np.array(feature["input_ids"])
        is_special = np.array(tokenizer.get_special_tokens_mask(ids.tolist(), already_has_special_tokens=True))
        word_positions = np.flatnonzero(is_special == 0)
        if len(word_positions) == 0:
            continue
        rng = make_rng(seed, "perplexity", sentence_index)  # independent of the batches and the other sentences
        positions = word_positions[choose_masked_positions(len(word_positions), rng)]
        targets = ids[positions]
        ids[positions] = tokenizer.mask_token_id
        masked_sentences.append(_MaskedSentence(feature | {"input_ids": ids.tolist()}, positions, targets))
    return masked_sentences


def _predict_positions(model: "Model", batch: dict[str, Tensor], rows: Tensor, columns: Tensor) -> Tensor:
    """Return a masked language model's logits (M, V) at M positions of a batch, given by `rows` and `columns` (M,).

    Logits at all positions would need much more memory, because each position has a logit for every vocabulary entry.
    """

    def select_positions(_layer: torch.nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        hidden = inputs[0]  # (B, L, d)
        return (hidden[rows, columns],)  # (M, d)

    hook = model.get_output_embeddings().register_forward_pre_hook(select_positions)
    try:
        with autocast(model.device):
            return model(**batch).logits
    finally:
        hook.remove()
