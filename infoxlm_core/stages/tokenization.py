"""Stage tokenize_corpus: prepared corpora -> a tokenizer and token shards.

tokenizer/                   sentencepiece.bpe.model and the equivalent tokenizer.json for `transformers`,
                             or unchanged copies of another model's tokenizer files
mono/, pairs/, held_out/     tables of token ids in parts, see data/shards.py
"""

import functools
import io
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import sentencepiece

from infoxlm_core import manifests, user_files
from infoxlm_core.config import TokenizationConfig
from infoxlm_core.corpora.parallel import CHUNK, ParallelMap, ProcessPoolMap
from infoxlm_core.corpora.tables import count_rows, translate_arrow_errors
from infoxlm_core.data.encoding import SerializedTokenizer, encode_chunk, load_encoder, serialize
from infoxlm_core.data.sampling import make_rng, probabilities
from infoxlm_core.data.shards import PAIR_COLUMNS, TEXT
from infoxlm_core.data.vocabulary import SPECIAL_TOKENS, Vocabulary
from infoxlm_core.data.writing import write_table
from infoxlm_core.errors import ConfigError, CorpusTooSmall, DataCorrupt, InputError, TokenizerMismatch
from infoxlm_core.model.huggingface import tokenizers
from infoxlm_core.progress import show_progress

logger = logging.getLogger(__name__)
MAX_REPEATS = 5  # repetitions of a training sentence; more would turn rare words into pieces
ADDED_IDS = 2  # <pad> and <mask>, which SentencePiece does not count
COMPARED_SENTENCES = 2_000  # sentences per language for comparing two tokenizers


def tokenize(
    config: TokenizationConfig, corpus: Path, output: Path, parallel_map: ParallelMap | None = None
) -> dict[str, Any]:
    """Train or copy the tokenizer, encode every corpus and write shards.

    Args:
        config: stage settings.
        corpus: a prepared corpus.
        output: artifact directory. The caller writes the manifest.
        parallel_map: function that encodes chunks of sentences; None for a pool of `config.processes` processes. It
            does not affect the result.

    Returns:
        Facts for the manifest: sequence and token counts, the tokenizer, and the sizes of all tables.

    Raises:
        InputError: `corpus` is not a prepared corpus, or `config.model` is not a tokenizer.
        ConfigError: the prefix contains a special token.
        CorpusTooSmall: there is too little text for a vocabulary of this size.
        TokenizerMismatch: the vocabulary size of `config.model` differs from the configured size, or tokenizer.json
            and SentencePiece differ.
    """
    manifest = manifests.load_verified(corpus, "corpus", producer="prepare_corpus")
    directory = output / "tokenizer"
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer, tokenizer_file = _make_tokenizer(config, corpus, directory)
    encode_in_parallel = parallel_map or ProcessPoolMap(config.processes)
    tables = _encode(corpus, tokenizer, config.block_tokens, output, encode_in_parallel)
    sequences = 0
    tokens = 0
    for name, table in tables.items():
        if not name.startswith("held_out/"):  # count only training text
            sequences_per_row = 2 if name.startswith("pairs/") else 1
            sequences += sequences_per_row * table["rows"]
            tokens += table["tokens"]
    logger.info("wrote %d sequences (%d tokens) to %s", sequences, tokens, output)
    shard_facts: dict[str, Any] = {
        "sequences": sequences,
        "tokens": tokens,
        "tokenizer": f"sha256:{manifests.file_sha256(directory / tokenizer_file)}",
        "corpus": manifest["digest"],
        "tables": tables,
        "block_tokens": config.block_tokens,
        **tokenizer.vocabulary.as_facts(),
    }
    # The manifest's digest covers the facts. Omit facts of unused options, which earlier versions did not write.
    if tokenizer_file != tokenizers.MODEL:
        shard_facts["tokenizer_file"] = tokenizer_file
    if config.prefix:
        shard_facts["prefix"] = config.prefix
    if "reserved" in manifest["facts"]:
        shard_facts["reserved"] = manifest["facts"]["reserved"]
    return shard_facts


