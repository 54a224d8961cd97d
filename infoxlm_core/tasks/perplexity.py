"""Task of an evaluation: how well a masked language model fills gaps in held-out sentences, by language.

Perplexity is exp(cross-entropy / gaps). Every gap is a `<mask>`. The gaps depend only on seed and tokens, so models
with the same tokenizer get the same questions. Perplexities of different tokenizers cannot be compared.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from infoxlm_core.config import EvaluationConfig
from infoxlm_core.data.sampling import generator
from infoxlm_core.model.huggingface import tokenizers
from infoxlm_core.model.huggingface.any_encoder import has_language_model_head, load_encoder
from infoxlm_core.tasks.embedding import batches, encode
from infoxlm_core.tasks.questions import Questions
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.tasks.task import Task
from infoxlm_core.training.learner import autocast

if TYPE_CHECKING:
    from infoxlm_core.model.huggingface.any_encoder import Model

MASK_RATIO = 0.15


class Perplexity(Task[EvaluationConfig]):
    """Perplexity of filling gaps in held-out sentences; it compares only models that share a tokenizer.

    No suite has this task.
    """

    name: ClassVar[str] = "perplexity"
    metrics: ClassVar[tuple[str, ...]] = ("perplexity",)
    unit: ClassVar[str] = "sentences"

    def measure_held_out(self, questions: Questions, model: Path, config: EvaluationConfig) -> Scores | None:
        if not has_language_model_head(model) or tokenizers.load(model).mask_token_id is None:
            return None
        encoder, tokenizer = load_encoder(model)
        perplexities = {
            language: measure(encoder, tokenizer, texts, config.batch_size, config.max_tokens, config.seed, language)
            for language, texts in questions.sentences.items()
        }
        counts = {language: len(texts) for language, texts in questions.sentences.items()}
        rows = {language: {"perplexity": value} for language, value in perplexities.items()}
        return Scores(self.name, rows, {"perplexity": fmean(perplexities.values())}, counts, questions.digest)


def choose_gaps(tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Choose positions to mask among `tokens`: floor(0.15 n + u) of them, u uniform in [0, 1), but at least one."""
    count = max(1, math.floor(MASK_RATIO * tokens + rng.random()))
    return np.sort(rng.permutation(tokens)[:count])


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
    """Return the perplexity of a masked language model on sentences, each masked once; NaN if none has a token.

    `language` is that of the sentences, for models with language embeddings.
    """
    features, gaps, answers = [], [], []
    for number, feature in enumerate(encode(model, tokenizer, sentences, max_tokens)):
        ids = np.array(feature["input_ids"])
        special = tokenizer.get_special_tokens_mask(ids.tolist(), already_has_special_tokens=True)
        words = np.flatnonzero(np.array(special) == 0)
        if len(words):
            gap = words[choose_gaps(len(words), generator(seed, "perplexity", number))]
            answers.append(ids[gap])
            gaps.append(gap)
            ids[gap] = tokenizer.mask_token_id
            features.append(feature | {"input_ids": ids.tolist()})

    total, targets = 0.0, 0
    for numbers, batch in batches(model, tokenizer, features, batch_size, language):
        rows = torch.tensor([row for row, i in enumerate(numbers) for _ in gaps[i]])
        columns = torch.tensor(np.concatenate([gaps[i] for i in numbers]))
        answer = torch.tensor(np.concatenate([answers[i] for i in numbers]), device=model.device)
        logits = _predict_at(model, batch, rows.to(model.device), columns.to(model.device))  # (gaps, V)
        total += F.cross_entropy(logits.float(), answer, reduction="sum").item()
        targets += len(answer)
    return _exp(total / targets) if targets else math.nan


def _predict_at(model: "Model", batch: dict[str, Tensor], rows: Tensor, columns: Tensor) -> Tensor:
    """Return the logits at some positions only, because V is large: all positions would need much time and memory."""
    output = model.get_output_embeddings()
    hook = output.register_forward_pre_hook(lambda _, inputs: (inputs[0][rows, columns],))  # (B, L, d) -> (gaps, d)
    try:
        with autocast(model.device):
            return model(**batch).logits
    finally:
        hook.remove()


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
