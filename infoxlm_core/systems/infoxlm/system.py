"""InfoXLM (Chi et al. 2021) and its ablations: XLM-R's encoder, trained with MLM, TLM and XLCO."""

import logging
from pathlib import Path

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.batches import pack_micro_batches
from infoxlm_core.data.samples import Sampler
from infoxlm_core.data.shards import Shards
from infoxlm_core.errors import ConfigError, TokenizerMismatch
from infoxlm_core.model import devices
from infoxlm_core.model.encoder import EncoderSize, initialise
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner
from infoxlm_core.systems.infoxlm.plan import check_memory
from infoxlm_core.systems.infoxlm.probe import Probe, ProbeObserver
from infoxlm_core.systems.system import Observe, System, check_tokenizer_file
from infoxlm_core.training import distributed

logger = logging.getLogger(__name__)


class InfoXLMSystem(System):
    """The system InfoXLM, exported as `XLMRobertaForMaskedLM` or in the start model's Hugging Face class."""

    def build(self, config: PretrainingConfig, shards: Shards) -> InfoXLM:
        return build(config, shards)

    def create_learner(self, config: PretrainingConfig, model: InfoXLM, shards: Shards) -> InfoXLMLearner:
        """Return the learner. The first worker also logs how often the run draws each corpus."""
        learner = InfoXLMLearner(config, model, shards)
        if distributed.rank() == 0:
            learner.sampler.log_draw_counts(config.optimization.steps)
        return learner

    def count_tokens(self, config: PretrainingConfig, shards: Shards, steps: range) -> int:
        """Count the tokens that all workers process in these steps."""
        sampler = Sampler(shards, config)
        all_shards = range(config.batches.virtual_shards)
        token_count = 0
        for step in steps:
            samples = sampler.draw(step, all_shards)
            for batch in pack_micro_batches(samples, config.batches.micro_batch_size, config.contrast.symmetric):
                token_count += batch.tokens
        return token_count

    def export(self, model: InfoXLM, config: PretrainingConfig, shards: Shards, directory: Path) -> None:
        start = Path(config.model.start) if config.model.start else None
        pretrained.export(model, shards.directory / "tokenizer", directory, start, shards.prefix)

    def create_observer(self, config: PretrainingConfig, learner: InfoXLMLearner, shards: Shards) -> Observe | None:
        """Return a function that scores the probe, or None if the probe is disabled or has no pairs."""
        probe = Probe(shards, config.probe.pairs, config.batches.side_tokens)
        if not config.probe.every or not probe.pairs:
            return None
        return ProbeObserver(probe, learner.module, config).observe

    def check_start_files(self, config: PretrainingConfig, directory: Path) -> None:
        _check_size(directory, pretrained.read_encoder_size(directory), config)


def build(config: PretrainingConfig, shards: Shards) -> InfoXLM:
    """Return the query encoder with its heads on this worker's device.

    The weights are those of `model.start`, or random without a start model.

    Raises:
        TokenizerMismatch: the shards were not tokenized with the start model's tokenizer.
        ConfigError: the start model is too small for the config, or the device has too little memory.
    """
    start = Path(config.model.start) if config.model.start else None
    if start:
        size = pretrained.read_encoder_size(start)
        _check_tokenizer(start, size, shards)
        _check_size(start, size, config)
    else:
        size = EncoderSize.from_config(config.model, shards.vocabulary_size)
    # Otherwise, a model or queue that is too large would run out of memory only in the middle of a run.
    check_memory(config, size, devices.total_memory_bytes(distributed.device()))
    model = InfoXLM.from_config(config, size)
    initialise(model, config.seed)
    if start:
        _load_start_weights(model, start)
    return model.to(distributed.device())


def _load_start_weights(model: InfoXLM, start: Path) -> None:
    """Copy a start model's weights. Weights that the start model lacks stay random."""
    optional_weights: tuple[str, ...] = ("projection",)  # published encoders have no contrast projection
    if model.head is not None and not pretrained.has_masked_lm_head(start):
        optional_weights = ("projection", "head.")
        logger.warning("%s has no masked-LM head: MLM and TLM train a new one with random weights", start)
    pretrained.load_weights(model, start, optional_weights)


def _check_tokenizer(start: Path, size: EncoderSize, shards: Shards) -> None:
    """Check that the shards were tokenized with the start model's tokenizer.

    Raises:
        TokenizerMismatch: the shards' vocabulary is larger than the model's, or their tokenizer files differ.
        ConfigError: the model's first position does not follow the tokenizer's padding id.
    """
    # A model may have more embeddings than its tokenizer has ids, as multilingual-e5-small does.
    if size.vocabulary < shards.vocabulary_size:
        raise TokenizerMismatch(
            f"{start} has {size.vocabulary} embeddings, but {shards.directory} has {shards.vocabulary_size} ids: "
            "tokenize with the model's own tokenizer (tokenization.model)"
        )
    check_tokenizer_file(start, shards)
    pad_id = shards.vocabulary.pad
    if size.first_position not in (0, pad_id + 1):  # 0, as in BERT: positions ignore the padding id
        raise ConfigError(
            f"{start}/config.json: pad_token_id is {size.first_position - 1}, but the tokenizer pads with {pad_id}, "
            "so the positions of all tokens would be wrong: give the tokenizer with which the model was trained"
        )


def _check_size(start: Path, size: EncoderSize, config: PretrainingConfig) -> None:
    """Raise ConfigError if a start model has too few positions or layers for the config."""
    if config.max_sequence_tokens > size.max_tokens:
        raise ConfigError(
            f"sequences of {config.max_sequence_tokens} tokens (batches.block_tokens, or 2 * batches.side_tokens + 3) "
            f"exceed the {size.max_tokens} positions of {start}: lower these settings"
        )
    contrast_layer = config.contrast.resolve_layer(size.layers)
    if contrast_layer > size.layers:
        raise ConfigError(f"contrast.layer ({contrast_layer}) is above the {size.layers} layers of {start}: lower it")
    uses_all_layers = config.objectives.mlm or config.objectives.tlm  # XLCO alone ends at the contrast layer
    used_layers = size.layers if uses_all_layers else contrast_layer
    frozen = config.model.frozen
    if isinstance(frozen, int) and frozen >= used_layers:
        raise ConfigError(f"model.frozen ({frozen}) leaves none of the {used_layers} layers to train: lower it")
