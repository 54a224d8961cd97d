"""The config of `pretrain`: model, objectives, contrast and batches."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from infoxlm_core.config.base import (
    Flag,
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveInt,
    Share,
    Source,
    StageConfig,
    Weight,
    Whole,
    layer_count_or,
)
from infoxlm_core.config.training import CheckpointsConfig, GuardConfig, OptimizationConfig


class ModelConfig(StageConfig):
    """Size of the encoder, or the checkpoint from which training starts."""

    added_later: ClassVar[tuple[str, ...]] = ("frozen", "precision")

    start: Source | None = None
    """Model to continue from: a Hugging Face directory, `s3://bucket/prefix`, a hub name such as
    `FacebookAI/xlm-roberta-base`, or `models:/NAME@ALIAS`. System infoxlm takes models of the types xlm-roberta,
    roberta, bert and distilbert, with or without a head, and exports them in their own class. The sizes of this model
    replace the sizes below. null: random weights."""

    layers: Annotated[Whole, Field(gt=0, le=1000)] = 12
    """Number of Transformer layers: 12 in the base size, 24 in the large size."""

    hidden: Annotated[Whole, Field(gt=0, le=2**17)] = 768
    """Number of dimensions of the hidden vector of a token. It must be a multiple of `heads`."""

    ffn: Annotated[Whole, Field(gt=0, le=2**20)] = 3072
    """Number of dimensions inside the feed-forward part of a layer. XLM-R uses four times `hidden`."""

    heads: Annotated[Whole, Field(gt=0, le=2**12)] = 12
    """Number of attention heads of each layer. In XLM-R, each head has 64 dimensions."""

    max_tokens: Annotated[Whole, Field(gt=0, le=2**20)] = 512
    """Number of tokens of the longest sequence that the model can read, special tokens included."""

    frozen: Annotated[int | Literal["none", "embeddings"], layer_count_or("none", "embeddings")] = "none"
    """Weights of the start that are not trained. Frozen weights need no memory for gradients and Adam moments. none:
    all weights are trained · embeddings: the embeddings of words, positions and token types · a number n: the
    embeddings and the n lowest layers."""

    dropout: Share = 0.0
    """Dropout probability of embeddings, attention weights and layer outputs. The command of the released code uses 0.
    Exact comparisons of runs also need 0."""

    sharded: Flag = False
    """Whether W workers each store 1/W of the weights, gradients, Adam moments and key encoder. They gather each layer
    when they compute it. Use it if the encoder does not fit into memory. It needs 16 / W instead of 16 bytes per
    parameter. It is slower and gives the same result."""

    recompute: Flag = False
    """Whether layers store only their input, and compute the rest again in the backward pass. Use it if micro-batches
    do not fit into memory. In bf16, it stores 2 instead of 38 bytes per token, layer and hidden dimension. It computes
    a third more matrix products and gives the same result."""

    compiled: Flag = True
    """Whether PyTorch compiles the layers on GPUs. Compiled layers are faster, but compilation takes about a minute at
    the start. On CPUs and without a C compiler, layers are not compiled."""

    precision: Literal["auto", "bf16"] = "auto"
    """Number format of matrix products; weights, Adam moments and sums are fp32. auto: bf16 on GPUs, fp32 on CPUs ·
    bf16: bf16 everywhere, which is slow on CPUs without bf16 instructions."""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        return self


class Objective:
    """Marks a config field as the weight of an objective, and names the systems that support the objective."""

    def __init__(self, *systems: str) -> None:
        self.systems = systems


class ObjectivesConfig(StageConfig):
    """Weights of the objectives' losses, whose weighted sum is minimised (0 disables an objective), and how tokens are
    masked."""

    mlm: Annotated[Weight, Objective("infoxlm", "xlm", "bert")] = 1.0
    """Weight of masked language modelling (MLM) on text of one language."""

    tlm: Annotated[Weight, Objective("infoxlm", "xlm")] = 1.0
    """Weight of translation language modelling (TLM), which masks tokens of a translation pair in one sequence."""

    xlco: Annotated[Weight, Objective("infoxlm")] = 1.0
    """Weight of cross-lingual contrast (XLCO) on translation pairs; see `contrast`."""

    clm: Annotated[Weight, Objective("xlm")] = 0.0
    """Weight of causal language modelling (CLM); only for system xlm."""

    nsp: Annotated[Weight, Objective("bert")] = 0.0
    """Weight of next-sentence prediction (NSP); only for system bert."""

    weighting: Literal["mean", "count"] = "mean"
    """Number by which the summed loss of an objective is divided. mean: the number of its own targets · count: the
    number of targets of all objectives together (as in the released code)."""

    mask_ratio: Share = 0.15
    """Share of the tokens of a sequence that MLM and TLM predict."""

    mask_share: Share = 0.8
    """Share of the predicted tokens that are replaced by `<mask>`."""

    keep_share: Share = 0.1
    """Share of the predicted tokens that stay unchanged. The remaining predicted tokens (0.1 by default) are replaced
    by random tokens."""

    masking: Literal["exact", "released", "xlm", "bert"] = "exact"
    """How predicted tokens are chosen, where u is uniform in [0, 1). exact: floor(mask_ratio * length + u) of all
    positions; random tokens are never special tokens · released: as exact, but a random token may be `<mask>` · xlm:
    each position except the first, with probability mask_ratio; random tokens come from all ids · bert: max(1,
    round(mask_ratio * length)) of the positions without special tokens."""

    whole_words: Flag = False
    """Whether all pieces of a word are masked together."""

    @classmethod
    def systems(cls) -> dict[str, tuple[str, ...]]:
        """Return the names of the systems that support each objective: objective -> systems."""
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
    def _check_shares_and_weights(self) -> Self:
        if not self.weights():
            raise ValueError(f"at least one of {', '.join(self.systems())} must be above 0")
        if self.mask_share + self.keep_share > 1:
            raise ValueError("mask_share + keep_share must not exceed 1")
        return self


class ContrastConfig(StageConfig):
    """Cross-lingual contrast (InfoXLM, section 3.3) with momentum, queue and mixup."""

    added_later: ClassVar[tuple[str, ...]] = ("margin", "projection")

    layer: Annotated[int | Literal["last"], layer_count_or("last")] = 8
    """Number of the universal layer, counted from 1. This is the Transformer layer whose output is contrasted. last:
    the top layer, which public sentence encoders use."""

    queue_size: PositiveInt = 131_072
    """Number of keys of earlier steps that serve as negatives."""

    enqueue: Literal["step", "micro_batch"] = "step"
    """When new keys enter the queue. step: once per optimizer step, after the update, so that the result does not
    depend on the micro-batch size · micro_batch: after each micro-batch's loss, before the update (as in the released
    code)."""

    momentum: Share = 0.999
    """Momentum m of the key encoder, which is updated once per optimizer step: key = m * key + (1 - m) * query."""

    momentum_schedule: Literal["constant", "linear", "exponential", "refresh"] = "constant"
    """How the momentum changes during training. constant: always `momentum` · linear: from `momentum` at the first step
    to 1 at the last · exponential: 1 - t^-momentum_alpha at step t, at most `momentum` · refresh: 0 every
    `refresh_every` steps, else `momentum`."""

    momentum_alpha: PositiveFloat = 1.0
    """Exponent of the exponential momentum schedule; other schedules ignore it."""

    refresh_every: PositiveInt = 1_000
    """Optimizer steps from one copy of the query encoder to the next in the refresh schedule; other schedules ignore
    it."""

    temperature: PositiveFloat = 0.25
    """Number by which the dot products of queries and keys are divided. Lower values sharpen the softmax. With
    `normalise`, use about 0.05."""

    normalise: Flag = False
    """Whether queries and keys are scaled to unit length before their dot product."""

    margin: Annotated[Number, Field(ge=0)] = 0.0
    """Margin that is subtracted from the similarity of a query and its translation, before the division by
    `temperature`. The translation must then be more similar than other sentences by this margin (LaBSE, Feng et al.
    2022; not in the paper). 0: no margin. With `normalise`, use 0.1 to 0.3."""

    pooling: Literal["cls", "mean"] = "cls"
    """Vector that represents a sentence. cls: the vector of its first token, which needs a pre-trained start such as
    XLM-R · mean: the mean of the vectors of its tokens, which also works from random weights."""

    projection: Literal["linear", "none"] = "linear"
    """Layer between the pooled vector and the contrast. linear: a trained matrix with random initial weights · none: no
    layer. Use none if the start is a sentence encoder, because a random matrix would distort its vectors."""

    symmetric: Flag = False
    """Whether the loss is the mean of both directions, source to target and target to source. Only keys of the target
    side are enqueued."""

    in_batch_negatives: Flag = False
    """Whether the other keys of the micro-batch are also negatives. The size of the micro-batch then changes the
    result."""

    mixup: Share = 1.0
    """Probability that a pair is joined with another pair before contrast."""

    partner: Literal["other_corpus", "next"] = "other_corpus"
    """Pair that mixup adds to a pair. other_corpus: a random pair of another corpus, if there is one · next: the next
    pair of the same corpus, which is the same in every epoch (as in the released code)."""

    cross: Share = 0.5
    """Probability that the joined pair's sides are swapped, so that each view mixes two languages."""

    corruption: Share = 0.0
    """Share of the tokens of both sides that are masked but not predicted. The released code uses 0.15."""

    false_negatives: Literal["overlap", "exact", "off"] = "overlap"
    """Which keys are excluded as false negatives. overlap: keys that share a sentence with the query · exact: keys of
    exactly the query's sentences · off: none. Two sentences are the same if their English sides are equal."""

    start_step: NonNegativeInt = 0
    """Number of optimizer steps before contrast begins. The key encoder then starts as a copy of the query encoder."""

    def resolve_layer(self, layer_count: int) -> int:
        """Return the number of the universal layer in an encoder with this number of layers."""
        return layer_count if self.layer == "last" else self.layer


