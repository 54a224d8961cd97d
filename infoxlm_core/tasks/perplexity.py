"""Task of an evaluation: how well a masked language model fills gaps in held-out sentences, by language.

It is exp(cross-entropy / gaps). Every gap is a `<mask>`, and the gaps depend on seed and tokens alone: models that
share a tokenizer answer the same questions. Between different tokenizers perplexities cannot be compared.
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

from infoxlm_core.data.sampling import generator
from infoxlm_core.model.huggingface import tokenizers
from infoxlm_core.model.huggingface.any_encoder import has_language_model_head, load_encoder
from infoxlm_core.tasks import held_out
from infoxlm_core.tasks.embedding import batches, encode
from infoxlm_core.tasks.held_out import HeldOutConfig
from infoxlm_core.tasks.task import Scores, Task
from infoxlm_core.training.learner import autocast

if TYPE_CHECKING:
    from infoxlm_core.model.huggingface.any_encoder import Model

MASK_RATIO = 0.15


class Perplexity(Task[HeldOutConfig]):
    """Fill the gaps of held-out sentences of every language."""

    name: ClassVar[str] = "perplexity"
    settings = HeldOutConfig
    metrics: ClassVar[tuple[str, ...]] = ("perplexity",)
    unit: ClassVar[str] = "sentences"

    def suits(self, model: Path) -> bool:
        return has_language_model_head(model) and tokenizers.load(model).mask_token_id is not None

    def measure(self, settings: HeldOutConfig, model: Path, output: Path) -> Scores:  # noqa: ARG002 - no predictions
        asked = held_out.draw(Path(settings.data), settings)
        encoder, tokenizer = load_encoder(model)
        languages = {
            language: measure(encoder, tokenizer, texts, settings.batch_size, settings.max_tokens, settings.seed)
            for language, texts in asked.sentences.items()
        }
        counts = {language: len(texts) for language, texts in asked.sentences.items()}
        cells = {language: {"perplexity": value} for language, value in languages.items()}
        return Scores(self.name, cells, {"perplexity": fmean(languages.values())}, counts, asked.digest)


def choose_gaps(tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Positions to mask among `tokens` tokens: floor(0.15 n + u) of them, u uniform in [0, 1), but at least one."""
    count = max(1, math.floor(MASK_RATIO * tokens + rng.random()))
    return np.sort(rng.permutation(tokens)[:count])


@torch.inference_mode()
def measure(
    model: "Model", tokenizer: Tokenizer, sentences: Sequence[str], batch_size: int, max_tokens: int, seed: int
) -> float:
    """Perplexity of a masked language model on sentences; each is masked once. NaN if no sentence has a token."""
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
    for chosen, batch in batches(tokenizer, features, batch_size):
        rows = torch.tensor([row for row, i in enumerate(chosen) for _ in gaps[i]])
        columns = torch.tensor(np.concatenate([gaps[i] for i in chosen]))
        answer = torch.tensor(np.concatenate([answers[i] for i in chosen]), device=model.device)
        logits = _predict_at(model, batch, rows.to(model.device), columns.to(model.device))  # (gaps, V)
        total += F.cross_entropy(logits.float(), answer, reduction="sum").item()
        targets += len(answer)
    return _exp(total / targets) if targets else math.nan


def _predict_at(model: "Model", batch: dict[str, Tensor], rows: Tensor, columns: Tensor) -> Tensor:
    """Logits at some positions only. V is large: at all positions they would take most of the time and memory."""
    output = model.get_output_embeddings()
    hook = output.register_forward_pre_hook(lambda _, inputs: (inputs[0][rows, columns],))  # (B, L, d) -> (gaps, d)
    try:
        with autocast(model.device):
            return model(**{name: values.to(model.device) for name, values in batch.items()}).logits
    finally:
        hook.remove()


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
