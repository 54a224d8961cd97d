"""Config of `pretrain`: model, objectives, contrast, batches."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from infoxlm_core.config.base import (
    Flag,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    Source,
    StageConfig,
    Weight,
    Whole,
)
from infoxlm_core.config.training import CheckpointsConfig, GuardConfig, OptimizationConfig


class ModelConfig(StageConfig):
    """Size of the encoder, or the checkpoint it starts from."""

    start: Source | None = None
    """What to continue from: a Hugging Face XLM-R directory, `s3://bucket/prefix`, a hub name such as
    `FacebookAI/xlm-roberta-base` or `models:/NAME@ALIAS`; its sizes then replace those below. None: random weights."""

    layers: Annotated[Whole, Field(gt=0, le=1000)] = 12
    """Transformer layers; 12 is base, 24 is large."""

    hidden: Annotated[Whole, Field(gt=0, le=2**17)] = 768
    """Width of the token vectors; a multiple of `heads`."""

    ffn: Annotated[Whole, Field(gt=0, le=2**20)] = 3072
    """Width inside the feed-forward part of a layer; four times `hidden` in XLM-R."""

    heads: Annotated[Whole, Field(gt=0, le=2**12)] = 12
    """Attention heads of a layer; 64 dimensions each in XLM-R."""

    max_tokens: Annotated[Whole, Field(gt=0, le=2**20)] = 512
    """Longest sequence, special tokens included."""

    dropout: Share = 0.0
    """Of embeddings, attention and layer outputs; 0 in the released command, and needed for exact comparisons."""

    sharded: Flag = False
    """For an encoder that does not fit: each of W workers keeps 1/W of weights, gradients, Adam's moments and key
    encoder (16 / W bytes a parameter instead of 16) and gathers a layer when it computes. Slower; the same result."""

    recompute: Flag = False
    """For micro-batches that do not fit: layers keep their input alone and compute the rest again for the backward
    pass. 2 bytes instead of 38 a token, layer and unit of width in bf16, a third more products; the same result."""

    compiled: Flag = True
    """On GPUs: layers become a few fused kernels (PyTorch's inductor), which takes a minute at the start. Not where
    there is no C compiler, and never on CPUs."""

    precision: Literal["auto", "bf16", "fp8"] = "auto"
    """What products are computed in; weights, moments and sums are fp32. auto: bf16 on GPUs, fp32 on CPUs · bf16: on
    CPUs, too, which is slower where they have no instructions for it · fp8: products of layers in FP8, by torchao, with
    rougher gradients; on GPUs since Hopper and Ada, if `compiled`."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        if self.precision == "fp8" and (self.sharded or not self.compiled):
            raise ValueError("precision fp8 takes compiled layers: set compiled to true and sharded to false")
        return self


class Objective:
    """Marks a field as the weight of an objective of these systems."""

    def __init__(self, *systems: str) -> None:
        self.systems = systems


class ObjectivesConfig(StageConfig):
    """Weights of the losses in L = sum of weight * mean loss (0: the objective is off), and how tokens are masked."""

    mlm: Annotated[Weight, Objective("infoxlm", "xlm", "bert")] = 1.0
    """Masked LM on text of one language."""

    tlm: Annotated[Weight, Objective("infoxlm", "xlm")] = 1.0
    """Masked LM on a translation pair in one sequence."""

    xlco: Annotated[Weight, Objective("infoxlm")] = 1.0
    """Cross-lingual contrast of translation pairs; see `contrast`."""

    clm: Annotated[Weight, Objective("xlm")] = 0.0
    """Causal LM; only with system xlm."""

    nsp: Annotated[Weight, Objective("bert")] = 0.0
    """Next-sentence prediction; only with system bert."""

    weighting: Literal["mean", "count"] = "mean"
    """mean: each loss divided by its own targets · count: all by the targets of all (as the released code)."""

    mask_ratio: Share = 0.15
    """Share of the tokens of a sequence that MLM and TLM predict."""

    mask_share: Share = 0.8
    """Share of these that are shown as `<mask>`."""

    keep_share: Share = 0.1
    """Share of these that are shown as they are; the rest, 0.1 by default, as random tokens."""

    masking: Literal["exact", "released", "xlm", "bert"] = "exact"
    """Which tokens are masked. exact: floor(ratio * length + u) of all positions, random tokens never special ·
    released: the same, but a random token may be `<mask>` · xlm: each position but the first with the ratio, random
    tokens from all ids · bert: max(1, round(ratio * length)) of the positions that are not special."""

    whole_words: Flag = False
    """Mask all pieces of a word together."""

    @classmethod
    def systems(cls) -> dict[str, tuple[str, ...]]:
        """Return the systems that have each objective."""
        systems = {}
        for name, field in cls.model_fields.items():
            for mark in field.metadata:
                if isinstance(mark, Objective):
                    systems[name] = mark.systems
        return systems

    def weights(self) -> dict[str, float]:
        """Return the weights of the enabled objectives."""
        weights = {name: getattr(self, name) for name in self.systems()}
        return {name: weight for name, weight in weights.items() if weight}

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if not self.weights():
            raise ValueError(f"at least one of {', '.join(self.systems())} must be above 0")
        if self.mask_share + self.keep_share > 1:
            raise ValueError("mask_share + keep_share must not exceed 1")
        return self


class ContrastConfig(StageConfig):
    """Cross-lingual contrast (InfoXLM, section 3.3) with momentum, queue and mixup."""

    layer: Annotated[Whole, Field(gt=0, le=1000)] = 8
    """The universal layer: output of this Transformer layer, counted from 1."""

    queue_size: PositiveInt = 131_072
    """Keys of earlier steps that serve as negatives."""

    enqueue: Literal["step", "micro_batch"] = "step"
    """step: once, after the update, so that results do not depend on the micro-batch · micro_batch: after each loss,
    before the update (as the released code)."""

    momentum: Share = 0.999
    """m in key <- m * key + (1 - m) * query, once an optimizer step."""

    momentum_schedule: Literal["constant", "linear", "exponential", "refresh"] = "constant"
    """linear: from `momentum` at the first step to 1 at the last · exponential: 1 - t^-alpha, at most `momentum`
    · refresh: 0 every `refresh_every` steps, else `momentum`."""

    momentum_alpha: PositiveFloat = 1.0
    """Exponent of the exponential schedule; not read by the others."""

    refresh_every: PositiveInt = 1_000
    """Optimizer steps between two copies of the query encoder; of schedule refresh alone."""

    temperature: PositiveFloat = 0.25
    """Divides the products; lower is sharper. With `normalise`, take about 0.05."""

    normalise: Flag = False
    """Query and key to unit length before the product."""

    pooling: Literal["cls", "mean"] = "cls"
    """cls needs a start that knows language (XLM-R); from random weights take mean."""

    symmetric: Flag = False
    """Half the loss from each side: the query's key finds its query too. Only the target's keys are enqueued."""

    in_batch_negatives: Flag = False
    """The other keys of the micro-batch are negatives too; then the micro-batch size changes the result."""

    mixup: Share = 1.0
    """Probability that a pair is joined with another one."""

    partner: Literal["other_corpus", "next"] = "other_corpus"
    """other_corpus: a random pair of another corpus, where there is one · next: the pair that follows in the same
    corpus, always the same one (as the released code)."""

    cross: Share = 0.5
    """Probability that the joined pair exchanges its sides, so that each view mixes languages."""

    corruption: Share = 0.0
    """Share of the tokens of both views that is masked, answers thrown away (0.15 in the released code)."""

    false_negatives: Literal["overlap", "exact", "off"] = "overlap"
    """Which negatives are left out. overlap: those that share a sentence with the query · exact: those of exactly its
    sentences · off: none. Sentences are the same if their English sides are."""

    start_step: NonNegativeInt = 0
    """Before this step contrast is off; the key encoder is a copy of the query encoder when it begins."""


class BatchesConfig(StageConfig):
    """What one optimizer step sees."""

    global_batch_size: Annotated[Whole, Field(gt=0, le=2**24)] = 2048
    """Samples of each objective per optimizer step, over all workers."""

    virtual_shards: Annotated[Whole, Field(gt=0, le=2**20)] = 64
    """Fixed slices of the global batch: each worker takes some, one more or less, and there are no more workers than
    slices. With dropout no micro-batch is larger than a slice."""

    micro_batch_size: Annotated[Whole, Field(gt=0, le=2**20)] = 32
    """Samples of each objective per forward pass; changes memory and speed and, without dropout, never the result."""

    block_tokens: Annotated[Whole, Field(gt=0, le=2**20)] = 512
    """Longest MLM block."""

    side_tokens: Annotated[Whole, Field(gt=0, le=2**20)] = 254
    """Longest side of a pair, without special tokens."""

    alpha: Share = 0.7
    """Languages and pairs are drawn with p proportional to n^alpha."""

    @model_validator(mode="after")
    def _batches_divide(self) -> Self:
        if self.global_batch_size % self.virtual_shards:
            raise ValueError(
                f"global_batch_size ({self.global_batch_size}) must be a multiple of "
                f"virtual_shards ({self.virtual_shards})"
            )
        return self


class ProbeConfig(StageConfig):
    """Retrieval among a few held-out pairs while training goes on; it changes no result."""

    every: NonNegativeInt = 1_000
    """Optimizer steps between two probes; 0: none."""

    pairs: PositiveInt = 100
    """Held-out pairs of each language."""


class PretrainingConfig(StageConfig):
    """Token shards -> InfoXLM, or one of the systems it came from."""

    system: Literal["infoxlm", "xlm", "bert"] = "infoxlm"
    """Encoder and layouts. infoxlm: XLM-R's (also Unicoder and all ablations) · xlm: language embeddings, streams, one
    objective and language a step · bert: segments, next-sentence pairs."""

    model: ModelConfig = ModelConfig()
    objectives: ObjectivesConfig = ObjectivesConfig()
    contrast: ContrastConfig = ContrastConfig()
    batches: BatchesConfig = BatchesConfig()
    optimization: OptimizationConfig = OptimizationConfig()
    guard: GuardConfig = GuardConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    probe: ProbeConfig = ProbeConfig()
    log_every: PositiveInt = 10
    """Optimizer steps between two points of the curves."""

    seed: NonNegativeInt = 1
    """Decides initial weights, samples, masks and dropout: the same seed, the same run."""

    def result_fields(self) -> dict[str, Any]:
        values = super().result_fields()
        for name in ("sharded", "recompute", "compiled"):  # a run may resume with or without them
            del values["model"][name]
        if self.model.precision == "auto":  # runs of earlier versions, which lack it, may resume
            del values["model"]["precision"]
        values["guard"] = self.guard.model_dump(mode="json", exclude_defaults=True)
        return values if values["guard"] else {name: value for name, value in values.items() if name != "guard"}

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence."""
        return max(self.batches.block_tokens, 2 * self.batches.side_tokens + 3)

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.model.start is None and self.contrast.layer > self.model.layers and self.system == "infoxlm":
            raise ValueError(f"contrast.layer ({self.contrast.layer}) is above model.layers ({self.model.layers})")
        if self.model.start is None and self.longest > self.model.max_tokens:
            raise ValueError(
                f"sequences of {self.longest} tokens (batches.block_tokens, two batches.side_tokens and 3) "
                f"exceed model.max_tokens ({self.model.max_tokens})"
            )
        if self.contrast.start_step and not self.objectives.mlm + self.objectives.tlm and self.objectives.xlco:
            raise ValueError(
                f"contrast.start_step ({self.contrast.start_step}) leaves nothing to learn before: set it to 0"
            )
        known = ObjectivesConfig.systems()
        for name in self.objectives.weights():
            if self.system not in known[name]:
                raise ValueError(f"system {self.system} has no objective {name}: set objectives.{name} to 0")
        if self.model.sharded and self.system != "infoxlm":
            raise ValueError(f"system {self.system} cannot be sharded: set model.sharded to false")
        return self
