"""Measure how well a masked language model fills gaps in held-out sentences, as a task of the stage `evaluate`.

Perplexity is the exponential of the mean cross-entropy of the gaps. Every gap is a `<mask>`. The gaps depend only on
seed and tokens, so models with the same tokenizer get the same questions. Perplexities of different tokenizers cannot
be compared.
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
from infoxlm_core.tasks.embedding import Features, batches, encode
from infoxlm_core.tasks.questions import Questions
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.tasks.task import Task
from infoxlm_core.training.learner import autocast

if TYPE_CHECKING:
    from infoxlm_core.model.huggingface.any_encoder import Model

MASK_RATIO = 0.15


class Perplexity(Task[EvaluationConfig]):
    """Perplexity of filling gaps in held-out sentences, which compares only models that share a tokenizer.

    Suites do not have this task.
    """

    name: ClassVar[str] = "perplexity"
    metrics: ClassVar[tuple[str, ...]] = ("perplexity",)
    unit: ClassVar[str] = "sentences"

    def measure_held_out(self, questions: Questions, model: Path, config: EvaluationConfig) -> Scores | None:
        """Return the perplexities by language, or None if the model cannot fill gaps."""
        if not has_language_model_head(model) or tokenizers.load(model).mask_token_id is None:
            return None
        encoder, tokenizer = load_encoder(model)
        scores = {}
        for language, texts in questions.sentences.items():
            perplexity = measure(encoder, tokenizer, texts, config.batch_size, config.max_tokens, config.seed, language)
            scores[language] = {"perplexity": perplexity}
        mean = fmean(language_scores["perplexity"] for language_scores in scores.values())
        counts = {language: len(texts) for language, texts in questions.sentences.items()}
        return Scores(self.name, scores, {"perplexity": mean}, counts, questions.digest)


def choose_gaps(num_tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Choose which of n tokens to mask: floor(0.15 n + u) of them with u uniform in [0, 1), but at least one."""
    num_gaps = max(1, math.floor(MASK_RATIO * num_tokens + rng.random()))
    return np.sort(rng.permutation(num_tokens)[:num_gaps])


@torch.inference_mode()
def measure(
    model: "Model",
    tokenizer: Tokenizer,
    sentences: Sequence[str],
    batch_size: int,
    max_tokens: int,
    seed: int,
    language: str | None = None,
) -> float:
    """Return the perplexity of a masked language model on sentences, each masked once, or NaN if none has a token.

    `language` is that of the sentences, for models with language embeddings.
    """
    features = encode(model, tokenizer, sentences, max_tokens)
    masked_sentences = _mask_sentences(tokenizer, features, seed)
    masked_features = [sentence.feature for sentence in masked_sentences]
    total_loss = 0.0
    num_gaps = 0
    for indices, batch in batches(model, tokenizer, masked_features, batch_size, language):
        sentences_of_batch = [masked_sentences[index] for index in indices]
        gaps_per_row = [len(sentence.positions) for sentence in sentences_of_batch]
        rows = torch.from_numpy(np.repeat(np.arange(len(indices)), gaps_per_row))  # (gaps of the batch,)
        columns = torch.from_numpy(np.concatenate([sentence.positions for sentence in sentences_of_batch]))
        targets = torch.from_numpy(np.concatenate([sentence.targets for sentence in sentences_of_batch]))
        logits = _predict_gaps(model, batch, rows.to(model.device), columns.to(model.device))  # (gaps, V)
        total_loss += F.cross_entropy(logits.float(), targets.to(model.device), reduction="sum").item()
        num_gaps += len(targets)
    if num_gaps == 0:
        return math.nan
    mean_loss = total_loss / num_gaps
    return math.exp(mean_loss) if mean_loss < 700 else math.inf  # math.exp raises an error above 709


class _MaskedSentence(NamedTuple):
    """The inputs of a sentence with gaps."""

    feature: dict[str, list[int]]
    positions: np.ndarray  # (gaps,)
    targets: np.ndarray  # (gaps,) ids of the masked tokens


def _mask_sentences(tokenizer: Tokenizer, features: Features, seed: int) -> list[_MaskedSentence]:
    """Mask each sentence that has a token besides the special ones, with gaps that depend on seed and position only."""
    masked_sentences = []
    for sentence_index, feature in enumerate(features):
        ids = np.array(feature["input_ids"])
        special_mask = tokenizer.get_special_tokens_mask(ids.tolist(), already_has_special_tokens=True)
        word_positions = np.flatnonzero(np.array(special_mask) == 0)
        if len(word_positions) == 0:
            continue
        rng = make_rng(seed, "perplexity", sentence_index)
        positions = word_positions[choose_gaps(len(word_positions), rng)]
        targets = ids[positions]
        ids[positions] = tokenizer.mask_token_id
        masked_sentences.append(_MaskedSentence(feature | {"input_ids": ids.tolist()}, positions, targets))
    return masked_sentences


def _predict_gaps(model: "Model", batch: dict[str, Tensor], rows: Tensor, columns: Tensor) -> Tensor:
    """Return the logits (gaps, V) at the masked positions only.

    The output layer is a matrix product with the vocabulary, so computing all positions would need much more memory.
    """
    output_layer = model.get_output_embeddings()
    # The hook selects the hidden states of the gaps: (B, L, d) -> (gaps, d).
    hook = output_layer.register_forward_pre_hook(lambda _, inputs: (inputs[0][rows, columns],))
    try:
        with autocast(model.device):
            return model(**batch).logits
    finally:
        hook.remove()