# ---------------------------------------------------------------- tokenizer


class CreatedTokenizer(NamedTuple):
    """A tokenizer whose files have been written."""

    model: bytes  # a SentencePiece model or a serialized tokenizer.json
    vocabulary: Vocabulary
    special_tokens: list[str]
    file_name: str  # file whose digest identifies the tokenizer


def _make_tokenizer(config: TokenizationConfig, corpus: Path, directory: Path) -> tuple[SerializedTokenizer, str]:
    """Write a tokenizer to a directory. Return the tokenizer and the name of the file that identifies it."""
    source_files = tokenizers.find_files(Path(config.model)) if config.model else []
    if source_files and source_files[0].suffix == ".json":
        tokenizer = _copy_fast_tokenizer(source_files, directory)
    elif source_files:
        # XLM-R's tokenizer.json and SentencePiece model differ on a few sentences with two equally good segmentations.
        tokenizer = _write_sentencepiece(_read_model(source_files[0]), directory, corpus, max_different_share=0.001)
    else:
        # A new model has rounded scores, with which tokenizer.json and SentencePiece split all text alike.
        tokenizer = _write_sentencepiece(_train_model(config, corpus), directory, corpus, max_different_share=0.0)
    vocabulary_size = tokenizer.vocabulary.size
    if config.vocabulary_size is not None and config.vocabulary_size != vocabulary_size:
        raise TokenizerMismatch(
            f"{config.model} gives {vocabulary_size} ids, tokenization.vocabulary_size says {config.vocabulary_size}: "
            f"set it to {vocabulary_size}"
        )
    for token in tokenizer.special_tokens:
        if token in config.prefix:
            raise ConfigError(f"tokenization.prefix contains the special token {token}: remove it")
    return SerializedTokenizer(tokenizer.model, tokenizer.vocabulary, config.prefix), tokenizer.file_name


def _copy_fast_tokenizer(source_files: list[Path], directory: Path) -> CreatedTokenizer:
    """Copy a model's tokenizer files. The first file is tokenizer.json."""
    fast_tokenizer = tokenizers.copy_files(source_files[0], source_files[1:], directory)
    vocabulary = tokenizers.read_vocabulary(fast_tokenizer, source_files[0])
    model = serialize(fast_tokenizer.backend_tokenizer, vocabulary.special_ids)
    return CreatedTokenizer(model, vocabulary, fast_tokenizer.all_special_tokens, tokenizers.FAST)


def _write_sentencepiece(model: bytes, directory: Path, corpus: Path, max_different_share: float) -> CreatedTokenizer:
    """Write a SentencePiece model and the equivalent tokenizer.json, and compare both on the corpus."""
    (directory / tokenizers.MODEL).write_bytes(model)
    tokenizers.write_fast(model, directory)
    _compare_tokenizers(directory, model, corpus, max_different_share)
    vocabulary = Vocabulary.xlm_r(tokenizers.vocabulary_size(model))
    return CreatedTokenizer(model, vocabulary, list(SPECIAL_TOKENS), tokenizers.MODEL)


def _read_model(path: Path) -> bytes:
    """Read a SentencePiece model. Raise InputError if the file is not one."""
    try:
        model = user_files.check_readable(path).read_bytes()
        tokenizers.vocabulary_size(model)
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"{path}: not a SentencePiece model ({error}): set tokenization.model to one, or to a tokenizer.json"
        ) from None
    return model


