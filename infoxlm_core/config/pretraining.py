"""Config of `pretrain`: model, objectives, contrast and batches."""

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
    layer_number_or,
)
from infoxlm_core.config.training import CheckpointsConfig, GuardConfig, OptimizationConfig

RunName = Annotated[str, Field(pattern=r"^([A-Za-z0-9][\w.-]*)?$")]


class ModelConfig(StageConfig):
    """Encoder size, or the model from which training starts."""

    added_later: ClassVar[tuple[str, ...]] = ("frozen", "precision")

    start: Source | None = None
    """Model to continue from: a Hugging Face directory, `s3://bucket/prefix`, a hub name such as
    `FacebookAI/xlm-roberta-base`, or `models:/NAME@ALIAS`. System infoxlm accepts the model types xlm-roberta, roberta,
    bert and distilbert, with or without a head, and exports the same type. The sizes of this model replace the sizes
    below. null: random weights."""

    layers: Annotated[Whole, Field(gt=0, le=1000)] = 12
    """Number of Transformer layers: 12 in the base size, 24 in the large size."""

    hidden: Annotated[Whole, Field(gt=0, le=2**17)] = 768
    """Number of dimensions of a token's hidden vector. It must be a multiple of `heads`."""

    ffn: Annotated[Whole, Field(gt=0, le=2**20)] = 3072
    """Number of dimensions inside each layer's feed-forward block. XLM-R uses four times `hidden`."""

    heads: Annotated[Whole, Field(gt=0, le=2**12)] = 12
    """Number of attention heads per layer. In XLM-R, each head has 64 dimensions."""

    max_tokens: Annotated[Whole, Field(gt=0, le=2**20)] = 512
    """Largest sequence length that the model can read, in tokens including special tokens."""

    frozen: Annotated[int | Literal["none", "embeddings"], layer_number_or("none", "embeddings")] = "none"
    """Weights of `start` that are not trained. Frozen weights need no memory for gradients and Adam moments. none: all
    weights are trained · embeddings: the embeddings of words, positions and token types · a number n: the embeddings
    and the n lowest layers."""

    dropout: Share = 0.0
    """Dropout probability of embeddings, attention weights and layer outputs. The training command of the released code
    uses 0. Exact comparisons of runs also need 0."""

    sharded: Flag = False
    """Whether each of W workers stores only 1/W of the weights, gradients, Adam moments and key encoder. Workers gather
    each layer's weights when they compute the layer. Sharding reduces the memory per parameter from 16 to 16 / W bytes,
    for encoders that do not fit into memory. Training is slower, with the same result."""

    recompute: Flag = False
    """Whether layers store only their input, and recompute their activations in the backward pass. In bf16,
    recomputation reduces the memory per token, layer and hidden dimension from 38 to 2 bytes, for micro-batches that do
    not fit into memory. Training computes a third more matrix products, with the same result."""

    compiled: Flag = True
    """Whether PyTorch compiles the layers on GPUs. Compiled layers are faster, but compilation takes about a minute at
    the start of training. On CPUs and without a C compiler, layers are not compiled."""

    precision: Literal["auto", "bf16"] = "auto"
    """Number format of matrix products. Weights, Adam moments and sums are always fp32. auto: bf16 on GPUs, fp32 on
    CPUs · bf16: bf16 everywhere, which is slow on CPUs without bf16 instructions."""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        return self


class Objective:
    """Marks a config field as an objective's weight, and names the systems that support the objective."""

    def __init__(self, *systems: str) -> None:
        self.systems = systems


