"""Stage translate: an XLM encoder and text in two languages -> a model that translates in both directions.

The model learns to restore noisy sentences (denoising), to restore sentences from its own translations (online
back-translation), and optionally to translate pairs. Reference: Lample and Conneau 2019, sections 5.3 and 5.4.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infoxlm_core import manifests
from infoxlm_core.config import SelectionConfig
from infoxlm_core.data.shards import Shards, open_shards
from infoxlm_core.errors import ConfigError
from infoxlm_core.model.encoder import evaluating
from infoxlm_core.model.huggingface import pretrained, tokenizers
from infoxlm_core.model.objectives import cross_entropy
from infoxlm_core.systems.translation import decoding
from infoxlm_core.systems.translation.config import TranslationConfig
from infoxlm_core.systems.translation.decoding import TextTranslator, max_translation_tokens
from infoxlm_core.systems.translation.evaluation import HeldOutPairs
from infoxlm_core.systems.translation.model import Translator, copy_pretrained_weights
from infoxlm_core.systems.translation.samples import (
    PackedSentences,
    TranslationBatch,
    TranslationSampler,
    denoising_weight,
    pack_sentences,
)
from infoxlm_core.systems.xlm import XLM, XLMSystem
from infoxlm_core.training import distributed, loop
from infoxlm_core.training.checkpoints import RemoteCheckpoints
from infoxlm_core.training.finetuning.best_checkpoints import BestCheckpoints, name_metrics
from infoxlm_core.training.finetuning.selection import ALL, DevScores
from infoxlm_core.training.fingerprint import Fingerprint
from infoxlm_core.training.learner import Learner, LossWeights, autocast, seed_dropout
from infoxlm_core.training.run import export_curves, run_directory
from infoxlm_core.training.tracker import FileTracker, Tracker


def train(
    config: TranslationConfig,
    shards_path: Path,
    corpus: Path,
    encoder: Path,
    output: Path,
    run: Path,
    track: Callable[[Path], Tracker] = FileTracker,
    remote: RemoteCheckpoints | None = None,
) -> dict[str, Any]:
    """Train a translator, or resume from the newest valid checkpoint in `run`. Every worker calls this function.

    Args:
        config: stage settings.
        shards_path: directory of token shards in the two languages.
        corpus: a prepared corpus. BLEU on its first held-out pairs decides which weights are exported.
        encoder: an exported XLM model with the initial weights.
        output: directory in which `translator/` is created.
        run: directory for checkpoints, the best weights and `metrics.jsonl`. A run resumes if its directory is reused.
        track: factory for the tracker, given the path of the curves.
        remote: remote checkpoint storage if the machines share no disk.

    Returns:
        The metrics of the last step, and the number of `steps`.

    Raises:
        InputError: the corpus has no held-out pairs, or validation uses all of them.
        Other errors: see `open_shards`, `build`, `TranslationSampler` and `loop.train`.
    """
    with distributed.sharing_errors():  # the files of one machine may be damaged or unavailable
        shards = open_shards(shards_path)
        held_out = HeldOutPairs.read(corpus, config.languages)
        held_out.skip(config.validation_pairs)  # fails now rather than after training if no pair remains for evaluation
        validation = held_out.take(config.validation_pairs)
        best_checkpoints = BestCheckpoints(run, SelectionConfig(rule="joint"), source_language="")
        model = build(config, shards, encoder)
        translator = TextTranslator.with_shards_tokenizer(model, config, shards)
        sampler = TranslationSampler(shards, config)
        learner = TranslationLearner(config, translator, sampler, validation, best_checkpoints)
        inputs = {"shards": shards.manifest["digest"], "encoder": pretrained.digest_weights(encoder)}
    fingerprint = Fingerprint.of(config, manifests.VERSIONS["translator"], inputs)
    with run_directory(run, fingerprint, config.checkpoints, track, remote) as (checkpoints, tracker):
        metrics = loop.train(learner, config.optimization, checkpoints, tracker, config.log_every, learner.observe)
        distributed.on_first(lambda: _export(learner, shards, inputs, run, output))
    return metrics | {"steps": config.optimization.steps}


def _export(learner: "TranslationLearner", shards: Shards, inputs: dict[str, str], run: Path, output: Path) -> None:
    """Write the translator with its best weights, its curves and its manifest."""
    best_checkpoints = learner.best_checkpoints
    chosen_steps = best_checkpoints.choose(best_checkpoints.read_evaluations(), learner.config.optimization.steps)
    best_step = chosen_steps[ALL]  # the mean of both directions chooses a single step
    best_checkpoints.load(learner.module, best_step)  # replaces the weights of the last step
    directory = output / "translator"
    learner.translator.save(directory, shards.directory / "tokenizer" / tokenizers.MODEL)
    export_curves(run, directory)
    lineage = inputs | {name: shards.manifest["facts"][name] for name in ("corpus", "tokenizer")}
    manifests.write(directory, decoding.KIND, {"steps": best_step}, lineage)


def build(config: TranslationConfig, shards: Shards, encoder: Path) -> Translator:
    """Build a translator with the size of an exported XLM on this worker's device.

    The config selects which weights are copied from XLM. All other weights are random.

    Raises:
        ConfigError: XLM has too few positions.
        InputError, TokenizerMismatch: see `XLMSystem.read_size` and `load_weights`.
    """
    shards.vocabulary.check_xlm_r("translation")
    system = XLMSystem()
    size = system.read_size(encoder, shards)
    longest_translation = max_translation_tokens(config.side_tokens + 2)  # with both `</s>` of the source
    if longest_translation > size.positions:
        raise ConfigError(
            f"translations of {longest_translation} tokens (1.5 * (side_tokens + 2) + 10) exceed the "
            f"{size.positions} positions of {encoder}: lower translation.side_tokens, or raise "
            "pretraining.model.max_tokens"
        )
    model = Translator(size, config.dropout)
    system.initialise(model, config.seed)
    pretrained_xlm = XLM(size)
    system.load_weights(pretrained_xlm, encoder)
    copy_pretrained_weights(model, pretrained_xlm, config.encoder, config.decoder)
    return model.to(distributed.device())


class TranslationLearner(Learner):
    """Trains a `Translator`. Each step has one objective and one target language."""

    module: Translator
    # The denoising weight changes during training, so `losses` applies it.
    weights = LossWeights({"dae": 1.0, "bt": 1.0, "mt": 1.0})

    def __init__(
        self,
        config: TranslationConfig,
        translator: TextTranslator,
        sampler: TranslationSampler,
        validation: HeldOutPairs,
        best_checkpoints: BestCheckpoints,
    ) -> None:
        self.config = config
        self.translator = translator
        self.module = translator.model
        self.sampler = sampler
        self.validation = validation
        self.best_checkpoints = best_checkpoints
        self.device = distributed.device()

    def batches(self, step: int, skipped: int = 0) -> Sequence[TranslationBatch]:
        """Return this worker's micro-batches of a step, with the samples of step `step + skipped`."""
        my_shards = distributed.my_share(self.config.virtual_shards)
        return [self.sampler.draw(step + skipped, shard) for shard in my_shards]

    def losses(self, batch: TranslationBatch, scales: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted and scaled loss, and the unweighted loss without gradient."""
        target = batch.target.to(self.device)
        source = self.back_translate(target) if batch.source is None else batch.source.to(self.device)
        seed_dropout(self.config.seed, *batch.rng_key)
        with autocast(self.device):
            logits = self.module(source, target)
        loss = cross_entropy(logits, _select_targets(target))
        weight = 1.0
        if batch.objective == "dae":
            step, _, _ = batch.rng_key
            weight = denoising_weight(self.config, step)
        return loss * weight * scales[batch.objective], {batch.objective: loss.detach()}

    def back_translate(self, target: PackedSentences) -> PackedSentences:
        """Translate sentences into the pair's other language, without dropout and gradients."""
        source_language = self.sampler.other_language_number(int(target.types[0]))
        max_lengths = [int(1.3 * length + 5) for length in target.lengths]  # as in XLM's training
        with evaluating(self.module), torch.no_grad(), autocast(self.device):
            translations = self.module.generate(target, source_language, max_lengths)
        sentences = [np.array(translation, np.int64) for translation in translations]
        return pack_sentences(sentences, source_language).to(self.device)

    def observe(self, step: int) -> dict[str, float]:
        """Validate the translator every `validate_every` steps and after the last step."""
        is_due = step % self.config.validate_every == 0 or step == self.config.optimization.steps
        if not is_due:
            return {}
        return distributed.on_first(lambda: self._validate(step)) or {}

    def _validate(self, step: int) -> dict[str, float]:
        """Measure BLEU in both directions and save the weights if they are the best so far. Return the metrics."""
        results = self.validation.translate(self.translator)
        dev_scores = DevScores(step, {direction: result.bleu for direction, result in results.items()})
        self.best_checkpoints.update(self.module, [*self.best_checkpoints.read_evaluations(), dev_scores])
        return name_metrics(dev_scores)


def _select_targets(sentences: PackedSentences) -> Tensor:
    """Return the token ids to predict (T - N,), which are all tokens except the first of each sentence."""
    device = sentences.ids.device
    first_rows = torch.tensor((0, *sentences.lengths[:-1]), device=device).cumsum(0)  # (N,)
    is_target = torch.ones_like(sentences.ids, dtype=torch.bool)  # (T,)
    is_target[first_rows] = False
    return sentences.ids[is_target]