def _draw_sentences(config: TokenizationConfig, corpus: Path) -> list[str]:
    """Draw the sentences for training the vocabulary. Sentences of small languages may be repeated."""
    sentence_counts: dict[str, int] = {}  # language -> number of sentences
    for directory in sorted(corpus.glob("mono/*")):
        count = sum(count_rows(path) for path in directory.glob("*.parquet"))
        if count:
            sentence_counts[directory.name] = count
    if not sentence_counts:
        raise CorpusTooSmall(f"{corpus}/mono has no text to train a vocabulary: prepare more text")
    drawn_counts = _choose_sentence_counts(np.array(list(sentence_counts.values())), config)
    sentences: list[str] = []
    for (language, count), drawn_count in zip(sentence_counts.items(), drawn_counts, strict=True):
        # Repeat all sentences equally often, and a random subset once more, to reach the count.
        repeats = np.full(count, drawn_count // count)
        random_order = make_rng(config.seed, "vocabulary", language).permutation(count)
        repeats[random_order[: drawn_count % count]] += 1
        for text, repeat_count in zip(_read_texts(corpus / "mono" / language), repeats, strict=True):
            sentences += [text] * repeat_count
    return sentences


def _choose_sentence_counts(sentence_counts: np.ndarray, config: TokenizationConfig) -> np.ndarray:
    """Choose how many sentences of each language to draw, in proportion to its number of sentences ^ alpha.

    A sentence is drawn at most `MAX_REPEATS` times, so small languages may have too few sentences for their shares. The
    total is then reduced until they have enough, but at most by half. A language that needs a larger reduction does not
    reduce the total, and gets as many sentences as it can provide.

    Args:
        sentence_counts: number of sentences of each language (languages,), at least 1.
        config: settings with the exponent and the maximum total.
    """
    shares = probabilities(sentence_counts, config.alpha)
    total = min(config.training_sentences, sentence_counts.sum())
    available_counts = MAX_REPEATS * sentence_counts
    largest_totals = available_counts / shares  # largest total for which each language can fill its share
    acceptable_totals = largest_totals[largest_totals >= total / 2]
    total = min([total, *acceptable_totals])
    return np.minimum(np.rint(shares * total), available_counts).astype(np.int64)


def _train_model(config: TokenizationConfig, corpus: Path) -> bytes:
    """Train a SentencePiece unigram model. Round its scores, so that tokenizer.json splits all text as it does."""
    sentences = _draw_sentences(config, corpus)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="unigram",
            vocab_size=config.new_vocabulary_size - ADDED_IDS,
            character_coverage=config.character_coverage,
            num_threads=2,  # fixed, because the result depends on the number of threads
            minloglevel=2,  # errors only
        )
    except RuntimeError as error:
        raise _explain_failure(str(error), config, f"{corpus}: {len(sentences)} sentences") from None
    logger.info("trained a vocabulary of %d ids on %d sentences", config.new_vocabulary_size, len(sentences))
    return tokenizers.round_scores(model.getvalue())


def _explain_failure(message: str, config: TokenizationConfig, text_description: str) -> CorpusTooSmall:
    """Convert a SentencePiece failure to an error with a remedy.

    Training fails if the text has too many distinct characters, or too few distinct pieces, for the vocabulary size.
    """
    problem = f"{text_description} do not yield a vocabulary of {config.new_vocabulary_size} ids"
    required_characters = re.search(r"required_chars\. \d+ vs (\d+)", message)
    if required_characters:
        needed_ids = int(required_characters[1]) + ADDED_IDS
        return CorpusTooSmall(
            f"{problem} (their characters alone need {needed_ids}): raise tokenization.vocabulary_size to {needed_ids} "
            f"or more, or lower tokenization.character_coverage ({config.character_coverage}; at least 0.98)"
        )
    reason = " ".join(message.split())[-160:]  # the reason is at the end of the message
    largest_size = re.search(r"value <= (\d+)", message)
    if largest_size:
        reason = f"at most {int(largest_size[1]) + ADDED_IDS} are possible"
    return CorpusTooSmall(f"{problem} ({reason}): lower tokenization.vocabulary_size or prepare more text")


