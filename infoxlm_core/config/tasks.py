"""Configs of what is done with an encoder: fine-tuning on a task, retrieval, `evaluate` and `register`."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from infoxlm_core.config.base import Language, Name, Share, StageConfig, Weight
from infoxlm_core.config.training import CheckpointsConfig, OptimizationConfig
from infoxlm_core.errors import ConfigError

Paths = Annotated[tuple[str, ...], Field(min_length=1)]
Vector = Annotated[str, Field(pattern=r"^(mean|mean_no_special|cls|contrast)@([0-9]+|last|contrast|best)$")]


class SelectionConfig(StageConfig):
    """Which moment of a fine-tuning is kept, judged on development sets."""

    rule: Literal["last", "source", "joint", "each"] = "last"
    """last: the weights after the last step · source: the best on the development set of the first training language
    (strictly zero-shot; XTREME) · joint: the best mean over the development sets of all languages (#M=1; InfoXLM) ·
    each: for every language the best on its own (#M=N; XLM, mBERT)."""

    every: PositiveInt = 5_000
    """Optimizer steps between two evaluations on the development sets; the last step is always evaluated."""


class TuningConfig(OptimizationConfig):
    """AdamW as fine-tuning uses it: no weight decay, BERT's betas and epsilon."""

    steps: PositiveInt = 10_000
    """Optimizer steps, warm-up included; not read if `epochs` is set."""

    learning_rate: PositiveFloat = 7e-6
    """Peak, reached after `warmup_steps` updates."""

    warmup_steps: NonNegativeInt = 1_000
    """Updates of the linear warm-up; not read if `epochs` is set."""

    betas: tuple[Share, Share] = (0.9, 0.999)
    """Adam's decay rates of the two moments."""

    epsilon: PositiveFloat = 1e-8
    """Adam's term in the denominator."""

    weight_decay: Weight = 0.0
    """Decoupled, times the learning rate. At 0 only word embeddings of tokens that occur are trained."""


class RecipeConfig(StageConfig):
    """What fine-tuning on any task needs."""

    max_tokens: PositiveInt = 256
    """Of one sequence, special tokens included."""

    batch_size: PositiveInt = 32
    """Sequences of one optimizer step, over all workers."""

    micro_batch_size: PositiveInt = 32
    """Sequences of one forward pass; changes memory and speed and, without dropout, never the result."""

    dropout: Share = 0.0
    """In the encoder; the paper's group used 0.1. Above 0 attention on a GPU is slower, sequence by sequence, and what
    is dropped depends on how a batch is split: on `micro_batch_size` and the number of workers."""

    epochs: PositiveInt | None = None
    """Passes over the training text; then they decide `optimization.steps`, and `warmup_share` the warm-up."""

    warmup_share: Share = 0.1
    """Part of all steps, if `epochs` is given."""

    optimization: TuningConfig = TuningConfig()
    selection: SelectionConfig = SelectionConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig(every=1_000)
    log_every: PositiveInt = 10
    """Optimizer steps between two points of the curves."""

    seed: NonNegativeInt = 1
    """Decides the head's initial weights, the order of examples and dropout."""


class FinetuningConfig(RecipeConfig):
    """Encoder + labelled text -> classifier of sentences or sentence pairs (XNLI, PAWS-X, SIB-200, any table)."""

    task: Literal["classification"] = "classification"
    """The kind of task."""

    data: str | Paths | None = None
    """CSV, TSV or Parquet files, or folders in the layout of XNLI, XNLI-MT, XTREME, PAWS-X or SIB-200; none: the
    labelled set of the prepared corpus."""

    text: str = "text"
    """Column of the sentence; in a file without a header the first."""

    text_pair: str | None = None
    """Column of the second sentence of a pair, if there is one; in a file without a header the second."""

    label: str = "label"
    """Column of the label; in a file without a header the last."""

    language: str = "language"
    """Column of the language code; not needed where the file's name says it, as `train-en.tsv` does."""

    split: str = "split"
    """Column that says train, dev or test; a file without it is training text, unless its name says another. If no
    file says any, a tenth of the rows is set aside as a test."""

    train_languages: tuple[Language, ...] = ("en",)
    """Languages to train on; every language is tested."""

    mixed: bool = False
    """Also test premises of one language with hypotheses of another, every two languages."""

    head_dropout: Share = 0.1
    """Before the classifier's layers."""


class AnsweringConfig(RecipeConfig):
    """Encoder + questions about paragraphs, in SQuAD's format -> a reader that marks the answer (MLQA, XQuAD)."""

    task: Literal["question_answering"] = "question_answering"
    """The kind of task."""

    train: Paths
    """Files in SQuAD's format."""

    dev: tuple[str, ...] = ()
    """Files or folders of development sets, a file a language; for the rules of selection but `last`."""

    test: Paths
    """Files or folders in the layout of MLQA, XQuAD or TyDiQA: `test-context-de-question-de.json`, `xquad.de.json`."""

    normaliser: Literal["mlqa", "squad"] = "squad"
    """How answers are compared: as MLQA does in its seven languages, or as SQuAD does (XQuAD, TyDiQA)."""

    mixed: bool = False
    """Also questions of one language about paragraphs of another, where there are such files."""

    max_tokens: PositiveInt = 384
    """Of one window: question, part of the paragraph, special tokens."""

    question_tokens: PositiveInt = 64
    """Longer questions are cut."""

    stride: PositiveInt = 128
    """Tokens of the paragraph that two windows share."""

    answer_tokens: PositiveInt = 30
    """Longer answers are not given."""

    n_best: PositiveInt = 20
    """Starts and ends that are combined."""

    @model_validator(mode="after")
    def _windows_move(self) -> Self:
        if self.question_tokens + self.stride + 4 >= self.max_tokens:
            raise ValueError(
                f"max_tokens ({self.max_tokens}) must exceed question_tokens ({self.question_tokens}) + stride "
                f"({self.stride}) + 4 special tokens"
            )
        if self.selection.rule != "last" and not self.dev:
            raise ValueError(f"selection.rule {self.selection.rule} needs development sets: give dev")
        return self


class RetrievalConfig(StageConfig):
    """Encoder + aligned sentences -> how often the translation is the nearest (Tatoeba, NTREX, FLORES, your own)."""

    task: Literal["retrieval"] = "retrieval"
    """The kind of task."""

    data: str
    """Folder of aligned files: LASER's `tatoeba.deu-eng.deu` and `.eng`, or NAME.en-de.en and NAME.en-de.de, or one
    file a language, line by line translations of each other, or en-de.tsv; or a prepared corpus, for its held-out
    pairs."""

    pivot: Language = "en"
    """The language that all others are aligned with."""

    languages: Literal["all", "14", "22", "36"] | Annotated[tuple[Language, ...], Field(min_length=1)] = "all"
    """all there are · 14, 22, 36: the paper's Tables 2, 3 and both · or a list."""

    vectors: Annotated[tuple[Vector, ...], Field(min_length=1)] = ("mean@best", "cls@last")
    """POOLING@LAYER. Pooling: mean (of all tokens), mean_no_special, cls, contrast (projected, as in pre-training).
    Layer: a number as in Hugging Face's hidden_states, last, contrast (that of pre-training) or best (chosen on this
    very set by the mean of both directions). The first one gives the main scores."""

    prefix: str = ""
    """Put before every sentence, for models that were trained with one, such as `query: `."""

    margin: bool = False
    """Compare by ratio margin over 4 neighbours (Artetxe & Schwenk 2019) instead of cosine."""

    batch_size: PositiveInt = 64
    """Sentences of one forward pass; changes memory and speed, not the result."""

    max_tokens: PositiveInt = 512
    """Of one sentence, special tokens included; longer ones are cut."""


class EvaluationConfig(StageConfig):
    """Models + test sets -> scores, tables, figures."""

    retrieval_pairs: PositiveInt = 1000
    """Held-out pairs a language, drawn once by `seed`."""

    perplexity_sentences: PositiveInt = 500
    """Held-out sentences a language, each masked once by `seed`."""

    batch_size: PositiveInt = 64
    """Sentences of one forward pass."""

    max_tokens: PositiveInt = 256
    """Of one sentence, special tokens included; longer ones are cut."""

    seed: NonNegativeInt = 1
    """Draws pairs, sentences and masks; equal for all models that are compared."""


class RegistrationConfig(StageConfig):
    """A model -> a version in the registry."""

    name: Name = "infoxlm"
    """Name of the registered model."""

    metric: str = "retrieval/best"
    """The score on which candidate and champion are compared, question by question; higher is better."""

    gate: dict[str, float] = Field(default_factory=dict)
    """Metric -> its least gain over the champion: the lower end of the 95 % interval must lie above it. Below 0, as in
    classification/mean: -0.005, it is the loss that is tolerated. `metric` must gain (0) if it is not named."""

    @property
    def gates(self) -> dict[str, float]:
        """All metrics of the gate, with the least gain of each."""
        return {self.metric: 0.0, **self.gate}


class MeasureConfig(StageConfig):
    """One task of a suite: what is measured, with which seeds, over which grid."""

    settings: Annotated[FinetuningConfig | AnsweringConfig | RetrievalConfig, Field(discriminator="task")]
    """The task's own settings, of which `task` says the kind: as a run's section `finetuning`, `question_answering` or
    `retrieval`."""

    grid: dict[str, Annotated[tuple[float | int | str, ...], Field(min_length=1)]] = Field(default_factory=dict)
    """Field of `settings`, dotted, -> values to try; the best on the development sets is reported."""

    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = (1,)
    """Of fine-tuning; mean and deviation are reported."""

    table: Literal["xnli", "mlqa", "tatoeba", "none"] = "none"
    """Published numbers that stand beside ours."""


class SuiteConfig(StageConfig):
    """Encoders x tasks -> tables, figures and metrics."""

    models: Annotated[dict[Name, str], Field(min_length=1)]
    """Name -> a directory, s3://bucket/prefix, a name on the hub, or models:/NAME@ALIAS. The first is the one under
    test; the others are floors and peers."""

    tasks: Annotated[dict[Name, MeasureConfig], Field(min_length=1)]
    """Name, which begins the names of its metrics -> what is measured."""

    @model_validator(mode="before")
    @classmethod
    def _read_lists(cls, values: Any) -> Any:
        """Take also what `listed` gives."""
        if not isinstance(values, dict):
            return values
        lists = {key: values[key] for key in ("models", "tasks") if isinstance(values.get(key), list)}
        for key, items in lists.items():
            names = [item.get("name") if isinstance(item, dict) else None for item in items]
            if None in names or len(set(names)) < len(names):
                raise ValueError(f"{key}: every item of the list needs a name of its own, not {names}")
        if "models" in lists:
            values = values | {"models": {item["name"]: item.get("source") for item in lists["models"]}}
        if "tasks" in lists:
            tasks = {item["name"]: {k: v for k, v in item.items() if k != "name"} for item in lists["tasks"]}
            values = values | {"tasks": tasks}
        return values

    def choose(self, tasks: Sequence[str]) -> Self:
        """Only some of the tasks, in the order of the config; all of them if none is named.

        Raises:
            ConfigError: there is no such task.
        """
        for name in tasks:
            if name not in self.tasks:
                raise ConfigError(f"no task {name!r}; known are {', '.join(self.tasks)}")
        chosen = {name: task for name, task in self.tasks.items() if name in tasks or not tasks}
        return self.model_copy(update={"tasks": chosen})

    def listed(self) -> dict[str, Any]:
        """The config as plain values in lists: KFP's mappings forget their order, and the first model is special."""
        values = self.model_dump(mode="json", exclude_none=True)
        return {
            "models": [{"name": name, "source": source} for name, source in values["models"].items()],
            "tasks": [{"name": name, **task} for name, task in values["tasks"].items()],
        }