class BatchesConfig(StageConfig):
    """Sizes of the batches of an optimizer step."""

    added_later: ClassVar[tuple[str, ...]] = ("window",)

    global_batch_size: Annotated[Whole, Field(gt=0, le=2**24)] = 2048
    """Number of samples of each objective per optimizer step, over all workers. It must be a multiple of
    `virtual_shards`."""

    virtual_shards: Annotated[Whole, Field(gt=0, le=2**20)] = 64
    """Number of fixed slices of the global batch. The slices are divided among the workers, so there can be no more
    workers than slices. With dropout, no micro-batch is larger than a slice."""

    micro_batch_size: Annotated[Whole, Field(gt=0, le=2**20)] = 32
    """Number of samples of each objective per forward pass of a worker. It changes memory and speed. It changes the
    result only if there is dropout."""

    block_tokens: Annotated[Whole, Field(gt=0, le=2**20)] = 512
    """Largest number of tokens of an MLM sequence, special tokens included."""

    side_tokens: Annotated[Whole, Field(gt=0, le=2**20)] = 254
    """Largest number of tokens of one side of a pair, without special tokens."""

    alpha: Share = 0.7
    """Exponent of the language distribution. A language or language pair with n samples is drawn with a probability
    proportional to n^alpha."""

    window: Annotated[Whole, Field(gt=0, le=2**50)] = 2_000_000_000
    """Number of bytes of token shards from which a step draws its text for MLM. The same number applies to pairs. If
    there is more text, the window moves through it during the training, in a random order of parts of 4 MB."""

    @model_validator(mode="after")
    def _check_batch_size(self) -> Self:
        if self.global_batch_size % self.virtual_shards:
            raise ValueError(
                f"global_batch_size ({self.global_batch_size}) must be a multiple of "
                f"virtual_shards ({self.virtual_shards})"
            )
        return self