def _compare_tokenizers(directory: Path, model: bytes, corpus: Path, max_different_share: float) -> None:
    """Raise TokenizerMismatch if tokenizer.json and SentencePiece differ on too large a share of the texts."""
    fast_tokenizer = tokenizers.load_fast(directory).backend_tokenizer
    encode_with_sentencepiece = load_encoder(model)
    compared_count = 0
    differences = []
    for language_directory in sorted(corpus.glob("mono/*")):
        texts = _read_comparable_texts(language_directory)
        encodings = fast_tokenizer.encode_batch(texts, add_special_tokens=False)
        for text, expected_ids, encoding in zip(texts, encode_with_sentencepiece(texts), encodings, strict=True):
            if expected_ids.tolist() != encoding.ids:
                differences.append(f"{language_directory.name} {text!r:.80}")
        compared_count += len(texts)
    equal_count = compared_count - len(differences)
    logger.info("tokenizer.json equals SentencePiece on %d of %d sentences", equal_count, compared_count)
    if len(differences) > max_different_share * compared_count:
        raise TokenizerMismatch(
            f"tokenizer.json differs from SentencePiece on {len(differences)} of {compared_count} sentences, "
            f"such as {differences[0]}: use another SentencePiece model"
        )


def _read_comparable_texts(directory: Path) -> list[str]:
    """Return a language's first sentences without special tokens, which SentencePiece reads as plain text."""
    texts = (text for text in _read_texts(directory) if not any(token in text for token in SPECIAL_TOKENS))
    return list(itertools.islice(texts, COMPARED_SENTENCES))


# ---------------------------------------------------------------- shards


class NamedChunk(NamedTuple):
    """Consecutive rows of a corpus table."""

    table_name: str  # such as mono/en/news
    rows: pa.Table


def _encode(
    corpus: Path, tokenizer: SerializedTokenizer, block_tokens: int, output: Path, parallel_map: ParallelMap
) -> dict[str, dict[str, Any]]:
    """Encode every corpus, write its shards, and return a mapping from table name to sizes."""
    files: list[Path] = []
    for kind in ("held_out", "mono", "pairs"):
        files += sorted(corpus.glob(f"{kind}/*/*.parquet"))
    row_count = sum(count_rows(path) for path in files)
    # The results of `parallel_map` have no table names, so iterate the chunks twice: for encoding and for naming.
    chunks, chunks_to_encode = itertools.tee(_iterate_named_chunks(files, corpus))
    encode = functools.partial(encode_chunk, tokenizer=tokenizer)
    encoded_rows = parallel_map(encode, (chunk.rows for chunk in chunks_to_encode))
    tables: dict[str, dict[str, Any]] = {}
    with show_progress("tokenizing", row_count, "rows") as advance:
        chunks_and_results = zip(chunks, encoded_rows, strict=True)
        for table_name, table_results in itertools.groupby(chunks_and_results, key=lambda pair: pair[0].table_name):
            tables[table_name] = write_table(output, table_name, _iterate_results(table_results, advance), block_tokens)
    return tables


def _iterate_named_chunks(files: Iterable[Path], corpus: Path) -> Iterator[NamedChunk]:
    """Yield the chunks of all tables of a prepared corpus, table by table."""
    for path in files:
        table_name = str(path.relative_to(corpus).with_suffix(""))
        for rows in _iterate_chunks(path):
            yield NamedChunk(table_name, rows)


def _iterate_results(
    chunks_and_results: Iterable[tuple[NamedChunk, pa.Table]], advance: Callable[[int], None]
) -> Iterator[pa.Table]:
    """Yield each chunk's encoded rows, and advance the progress bar once the rows are written."""
    for chunk, encoded_rows in chunks_and_results:
        yield encoded_rows
        advance(len(chunk.rows))


def _read_texts(directory: Path) -> Iterator[str]:
    """Yield a language's sentences in order, without reading a whole file into memory."""
    for path in sorted(directory.glob("*.parquet")):
        for chunk in _iterate_chunks(path):
            yield from chunk[TEXT].to_pylist()


def _iterate_chunks(path: Path) -> Iterator[pa.Table]:
    """Yield the text columns of a corpus table in chunks."""
    with translate_arrow_errors(path, "prepare the text again", DataCorrupt), pq.ParquetFile(path) as file:
        columns = [name for name in (TEXT, *PAIR_COLUMNS) if name in file.schema_arrow.names]
        for batch in file.iter_batches(CHUNK, columns=columns):
            batch.validate(full=True)  # detects invalid UTF-8
            yield pa.Table.from_batches([batch])
