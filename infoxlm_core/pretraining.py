"""Stage: token shards -> InfoXLM. Assembles the parts, fills the queue, trains on MLM + TLM + XLCO, exports."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from infoxlm_core import manifests
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.batches import PackedBatch, micro_batches
from infoxlm_core.data.samples import Sampler
from infoxlm_core.data.shards import Shards, open_shards
from infoxlm_core.data.vocabulary import FIRST_POSITION
from infoxlm_core.errors import ConfigError, TokenizerMismatch
from infoxlm_core.model import pretrained, tokenizers
from infoxlm_core.model.encoder import EncoderSize, initialise
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.model.momentum import KeyEncoder, Queue
from infoxlm_core.objectives import mlm_loss, xlco_hits, xlco_logits, xlco_loss
from infoxlm_core.training import distributed, loop
from infoxlm_core.training.tracker import FileTracker, Tracker

logger = logging.getLogger(__name__)


def pretrain(
    config: PretrainingConfig,
    shards_path: Path,
    output: Path,
    run: Path,
    track: Callable[[Path], Tracker] = FileTracker,
) -> dict:
    """Pre-train, continuing from the newest valid checkpoint in `run`; every worker calls this.

    Args:
        config: what to train and how.
        shards_path: output of the tokenization stage.
        output: gets `encoder/` and `start/` (the model before its first step), both in Hugging Face format.
        run: gets checkpoints and `metrics.jsonl`; the same directory continues the same run.
        track: makes the tracker that writes the curves into a file.

    Returns:
        the last step's figures.

    Raises:
        TokenizerMismatch: the start model has another vocabulary than the shards.
        and what `open_shards`, `Sampler` and `loop.train` raise.
    """
    shards = open_shards(shards_path)
    model = build(config, shards)
    pretraining = Pretraining(config, model, Sampler(shards, config))
    identity = loop.fingerprint(config) | {"shards": shards.manifest["digest"]}
    if config.model.start:
        identity["start"] = pretrained.digest_of(Path(config.model.start))
    with loop.run_directory(run, identity, config.checkpoints, track) as (checkpoints, tracker):
        figures = loop.train(pretraining, config.optimization, checkpoints, tracker, config.log_every)
        distributed.on_first(lambda: _export(config, model, shards, run, output))
    return figures


def _export(config: PretrainingConfig, model: InfoXLM, shards: Shards, run: Path, output: Path) -> None:
    tokenizer, lineage = shards.directory / "tokenizer", {"shards": shards.manifest["digest"]}
    lineage |= {name: shards.manifest["facts"][name] for name in ("corpus", "tokenizer")}
    pretrained.export(model, tokenizer, output / "encoder")
    loop.export_curves(run, output / "encoder")
    pretrained.export(build(config, shards), tokenizer, output / "start")
    manifests.write(output / "encoder", "encoder", {"steps": config.optimization.steps}, lineage)
    manifests.write(output / "start", "encoder", {"steps": 0}, lineage)


def build(config: PretrainingConfig, shards: Shards) -> InfoXLM:
    """The query encoder with heads: random weights by the seed, or those of `model.start`; the projection is random."""
    wanted, contrast, tokenizer = config.model, config.contrast, shards.manifest["facts"]["tokenizer"]
    size = EncoderSize(
        shards.vocabulary_size,
        wanted.layers,
        wanted.hidden,
        wanted.ffn,
        wanted.heads,
        wanted.max_tokens + FIRST_POSITION,
    )
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


class Pretraining:
    """The learner of the joint objective: InfoXLM's query encoder, its key encoder and the queue."""

    def __init__(self, config: PretrainingConfig, model: InfoXLM, sampler: Sampler) -> None:
        self.config, self.module, self.sampler = config, model, sampler
        self.device = distributed.device()
        objectives = config.objectives
        weights = {"mlm": objectives.mlm, "tlm": objectives.tlm, "xlco": objectives.xlco}
        self.weights = {name: weight for name, weight in weights.items() if weight}
        self.weighting = objectives.weighting
        self.contrasting = bool(objectives.xlco)
        if self.contrasting:
            self.key_encoder = KeyEncoder(model).to(self.device)
            self.queue = Queue(config.contrast.queue_size, model.encoder.size.hidden, self.device)
        self.new_keys: list[tuple[Tensor, Tensor]] = []
        self.step = 0

    def _virtual_shards(self) -> range:
        """The contiguous range of virtual shards that this worker draws."""
        total, workers = self.config.batches.virtual_shards, distributed.world_size()
        if total % workers:
            raise ConfigError(f"{workers} workers must divide batches.virtual_shards ({total})")
        share = total // workers
        return range(distributed.rank() * share, (distributed.rank() + 1) * share)

    def begin(self) -> None:
        """Fill the queue with K real keys of a reserved random stream, so that training batches do not change."""
        if not self.contrasting:
            return
        size, each = self.config.contrast.queue_size, self.config.batches.global_batch_size
        for number in range(-(-size // each)):
            draw = self.sampler.draw(f"prefill {number}", self._virtual_shards(), only_contrast=True)
            for batch in micro_batches(draw, self.config.batches.micro_batch_size):
                self._make_keys(batch.to(self.device))
            self._enqueue(0, limit=size - number * each)
        self.queue.pointer = 0
        logger.info("filled the queue with %d keys", size)

    def batches(self, step: int) -> Sequence[PackedBatch]:
        self.step, mine = step, self._virtual_shards()
        # Dropout is drawn for each micro-batch, so these must not depend on which worker has which virtual shard.
        parts = [range(shard, shard + 1) for shard in mine] if self.config.model.dropout else [mine]
        return [
            replace(batch, place=(part.start, number))
            for part in parts
            for number, batch in enumerate(
                micro_batches(self.sampler.draw(step, part), self.config.batches.micro_batch_size)
            )
        ]

    def counts(self, batches: Sequence[PackedBatch]) -> dict[str, int]:
        return {
            "mlm": sum(batch.mlm_targets for batch in batches),
            "tlm": sum(len(batch.target_rows) - batch.mlm_targets for batch in batches),
            "xlco": sum(len(batch.key_lengths) for batch in batches),
            "tokens": sum(batch.tokens for batch in batches),
        }

    def losses(self, batch: PackedBatch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        batch = batch.to(self.device)
        losses, sums = {}, {}
        loop.seed_dropout(self.config.seed, self.step, *batch.place)
        with loop.autocast(self.device):
            outputs = self.module(batch)
        if outputs.logits is not None:
            count = batch.mlm_targets
            losses = {
                "mlm": mlm_loss(outputs.logits[:count], batch.target_ids[:count]),
                "tlm": mlm_loss(outputs.logits[count:], batch.target_ids[count:]),
            }
            losses = {name: loss for name, loss in losses.items() if name in self.weights}
        if outputs.queries is not None:
            keys = self._make_keys(batch)
            overlaps = self.queue.overlaps(batch.meanings) if self.config.contrast.false_negatives != "off" else None
            logits = xlco_logits(outputs.queries, keys, self.queue.rows, self.config.contrast.temperature, overlaps)
            losses["xlco"] = xlco_loss(logits)
            with torch.no_grad():
                negatives = logits[:, 1:].masked_fill(logits[:, 1:].isinf(), torch.nan)
                sums = {
                    "hits": xlco_hits(logits),
                    "positive": logits[:, 0].sum(),
                    "negative": negatives.nanmean(dim=1).nan_to_num().sum(),
                    "negative_square": negatives.square().nanmean(dim=1).nan_to_num().sum(),
                    "key_check": keys.sum() * 0.0,  # not finite if any key is not
                }
        return losses, sums

    def _make_keys(self, batch: PackedBatch) -> Tensor:
        with loop.autocast(self.device):
            keys = self.key_encoder(batch.key_ids, batch.key_positions, batch.key_lengths)
        self.new_keys.append((keys, batch.meanings))
        return keys

    def statistics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        if "hits" not in sums:
            return {}
        n = counts["xlco"]
        mean = sums["negative"] / n
        age = self.step - self.queue.born.double().mean()
        return {
            "queue/age": float(age),  # mean, in steps
            "xlco/accuracy": sums["hits"] / n,
            "xlco/positive_logit": sums["positive"] / n,
            "xlco/negative_logit": mean,
            "xlco/negative_spread": max(0.0, sums["negative_square"] / n - mean**2) ** 0.5,
        }

    def finish_step(self, step: int, good: bool) -> None:
        """Move the key encoder, then enqueue the step's keys in the order of the global batch; neither if bad."""
        if self.contrasting and good:
            self.key_encoder.follow(self.config.contrast.momentum)
            self._enqueue(step)
        self.new_keys.clear()

    def _enqueue(self, step: int, limit: int | None = None) -> None:
        keys, meanings = (torch.cat(parts) for parts in zip(*self.new_keys, strict=True))
        keys, meanings = distributed.gather_rows(keys), distributed.gather_rows(meanings)
        self.queue.push(keys[:limit], meanings[:limit], step)
        self.new_keys.clear()

    def state(self) -> dict[str, Tensor]:
        if not self.contrasting:
            return {}
        keys = {f"key_encoder/{name}": value for name, value in self.key_encoder.named_parameters()}
        return keys | {f"queue/{name}": value for name, value in self.queue.state().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        if not self.contrasting:
            return
        with torch.no_grad():
            for name, parameter in self.key_encoder.named_parameters():
                parameter.copy_(state[f"key_encoder/{name}"])
        self.queue.restore({name.removeprefix("queue/"): t for name, t in state.items() if name.startswith("queue/")})
