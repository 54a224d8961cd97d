"""The systems InfoXLM came from, as learners of the same loop: XLM (CLM, MLM, TLM by turns) and BERT (MLM and NSP)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data import masking
from infoxlm_core.data.shards import Shards
from infoxlm_core.errors import ConfigError
from infoxlm_core.model.encoder import EncoderSize
from infoxlm_core.model.flops import must_do_flops
from infoxlm_core.model.objectives import clm_loss, mlm_loss, nsp_loss
from infoxlm_core.systems import baseline_files
from infoxlm_core.systems import baseline_models as models
from infoxlm_core.systems.baseline_samples import TextBatch, XLMSampler, languages_of, micro_batches
from infoxlm_core.systems.next_sentences import BERTSampler
from infoxlm_core.training import distributed
from infoxlm_core.training.learner import Learner, LossWeights, autocast, seed_dropout

LOSSES = {"mlm": mlm_loss, "tlm": mlm_loss, "clm": clm_loss}


def make(config: PretrainingConfig, shards: Shards) -> "Baseline":
    """The learner of a config whose system is xlm or bert.

    Raises:
        ConfigError: a size does not fit the system.
        and what the samplers and, with `model.start`, `baseline_files.size_of` and `load_into` raise.
    """
    starts_word = None
    if config.objectives.whole_words:
        starts_word = masking.word_starts(shards.directory / "tokenizer", shards.vocabulary_size)
    sampler = (XLMSampler if config.system == "xlm" else BERTSampler)(shards, config, starts_word)
    return Baseline(config, build(config, shards), sampler, languages_of(shards))


def build(config: PretrainingConfig, shards: Shards) -> models.XLM | models.BERT:
    """The network with random weights by the seed, or those of `model.start`, a model of the same system."""
    wanted, languages = config.model, languages_of(shards)
    xlm = config.system == "xlm"
    if xlm and wanted.start is None and wanted.ffn != 4 * wanted.hidden:
        raise ConfigError(f"model.ffn ({wanted.ffn}) must be 4 * model.hidden ({4 * wanted.hidden}) with system xlm")
    types = 2 if not xlm else len(languages) if len(languages) > 1 else 0
    size = EncoderSize.of(
        wanted, shards.vocabulary_size, positions=wanted.max_tokens, epsilon=models.EPSILON, types=types, first=0
    )
    if wanted.start:
        size = baseline_files.size_of(Path(wanted.start), shards)
        if config.longest > size.positions:
            raise ConfigError(
                f"sequences of {config.longest} tokens exceed the {size.positions} positions of {wanted.start}: "
                "lower batches.block_tokens and batches.side_tokens"
            )
    model = (models.XLM if xlm else models.BERT)(size, wanted.dropout)
    models.first_weights(model, config.seed)
    if wanted.start:
        baseline_files.load_into(model, Path(wanted.start))
    return model.to(distributed.device())


def export(learner: "Baseline", tokenizer: Path, directory: Path) -> None:
    """Write a directory that `XLMWithLMHeadModel` or `BertForPreTraining` loads."""
    causal = not learner.config.objectives.mlm and not learner.config.objectives.tlm
    baseline_files.export(learner.module, tokenizer, directory, learner.languages, causal)


class Baseline(Learner):
    """The learner: nothing but weights and Adam's moments is remembered between steps."""

    module: models.XLM | models.BERT

    def __init__(
        self,
        config: PretrainingConfig,
        model: models.XLM | models.BERT,
        sampler: XLMSampler | BERTSampler,
        languages: Sequence[str],
    ) -> None:
        self.config, self.module, self.sampler, self.languages = config, model, sampler, languages
        names = ("mlm", "tlm", "clm") if config.system == "xlm" else ("mlm", "nsp")
        weights = {name: getattr(config.objectives, name) for name in names}
        weights = {name: weight for name, weight in weights.items() if weight}
        self.weights = LossWeights(weights, config.objectives.weighting)
        self.device = distributed.device()

    def batches(self, step: int) -> Sequence[TextBatch]:
        """Virtual shard by virtual shard, so that dropout does not depend on which worker has which."""
        size = self.config.batches.micro_batch_size
        shards = distributed.my_share(self.config.batches.virtual_shards)
        batches = [b for shard in shards for b in micro_batches(self.sampler.draw(step, shard), size, step, shard)]
        return [replace(batch, flops=self._flops(batch)) for batch in batches]

    def _flops(self, batch: TextBatch) -> float:
        size = self.module.encoder.size
        sizes = {"d": size.hidden, "f": size.ffn, "T": size.layers, "V": size.vocabulary}
        return must_do_flops(batch.lengths, len(batch.rows), (), (), contrast_layer=0, K=0, **sizes)

    def losses(self, batch: TextBatch, scales: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        batch = batch.to(self.device)
        seed_dropout(self.config.seed, *batch.place)
        with autocast(self.device):
            logits, follows = self.module(batch)
        losses = {batch.objective: LOSSES[batch.objective](logits, batch.answers)}
        sums = {}
        if follows is not None:
            losses["nsp"] = nsp_loss(follows, batch.labels)
            sums["nsp_hits"] = (follows.detach().argmax(dim=1) == batch.labels).sum()
        losses = {name: loss for name, loss in losses.items() if name in self.weights.by_name}
        total = torch.stack([scales[name] * loss for name, loss in losses.items()]).sum()
        return total, {name: loss.detach() for name, loss in losses.items()} | sums

    def statistics(self, sums: Mapping[str, Any], counts: Mapping[str, float]) -> dict[str, float]:
        return {"nsp/accuracy": sums["nsp_hits"] / counts["nsp"]} if "nsp" in self.weights.by_name else {}
