"""The stage that trains a translator on monolingual text of two languages, without any translations.

Source: Lample and Conneau 2019, section 5.3. The model learns to restore noisy sentences (denoising), and to restore
sentences from its own translations of them (online back-translation). Held-out pairs only decide when to stop.
"""

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import TypedDict

from infoxlm_core import manifests, outside
from infoxlm_core.data.shards import Shards
from infoxlm_core.errors import ConfigError
from infoxlm_core.model.encoder import EncoderSize, evaluating
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.model.objectives import cross_entropy
from infoxlm_core.systems.text_batches import languages_of
from infoxlm_core.systems.text_system import EPSILON
from infoxlm_core.systems.translation.config import StartConfig, TranslationConfig, generated_tokens
from infoxlm_core.systems.translation.decoding import BLEU, Validation
from infoxlm_core.systems.translation.model import Translator, start_from
from infoxlm_core.systems.translation.samples import (
    PackedSentences,
    TranslationBatch,
    TranslationSampler,
    denoising_weight,
    pack_sentences,
)
from infoxlm_core.systems.xlm import XLM, XLMSystem, first_weights
from infoxlm_core.training import distributed, loop, tracker
from infoxlm_core.training.checkpoints import Checkpoints
from infoxlm_core.training.fingerprint import Fingerprint
from infoxlm_core.training.learner import Learner, LossWeights, autocast, seed_dropout
from infoxlm_core.training.run import run_directory
from infoxlm_core.training.tracker import FileTracker, Tracker

logger = logging.getLogger(__name__)
VERSION = 2  # increase it when the same config and data give other results


def train(
    config: TranslationConfig,
    shards_path: Path,
    corpus: Path,
    output: Path,
    run: Path,
    track: Callable[[Path], Tracker] = FileTracker,
) -> dict[str, Any]:
    """Train until BLEU on held-out pairs stops rising; every worker calls this.

    Args:
        config: the stage's config.
        shards_path: token shards of the two languages.
        corpus: a prepared corpus; its held_out/ has pairs of the two languages.
        output: receives the best translator, as `translator/`.
        run: receives checkpoints, the best translator so far and `metrics.jsonl`; an existing run is resumed.
        track: opens the tracker of a run's directory.

    Returns:
        The metrics of the last step, and the best BLEU.

    Raises:
        InputError: there are no held-out pairs. `open_shards`, `build`, `TranslationSampler` and `loop.train` raise
            other errors.
    """
    shards = distributed.open_shards(shards_path)
    validation = Validation.read(config, shards, corpus)
    learner = TranslationLearner(config, build(config, shards), TranslationSampler(shards, config), validation)
    inputs = {"shards": shards.manifest["digest"]}
    if config.encoder.model:
        inputs["encoder.model"] = pretrained.digest_of(Path(config.encoder.model))
    if config.decoder.model:
        inputs["decoder.model"] = pretrained.digest_of(Path(config.decoder.model))
    fingerprint = Fingerprint.of(config, VERSION, inputs)
    with run_directory(run, fingerprint, config.checkpoints, track) as (checkpoints, curves):
        for end_step in _validation_steps(config, checkpoints):
            optimization = config.optimization.model_copy(update={"steps": end_step})
            figures = loop.train(learner, optimization, checkpoints, curves, config.log_every, learner.observe)
            validations = _read_validations(run, end_step)
            history = [scores[BLEU] for scores in validations]
            best_index = int(np.argmax(history))
            validations_since_best = len(history) - 1 - best_index
            if validations_since_best == 0:
                facts = {"scores": validations[best_index], "sacrebleu_signatures": validation.signatures()}
                distributed.on_first(partial(export, learner.module, shards, run / "best", facts))
            if validations_since_best >= config.patience:
                break
        copy_best = partial(shutil.copytree, run / "best", output / "translator", dirs_exist_ok=True)
        distributed.on_first(copy_best)
    logger.info("best BLEU %.2f, at validation %d of %d", history[best_index], best_index + 1, len(history))
    return figures | {"valid/best_bleu": history[best_index]}


def _validation_steps(config: TranslationConfig, checkpoints: Checkpoints) -> list[int]:
    """Return the steps at which training pauses to compare BLEU.

    A resumed run starts with the last of these steps that it reached, since it may have ended before the comparison.
    """
    interval = config.validate_every
    last_step = config.optimization.steps
    all_steps = [*range(interval, last_step, interval), last_step]
    newest = distributed.on_first(checkpoints.load_newest)
    reached_step = distributed.from_first(newest.step if newest else 0)
    finished_count = sum(step <= reached_step for step in all_steps)
    return all_steps[max(0, finished_count - 1) :]


def _read_validations(run: Path, last_step: int) -> list[dict[str, float]]:
    """Return the scores of each validation up to a step, from the curves of the run."""
    curves = distributed.on_first(lambda: tracker.read(run / tracker.METRICS)) or []
    validations = []
    for step, values in curves:
        if BLEU in values and step <= last_step:
            validations.append({name: score for name, score in values.items() if name.startswith("valid/")})
    return distributed.from_first(validations)


