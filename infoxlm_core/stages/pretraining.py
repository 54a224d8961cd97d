"""Stage: token shards -> InfoXLM, or one of the systems it came from. Assembles the parts, trains, exports."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from infoxlm_core import manifests
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.shards import Shards, open_shards
from infoxlm_core.data.vocabulary import FIRST_POSITION
from infoxlm_core.errors import ConfigError, TokenizerMismatch
from infoxlm_core.model import pretrained, tokenizers
from infoxlm_core.model.encoder import EncoderSize, initialise
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.systems import baselines
from infoxlm_core.systems.infoxlm import Pretraining
from infoxlm_core.training import distributed, loop
from infoxlm_core.training.checkpoints import Elsewhere
from infoxlm_core.training.fingerprint import Fingerprint
from infoxlm_core.training.run import export_curves, run_directory
from infoxlm_core.training.tracker import FileTracker, Tracker


def pretrain(
    config: PretrainingConfig,
    shards_path: Path,
    output: Path,
    run: Path,
    track: Callable[[Path], Tracker] = FileTracker,
    elsewhere: Elsewhere | None = None,
) -> dict[str, Any]:
    """Pre-train, continuing from the newest valid checkpoint in `run`; every worker calls this.

    Args:
        config: what to train and how.
        shards_path: output of the tokenization stage.
        output: gets `encoder/` and `start/` (the model before its first step), both in Hugging Face format.
        run: gets checkpoints and `metrics.jsonl`; the same directory continues the same run.
        track: makes the tracker that writes the curves into a file.
        elsewhere: where checkpoints are for machines that share no disk with this one.

    Returns:
        the last step's figures.

    Raises:
        TokenizerMismatch: the start model has another vocabulary than the shards.
        and what `open_shards`, `Sampler` and `loop.train` raise.
    """
    shards = open_shards(shards_path)
    learner: Pretraining | baselines.Baseline
    observe = None
    if config.system == "infoxlm":
        learner = Pretraining(config, build(config, shards), shards)
        observe = learner.observe
    else:
        learner = baselines.make(config, shards)
    inputs = {"shards": shards.manifest["digest"], "tokenizer": shards.manifest["facts"]["tokenizer"]}
    if config.model.start:
        inputs["model.start"] = pretrained.digest_of(Path(config.model.start))
    fingerprint = Fingerprint.of(config, manifests.VERSIONS["pretrained"], inputs)
    with run_directory(run, fingerprint, config.checkpoints, track, elsewhere) as (checkpoints, tracker):
        figures = loop.train(learner, config.optimization, checkpoints, tracker, config.log_every, observe)
        weights = distributed.tensors_on_first(dict(learner.module.named_parameters()))
        distributed.on_first(lambda: _export(config, learner, weights, shards, run, output))
    return figures


def _export(
    config: PretrainingConfig,
    learner: Pretraining | baselines.Baseline,
    weights: dict[str, Tensor],
    shards: Shards,
    run: Path,
    output: Path,
) -> None:
    tokenizer, lineage = shards.directory / "tokenizer", {"shards": shards.manifest["digest"]}
    lineage |= {name: shards.manifest["facts"][name] for name in ("corpus", "tokenizer")}
    if isinstance(learner, baselines.Baseline):
        baselines.export(learner, tokenizer, output / "encoder")
        baselines.export(baselines.make(config, shards), tokenizer, output / "start")
    else:
        model = build(config, shards)
        pretrained.export(model, tokenizer, output / "start")
        model.load_state_dict(weights)
        pretrained.export(model, tokenizer, output / "encoder")
    export_curves(run, output / "encoder")
    manifests.write(output / "encoder", "encoder", {"steps": config.optimization.steps}, lineage)
    manifests.write(output / "start", "encoder", {"steps": 0}, lineage)


def build(config: PretrainingConfig, shards: Shards) -> InfoXLM:
    """The query encoder with heads: random weights by the seed, or those of `model.start`; the projection is random."""
    wanted, contrast, tokenizer = config.model, config.contrast, shards.manifest["facts"]["tokenizer"]
    size = EncoderSize.of(wanted, shards.vocabulary_size)
    if wanted.start:
        size = pretrained.size_of(Path(wanted.start))
        if size.vocabulary != shards.vocabulary_size:
            raise TokenizerMismatch(
                f"{wanted.start} has {size.vocabulary} embeddings, {shards.directory} {shards.vocabulary_size} ids: "
                "tokenize with the model's own SentencePiece model (tokenization.model)"
            )
        model_file = Path(wanted.start) / tokenizers.MODEL
        if model_file.is_file() and (own := f"sha256:{manifests.file_sha256(model_file)}") != tokenizer:
            raise TokenizerMismatch(
                f"{wanted.start} has tokenizer {own[:15]}…, {shards.directory} {tokenizer[:15]}…: "
                f"tokenize with the model's own (tokenization.model: {model_file})"
            )
        if config.longest > size.positions - FIRST_POSITION:
            raise ConfigError(
                f"sequences of {config.longest} tokens (batches.block_tokens, two batches.side_tokens and 3) exceed "
                f"the {size.positions - FIRST_POSITION} positions of {wanted.start}: lower them"
            )
        if contrast.layer > size.layers:
            raise ConfigError(f"contrast.layer ({contrast.layer}) is above the {size.layers} layers of {wanted.start}")
    model = InfoXLM(size, contrast.layer, contrast.pooling, contrast.normalise, wanted.dropout)
    initialise(model, config.seed)
    if wanted.start:
        pretrained.load_into(model, Path(wanted.start))
    return model.to(distributed.device())