class ObjectivesConfig(StageConfig):
    """Loss weights of the objectives, and the choice of masked tokens. Training minimizes the weighted sum of the
    losses. Weight 0 disables an objective."""

    mlm: Annotated[Weight, Objective("infoxlm", "xlm", "bert")] = 1.0
    """Weight of masked language modeling (MLM) on text of one language."""

    tlm: Annotated[Weight, Objective("infoxlm", "xlm")] = 1.0
    """Weight of translation language modeling (TLM), which masks tokens of a translation pair in one sequence."""

    xlco: Annotated[Weight, Objective("infoxlm")] = 1.0
    """Weight of cross-lingual contrast (XLCO) on translation pairs; see `contrast`."""

    clm: Annotated[Weight, Objective("xlm")] = 0.0
    """Weight of causal language modeling (CLM); only for system xlm."""

    nsp: Annotated[Weight, Objective("bert")] = 0.0
    """Weight of next-sentence prediction (NSP); only for system bert."""

    weighting: Literal["mean", "count"] = "mean"
    """Divisor of an objective's summed loss. mean: the number of targets of this objective · count: the number of
    targets of all objectives together (as in the released code)."""

    mask_ratio: Share = 0.15
    """Share of a sequence's tokens that MLM and TLM predict."""

    mask_share: Share = 0.8
    """Share of the predicted tokens that are replaced by `<mask>`."""

    keep_share: Share = 0.1
    """Share of the predicted tokens that stay unchanged. The remaining predicted tokens (0.1 by default) are replaced
    by random tokens."""

    masking: Literal["exact", "released", "xlm", "bert"] = "exact"
    """How predicted tokens are chosen, where u is uniform in [0, 1). exact: floor(mask_ratio * length + u) of all
    positions; random tokens are never special tokens · released: like exact, but a random token may be `<mask>` · xlm:
    each position except the first, with probability mask_ratio; random tokens come from all ids · bert: max(1,
    round(mask_ratio * length)) of the positions without special tokens."""

    whole_words: Flag = False
    """Whether all pieces of a word are masked together."""

    @classmethod
    def systems(cls) -> dict[str, tuple[str, ...]]:
        """Return a mapping from objective to the names of the systems that support it."""
        systems = {}
        for name, field in cls.model_fields.items():
            for mark in field.metadata:
                if isinstance(mark, Objective):
                    systems[name] = mark.systems
        return systems

    def weights(self) -> dict[str, float]:
        """Return the weight of each enabled objective."""
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

    layer: Annotated[int | Literal["last"], layer_number_or("last")] = 8
    """Number of the universal layer, counted from 1: the Transformer layer whose output is contrasted. last: the top
    layer, as in public sentence encoders."""

    queue_size: PositiveInt = 131_072
    """Number of keys from earlier steps that serve as negatives."""

    enqueue: Literal["step", "micro_batch"] = "step"
    """When new keys enter the queue. step: once per optimizer step, after the update, so that the result does not
    depend on the micro-batch size · micro_batch: after each micro-batch's loss, before the update (as in the released
    code)."""

    momentum: Share = 0.999
    """Momentum m of the key encoder, which is updated once per optimizer step: key = m * key + (1 - m) * query."""

    momentum_schedule: Literal["constant", "linear", "exponential", "refresh"] = "constant"
    """How the momentum changes during training. constant: always `momentum` · linear: from `momentum` at the first step
    to 1 at the last · exponential: 1 - t^-momentum_alpha at step t, at most `momentum` · refresh: 0 at every
    `refresh_every`-th step, otherwise `momentum`."""

    momentum_alpha: PositiveFloat = 1.0
    """Exponent of the exponential momentum schedule; other schedules ignore it."""

    refresh_every: PositiveInt = 1_000
    """Number of optimizer steps between copies of the query encoder in the refresh schedule; other schedules ignore
    it."""

    temperature: PositiveFloat = 0.25
    """Divisor of the dot products of queries and keys. Lower values sharpen the softmax. With `normalise`, use about
    0.05."""

    normalise: Flag = False
    """Whether queries and keys are scaled to unit length before their dot product."""

    margin: Annotated[Number, Field(ge=0)] = 0.0
    """Margin by which a query must be more similar to its translation than to other sentences (LaBSE, Feng et al. 2022;
    not in the paper). It is subtracted from the similarity of query and translation, before the division by
    `temperature`. 0: no margin. With `normalise`, use 0.1 to 0.3."""

    pooling: Literal["cls", "mean"] = "cls"
    """Vector that represents a sentence. cls: the first token's vector, which needs a pre-trained start such as XLM-R ·
    mean: the mean of the token vectors, which also works from random weights."""

    projection: Literal["linear", "none"] = "linear"
    """Layer between the pooled vector and the contrast. linear: a trained matrix with random initial weights · none: no
    layer. Use none if training starts from a sentence encoder, because a random matrix would distort its vectors."""

    symmetric: Flag = False
    """Whether the loss is the mean of both directions, source to target and target to source. Only keys of the target
    side are enqueued."""

    in_batch_negatives: Flag = False
    """Whether the other keys of the micro-batch are also negatives. If so, `micro_batch_size` changes the result."""

    mixup: Share = 1.0
    """Probability that a pair is joined with another pair before contrast."""

    partner: Literal["other_corpus", "next"] = "other_corpus"
    """Pair with which mixup joins a pair. other_corpus: a random pair from a different corpus, if the run has several
    corpora · next: the next pair of the same corpus, which is the same pair in every epoch (as in the released
    code)."""

    cross: Share = 0.5
    """Probability that the joined pair's sides are swapped, so that each view mixes two languages."""

    corruption: Share = 0.0
    """Share of tokens that are masked but not predicted, on both sides. The released code uses 0.15."""

    false_negatives: Literal["overlap", "exact", "off"] = "overlap"
    """Keys that are excluded as false negatives. overlap: keys that share a sentence with the query · exact: keys of
    exactly the query's sentences · off: none. Sentences with equal English sides count as the same sentence."""

    start_step: NonNegativeInt = 0
    """Number of optimizer steps before contrast begins. The key encoder then starts as a copy of the query encoder."""

    def resolve_layer(self, layer_count: int) -> int:
        """Return the number of the universal layer in an encoder with `layer_count` layers."""
        return layer_count if self.layer == "last" else self.layer