class ProbeConfig(StageConfig):
    """Retrieval among a few held-out pairs during training. It does not change the result."""

    every: NonNegativeInt = 1_000
    """Number of optimizer steps from one probe of retrieval to the next. 0: no probes."""

    pairs: PositiveInt = 100
    """Number of held-out pairs of each language pair."""


class PretrainingConfig(StageConfig):
    """Pre-trains InfoXLM, or one of the systems it is compared with, on token shards."""

    added_later: ClassVar[tuple[str, ...]] = ("guard", "tokens")

    system: Literal["infoxlm", "xlm", "bert"] = "infoxlm"
    """System to pre-train. infoxlm: XLM-R's encoder on MLM, TLM and XLCO (also Unicoder and all ablations) · xlm:
    language embeddings, continuous streams of text, and one objective and one language (pair) per step · bert: segment
    embeddings and next-sentence pairs."""

    model: ModelConfig = ModelConfig()
    objectives: ObjectivesConfig = ObjectivesConfig()
    contrast: ContrastConfig = ContrastConfig()
    batches: BatchesConfig = BatchesConfig()
    optimization: OptimizationConfig = OptimizationConfig()
    guard: GuardConfig = GuardConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    probe: ProbeConfig = ProbeConfig()
    tokens: NonNegativeInt = 0
    """Number of tokens of the whole run, over all objectives and both encoders of XLCO. Use it to compare systems at
    equal cost. `optimization.steps` is then calculated from the tokens of the first 100 steps. 0: `optimization.steps`
    determines the length of the run."""

    log_every: PositiveInt = 10
    """Number of optimizer steps between two points of the logged curves."""

    seed: NonNegativeInt = 1
    """Seed of the initial weights, samples, masks and dropout. Two runs with the same seed have the same results."""

    def result_fields(self) -> dict[str, Any]:
        """Return the fields that affect the result. A run can resume if they are unchanged."""
        values = super().result_fields()
        for name in ("sharded", "recompute", "compiled"):  # they change memory and speed only
            del values["model"][name]
        return values

    @property
    def max_sequence_tokens(self) -> int:
        """The number of tokens of the longest sequence."""
        pair_tokens = 2 * self.batches.side_tokens + 3  # with three special tokens
        return max(self.batches.block_tokens, pair_tokens)

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        """Check that the layers and sequences of the other sections fit the model."""
        if self.model.start is not None:
            return self  # the sizes of the start are known only when it is loaded
        universal_layer = self.contrast.resolve_layer(self.model.layers)
        if self.system == "infoxlm" and universal_layer > self.model.layers:
            raise ValueError(f"contrast.layer ({self.contrast.layer}) is above model.layers ({self.model.layers})")
        if self.max_sequence_tokens > self.model.max_tokens:
            raise ValueError(
                f"sequences of {self.max_sequence_tokens} tokens (batches.block_tokens, or 2 * batches.side_tokens "
                f"+ 3) exceed model.max_tokens ({self.model.max_tokens})"
            )
        return self

    @model_validator(mode="after")
    def _check_start_of_contrast(self) -> Self:
        """Check that the steps before the contrast have an objective, and that all steps cost the same if they must."""
        has_only_contrast = self.objectives.xlco and not (self.objectives.mlm or self.objectives.tlm)
        if self.contrast.start_step and has_only_contrast:
            raise ValueError(
                f"contrast.start_step ({self.contrast.start_step}) leaves no objective for the steps before it: "
                "set it to 0"
            )
        if self.tokens and self.contrast.start_step:
            raise ValueError("tokens needs steps of equal cost: set tokens or contrast.start_step to 0")
        return self

    @model_validator(mode="after")
    def _check_system(self) -> Self:
        """Check that the system has the objectives and the options of the model that are set."""
        systems_of_objectives = ObjectivesConfig.systems()
        for objective in self.objectives.weights():
            if self.system not in systems_of_objectives[objective]:
                raise ValueError(f"system {self.system} has no objective {objective}: set objectives.{objective} to 0")
        if self.model.frozen != "none" and (self.model.start is None or self.system != "infoxlm"):
            raise ValueError(
                f"model.frozen ({self.model.frozen}) needs a start and system infoxlm: set model.start or frozen: none"
            )
        if self.model.sharded and self.system != "infoxlm":
            raise ValueError(f"system {self.system} cannot be sharded: set model.sharded to false")
        return self