def build(config: TranslationConfig, shards: Shards) -> Translator:
    """Return a translator with random weights by the seed, or with those of its pre-trained starts.

    Raises:
        ConfigError: the starts differ in size, or have too few positions.
        InputError, TokenizerMismatch: see `XLMSystem.size_of` and `load_into`.
    """
    shards.vocabulary.check_xlm_r("translation")
    halves: list[tuple[str, StartConfig]] = [("encoder", config.encoder), ("decoder", config.decoder)]
    start_sizes = {start.model: XLMSystem().size_of(Path(start.model), shards) for _, start in halves if start.model}
    if len(set(start_sizes.values())) > 1:
        raise ConfigError(f"{' and '.join(start_sizes)} differ in size: give two models of the same size")
    if start_sizes:
        size = next(iter(start_sizes.values()))
    else:
        size = EncoderSize.of(
            config.model,
            shards.vocabulary_size,
            positions=config.model.max_tokens,
            epsilon=EPSILON,
            types=len(languages_of(shards)),
            first_position=0,
        )
    longest = generated_tokens(config.side_tokens + 2, 1.5, 10)
    if longest > size.positions:
        raise ConfigError(f"translations of {longest} tokens exceed {size.positions} positions: lower side_tokens")
    model = Translator(size, config.model.dropout)
    first_weights(model, config.seed)
    for half, start in halves:
        if start.model:
            pretrained_xlm = XLM(size)
            XLMSystem().load_into(pretrained_xlm, Path(start.model))
            start_from(model, pretrained_xlm, half, only_embeddings=start.take == "embeddings")
    return model.to(distributed.device())


class TranslationLearner(Learner):
    """Alternates between denoising and back-translation, with one language per step."""

    module: Translator

    weights = LossWeights({"dae": 1.0, "bt": 1.0})

    def __init__(
        self, config: TranslationConfig, model: Translator, sampler: TranslationSampler, validation: Validation | None
    ) -> None:
        self.config = config
        self.module = model
        self.sampler = sampler
        self.validation = validation
        self.device = distributed.device()

    def batches(self, step: int, skipped: int = 0) -> Sequence[TranslationBatch]:
        my_shards = distributed.my_share(self.config.virtual_shards)
        return [self.sampler.draw(step + skipped, shard) for shard in my_shards]

    def losses(self, batch: TranslationBatch, scales: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        target = batch.target.to(self.device)
        source = self.back_translate(target) if batch.source is None else batch.source.to(self.device)
        seed_dropout(self.config.seed, *batch.rng_key)
        with autocast(self.device):
            logits = self.module(source, target)
        loss = cross_entropy(logits, _tokens_after_first(target))
        step = batch.rng_key[0]
        weight = denoising_weight(self.config, step) if batch.objective == "dae" else 1.0
        return loss * weight * scales[batch.objective], {batch.objective: loss.detach()}

    def back_translate(self, target: PackedSentences) -> PackedSentences:
        """Translate sentences into the other language, without dropout and without gradient."""
        numbers = self.sampler.language_numbers
        first_language, second_language = self.config.languages
        target_language = int(target.types[0])
        source_language = numbers[first_language]
        if source_language == target_language:
            source_language = numbers[second_language]
        max_lengths = [generated_tokens(length, 1.3, 5) for length in target.lengths]
        with evaluating(self.module), torch.no_grad(), autocast(self.device):
            translations = self.module.generate(target, source_language, max_lengths)
        sentences = [np.array(translation, np.int64) for translation in translations]
        return pack_sentences(sentences, source_language).to(self.device)

    def observe(self, step: int) -> dict[str, float]:
        """Return the scores of a validation if one is due after this step."""
        is_due = step % self.config.validate_every == 0 or step == self.config.optimization.steps
        validation = self.validation
        if validation is None or not is_due:
            return {}
        return distributed.on_first(lambda: validation.score(self.module)) or {}


def _tokens_after_first(sentences: PackedSentences) -> Tensor:
    """Return the targets of the translator's logits (T - N,): every token except the first of each sentence."""
    device = sentences.ids.device
    first_rows = torch.tensor((0, *sentences.lengths[:-1]), device=device).cumsum(0)  # (N,)
    is_target = torch.ones_like(sentences.ids, dtype=torch.bool)  # (T,)
    is_target[first_rows] = False
    return sentences.ids[is_target]


def export(model: Translator, shards: Shards, directory: Path, facts: dict[str, Any]) -> None:
    """Write a translator's weights, sizes and languages in our own format, since `transformers` has no class for it.

    The manifest records `facts`: the scores, and how they were computed.
    """
    (directory / manifests.NAME).unlink(missing_ok=True)  # so that readers do not accept a partly written translator
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().float().cpu().contiguous() for name, tensor in model.named_parameters()}
    save_file(weights, directory / pretrained.WEIGHTS)
    description = {"size": asdict(model.encoder.size), "languages": languages_of(shards)}
    (directory / "translator.json").write_text(json.dumps(description, indent=1) + "\n")
    manifests.write(directory, "translator", facts, inputs={"shards": shards.manifest["digest"]})


class _Description(TypedDict):
    """The content of translator.json."""

    size: EncoderSize
    languages: list[str]


def load(directory: Path) -> tuple[Translator, list[str]]:
    """Load a translator that `export` wrote, in evaluation mode, and its languages by number."""
    description = outside.read_json(directory / "translator.json", _Description, "give a translator that was exported")
    model = Translator(description["size"])
    model.load_state_dict(pretrained.read_tensors(directory / pretrained.WEIGHTS))
    return model.eval(), description["languages"]