class BatchesConfig(StageConfig):
    """Batch sizes and sequence lengths of an optimizer step."""

    added_later: ClassVar[tuple[str, ...]] = ("window",)

    global_batch_size: Annotated[Whole, Field(gt=0, le=2**24)] = 2048
    """Number of samples of each objective per optimizer step, over all workers. It must be a multiple of
    `virtual_shards`."""

    virtual_shards: Annotated[Whole, Field(gt=0, le=2**20)] = 64
    """Number of fixed slices of the global batch. The slices are divided among the workers, so the number of workers
    cannot exceed the number of slices. With dropout, no micro-batch is larger than a slice."""

    micro_batch_size: Annotated[Whole, Field(gt=0, le=2**20)] = 32
    """Number of samples of each objective per forward pass of a worker. It changes memory and speed, and with dropout
    also the result."""

    block_tokens: Annotated[Whole, Field(ge=5, le=2**20)] = 512  # BERT: [CLS], two [SEP] and a token for each part
    """Largest length of an MLM sequence, in tokens including special tokens."""

    side_tokens: Annotated[Whole, Field(gt=0, le=2**20)] = 254
    """Largest length of one side of a pair, in tokens without special tokens."""

    alpha: Share = 0.7
    """Exponent of the language distribution. A language or language pair with n samples is drawn with a probability
    proportional to n^alpha."""

    window: Annotated[Whole, Field(gt=0, le=2**50)] = 2_000_000_000
    """Size of the window of token shards from which a step draws its text for MLM, in bytes. A second window of the
    same size contains the pairs. If the text is larger, the window moves through it during training, in a random order
    of 4 MB parts."""

    @model_validator(mode="after")
    def _check_batch_size(self) -> Self:
        if self.global_batch_size % self.virtual_shards:
            raise ValueError(
                f"global_batch_size ({self.global_batch_size}) must be a multiple of "
                f"virtual_shards ({self.virtual_shards})"
            )
        return self


class ProbeConfig(StageConfig):
    """Retrieval among a few held-out pairs during training. Probes do not change the result."""

    every: NonNegativeInt = 1_000
    """Number of optimizer steps between probes. 0: no probes."""

    pairs: PositiveInt = 100
    """Number of held-out pairs per language pair."""


class ResumableCheckpointsConfig(CheckpointsConfig):
    """Interval between checkpoints, number of checkpoints to keep, and the run to resume."""

    resume: RunName = ""
    """Name of a pre-training run in the store's directory `runs`, such as `pretrained-3f2a…`. Training resumes from the
    newest checkpoint of this run, even if data, tokenizer or settings have changed. Each difference is logged. If
    empty, training does not resume a run whose inputs have changed."""


class PretrainingConfig(StageConfig):
    """Pre-trains InfoXLM, or a system for comparison, on token shards."""

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
    checkpoints: ResumableCheckpointsConfig = ResumableCheckpointsConfig()
    probe: ProbeConfig = ProbeConfig()
    tokens: NonNegativeInt = 0
    """Number of tokens of the whole run, over all objectives and both encoders of XLCO, for comparing systems at equal
    cost. `optimization.steps` is then calculated from the tokens of the first 100 steps. 0: `optimization.steps`
    determines the length of the run."""

    log_every: PositiveInt = 10
    """Number of optimizer steps between points of the logged curves."""

    seed: NonNegativeInt = 1
    """Seed of the initial weights, samples, masks and dropout. Two runs with the same seed have the same results."""

    def result_fields(self) -> dict[str, Any]:
        """Return the fields that affect the result. A run can resume if they are unchanged."""
        values = super().result_fields()
        for name in ("sharded", "recompute", "compiled"):  # change only memory and speed
            del values["model"][name]
        return values

    @property
    def max_sequence_tokens(self) -> int:
        """The length of the longest sequence, in tokens."""
        pair_tokens = 2 * self.batches.side_tokens + 3  # 3 special tokens
        return max(self.batches.block_tokens, pair_tokens)

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        """Check that sequences fit into the position embeddings and, for InfoXLM, that `contrast.layer` exists."""
        if self.model.start is not None:
            return self  # the start's sizes are known only after loading
        contrast_layer = self.contrast.resolve_layer(self.model.layers)
        if self.system == "infoxlm" and contrast_layer > self.model.layers:
            raise ValueError(
                f"contrast.layer ({self.contrast.layer}) is above model.layers ({self.model.layers}): set a lower layer"
            )
        if self.max_sequence_tokens > self.model.max_tokens:
            raise ValueError(
                f"sequences of {self.max_sequence_tokens} tokens (batches.block_tokens, or 2 * batches.side_tokens "
                f"+ 3) exceed model.max_tokens ({self.model.max_tokens}): set shorter sequences or a larger maximum"
            )
        return self

    @model_validator(mode="after")
    def _check_start_of_contrast(self) -> Self:
        """Check that another objective trains before `contrast.start_step`, which must be 0 if `tokens` is set."""
        has_only_contrast = self.objectives.xlco and not (self.objectives.mlm or self.objectives.tlm)
        if self.contrast.start_step and has_only_contrast:
            raise ValueError(
                f"contrast.start_step ({self.contrast.start_step}) leaves no objective for the steps before it: "
                "set it to 0"
            )
        if self.tokens and self.contrast.start_step:
            raise ValueError(
                f"tokens ({self.tokens}) needs steps of equal cost, but contrast.start_step "
                f"({self.contrast.start_step}) makes later steps more expensive: set one of the two to 0"
            )
        return self

    @model_validator(mode="after")
    def _check_system(self) -> Self:
        """Check that the system supports the configured objectives and model options."""
        systems_by_objective = ObjectivesConfig.systems()
        for objective in self.objectives.weights():
            if self.system not in systems_by_objective[objective]:
                raise ValueError(f"system {self.system} has no objective {objective}: set objectives.{objective} to 0")
        if self.model.frozen != "none" and (self.model.start is None or self.system != "infoxlm"):
            raise ValueError(
                f"model.frozen ({self.model.frozen}) needs model.start and system infoxlm: "
                "set both, or set model.frozen to none"
            )
        if self.model.sharded and self.system != "infoxlm":
            raise ValueError(f"system {self.system} cannot be sharded: set model.sharded to false")
        return self
