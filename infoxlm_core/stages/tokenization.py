"""Stage tokenize_corpus: prepared corpora -> a tokenizer and token shards.

tokenizer/        sentencepiece.bpe.model and the equivalent tokenizer.json for `transformers`,
                  or the unchanged files of another model's tokenizer
mono/, pairs/     tables of token ids in parts, see data/shards.py; held_out/ likewise
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
MAX_REPEATS = 5  # of a training sentence; with more, words that occur in only a few sentences become pieces
ADDED_IDS = 2  # <pad> and <mask>, which SentencePiece does not count
COMPARED_SENTENCES = 2_000  # of each language, on which both tokenizers are compared


def tokenize(
    config: TokenizationConfig, corpus: Path, output: Path, parallel_map: ParallelMap | None = None
) -> dict[str, Any]:
    """Train or copy the tokenizer, encode every corpus and write shards.

    Args:
        config: the tokenizer, or how to train one.
        corpus: a prepared corpus.
        output: folder of the artifact; the caller writes its manifest.
        parallel_map: encodes chunks of sentences; None: in `config.processes` processes. The result is the same.

    Returns:
        The facts for the manifest: the numbers of sequences and tokens, the tokenizer, and the sizes of all tables.

    Raises:
        InputError: `corpus` is not a prepared corpus, or `config.model` is not a tokenizer.
        ConfigError: the prefix contains a special token.
        CorpusTooSmall: too little text for a vocabulary of this size.
        TokenizerMismatch: `config.model` has another vocabulary size, or the exported tokenizer gives other ids.
    """
    manifest = manifests.load_verified(corpus, "corpus", producer="prepare_corpus")
    folder = output / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, tokenizer_file = _make_tokenizer(config, corpus, folder)
    encode_in_parallel = parallel_map or ProcessPoolMap(config.processes)
    tables = _encode(corpus, tokenizer, config.block_tokens, output, encode_in_parallel)
    sequences = 0
    tokens = 0
    for name, table in tables.items():
        if not name.startswith("held_out/"):
            sequences_per_row = 2 if name.startswith("pairs/") else 1
            sequences += sequences_per_row * table["rows"]
            tokens += table["tokens"]
    logger.info("wrote %d sequences (%d tokens) to %s", sequences, tokens, output)
    shard_facts: dict[str, Any] = {
        "sequences": sequences,
        "tokens": tokens,
        "tokenizer": f"sha256:{manifests.file_sha256(folder / tokenizer_file)}",
        "corpus": manifest["digest"],
        "tables": tables,
        "block_tokens": config.block_tokens,
        **tokenizer.vocabulary.as_facts(),
    }
    if tokenizer_file != tokenizers.MODEL:
        shard_facts["tokenizer_file"] = tokenizer_file
    if config.prefix:
        shard_facts["prefix"] = config.prefix
    if "reserved" in manifest["facts"]:
        shard_facts["reserved"] = manifest["facts"]["reserved"]
    return shard_facts


# ---------------------------------------------------------------- tokenizer


class CreatedTokenizer(NamedTuple):
    """A tokenizer that was written to a folder."""

    model: bytes  # a SentencePiece model or a serialized tokenizer.json
    vocabulary: Vocabulary
    special_tokens: list[str]
    file_name: str  # the file whose digest identifies the tokenizer


def _make_tokenizer(config: TokenizationConfig, corpus: Path, folder: Path) -> tuple[SerializedTokenizer, str]:
    """Write a tokenizer to a folder. Return the tokenizer and the name of the file whose digest identifies it."""
    source_files = tokenizers.find_files(Path(config.model)) if config.model else []
    if source_files and source_files[0].suffix == ".json":
        tokenizer = _copy_fast_tokenizer(source_files, folder)
    elif source_files:
        # XLM-R's tokenizer.json differs from its SentencePiece model on the few sentences that have two segmentations
        # of equal score.
        tokenizer = _write_sentencepiece(_read_model(source_files[0]), folder, corpus, max_different_share=0.001)
    else:
        # The scores of a new model are rounded, so its segmentations are always equal.
        tokenizer = _write_sentencepiece(_train_model(config, corpus), folder, corpus, max_different_share=0.0)
    vocabulary_size = tokenizer.vocabulary.size
    if config.vocabulary_size not in (None, vocabulary_size):
        raise TokenizerMismatch(
            f"{config.model} gives {vocabulary_size} ids, tokenization.vocabulary_size says {config.vocabulary_size}: "
            f"set it to {vocabulary_size}"
        )
    for token in tokenizer.special_tokens:
        if token in config.prefix:
            raise ConfigError(f"tokenization.prefix contains the special token {token}: remove it")
    return SerializedTokenizer(tokenizer.model, tokenizer.vocabulary, config.prefix), tokenizer.file_name


def _copy_fast_tokenizer(source_files: list[Path], folder: Path) -> CreatedTokenizer:
    """Copy the files of a model's tokenizer, of which the first is tokenizer.json."""
    fast_tokenizer = tokenizers.copy_files(source_files[0], source_files[1:], folder)
    vocabulary = tokenizers.read_vocabulary(fast_tokenizer, source_files[0])
    model = serialize(fast_tokenizer.backend_tokenizer, vocabulary.special_ids)
    return CreatedTokenizer(model, vocabulary, fast_tokenizer.all_special_tokens, tokenizers.FAST)


def _write_sentencepiece(model: bytes, folder: Path, corpus: Path, max_different_share: float) -> CreatedTokenizer:
    """Write a SentencePiece model and its tokenizer.json, and compare both on the corpus."""
    (folder / tokenizers.MODEL).write_bytes(model)
    tokenizers.write_fast(model, folder)
    _compare_tokenizers(folder, model, corpus, max_different_share)
    vocabulary = Vocabulary.xlm_r(tokenizers.vocabulary_size(model))
    return CreatedTokenizer(model, vocabulary, list(SPECIAL_TOKENS), tokenizers.MODEL)


def _read_model(path: Path) -> bytes:
    """Return the content of a file. Raise InputError if it is not a SentencePiece model."""
    try:
        model = user_files.check_readable(path).read_bytes()
        tokenizers.vocabulary_size(model)
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"{path}: not a SentencePiece model ({error}): set tokenization.model to one, or to a tokenizer.json"
        ) from None
    return model


def _draw_sentences(config: TokenizationConfig, corpus: Path) -> list[str]:
    """Draw the sentences on which the vocabulary is trained. The same sentence may occur several times."""
    sentence_counts: dict[str, int] = {}  # by language
    for folder in sorted(corpus.glob("mono/*")):
        count = sum(count_rows(path) for path in folder.glob("*.parquet"))
        if count:
            sentence_counts[folder.name] = count
    if not sentence_counts:
        raise CorpusTooSmall(f"{corpus}/mono has no text to train a vocabulary (have=0 need=1): prepare more text")
    drawn_counts = _choose_sentence_counts(np.array(list(sentence_counts.values())), config)
    sentences: list[str] = []
    for (language, count), drawn_count in zip(sentence_counts.items(), drawn_counts, strict=True):
        # Take all sentences as often as they fit into the count, and a random choice of them once more.
        repeats = np.full(count, drawn_count // count)
        random_order = make_rng(config.seed, "vocabulary", language).permutation(count)
        repeats[random_order[: drawn_count % count]] += 1
        for text, repeat_count in zip(_read_texts(corpus / "mono" / language), repeats, strict=True):
            sentences += [text] * repeat_count
    return sentences


def _choose_sentence_counts(sentence_counts: np.ndarray, config: TokenizationConfig) -> np.ndarray:
    """Return how many sentences of each language to draw, in proportion to the number of its sentences ^ alpha.

    A small language repeats each sentence up to `MAX_REPEATS` times. If this is not enough for its share, the total is
    reduced, but to no less than half. A language that is too small even for half the total gets less than its share.

    Args:
        sentence_counts: (languages,) sentences of each language, at least 1.
        config: the exponent and the largest total.
    """
    shares = probabilities(sentence_counts, config.alpha)
    total = min(config.training_sentences, sentence_counts.sum())
    available_counts = MAX_REPEATS * sentence_counts
    largest_totals = available_counts / shares  # of which each language can still fill its share
    acceptable_totals = largest_totals[largest_totals >= total / 2]
    total = min([total, *acceptable_totals])
    return np.minimum(np.rint(shares * total), available_counts).astype(np.int64)


def _train_model(config: TokenizationConfig, corpus: Path) -> bytes:
    """Train a SentencePiece unigram model on the corpus. Return it with rounded scores."""
    sentences = _draw_sentences(config, corpus)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="unigram",
            vocab_size=config.new_vocabulary_size - ADDED_IDS,
            character_coverage=config.character_coverage,
            num_threads=2,  # the result depends on it, so it must not depend on the machine
            minloglevel=2,
        )
    except RuntimeError as error:
        text_description = f"{corpus}: {len(sentences)} sentences"
        raise _explain_failure(str(error), config, text_description) from None
    logger.info("trained a vocabulary of %d ids on %d sentences", config.new_vocabulary_size, len(sentences))
    return tokenizers.round_scores(model.getvalue())


def _explain_failure(message: str, config: TokenizationConfig, text_description: str) -> CorpusTooSmall:
    """Return an error that says how to solve a failure of SentencePiece's training.

    The training fails if the text has too many characters, or too few different pieces, for the vocabulary size.
    """
    problem = f"{text_description} do not give a vocabulary of {config.new_vocabulary_size}"
    required_characters = re.search(r"required_chars\. \d+ vs (\d+)", message)
    if required_characters:
        needed_ids = int(required_characters[1]) + ADDED_IDS
        return CorpusTooSmall(
            f"{problem} (their characters alone need {needed_ids}): raise tokenization.vocabulary_size to {needed_ids} "
            f"or more, or lower tokenization.character_coverage ({config.character_coverage}; at least 0.98)"
        )
    reason = " ".join(message.split())[-160:]  # the end of the message has the reason
    largest_size = re.search(r"value <= (\d+)", message)
    if largest_size:
        reason = f"at most {int(largest_size[1]) + ADDED_IDS} are possible"
    return CorpusTooSmall(f"{problem} ({reason}): lower tokenization.vocabulary_size or prepare more text")


def _compare_tokenizers(folder: Path, model: bytes, corpus: Path, max_different_share: float) -> None:
    """Raise TokenizerMismatch if tokenizer.json and SentencePiece differ on more than the given share of texts."""
    fast_tokenizer = tokenizers.load_fast(folder).backend_tokenizer
    encode = load_encoder(model)
    compared_count = 0
    differences = []
    for language_folder in sorted(corpus.glob("mono/*")):
        texts = _read_comparable_texts(language_folder)
        encodings = fast_tokenizer.encode_batch(texts, add_special_tokens=False)
        for text, token_ids, encoding in zip(texts, encode(texts), encodings, strict=True):
            if token_ids.tolist() != encoding.ids:
                differences.append(f"{language_folder.name} {text!r:.80}")
        compared_count += len(texts)
    equal_count = compared_count - len(differences)
    logger.info("tokenizer.json equals SentencePiece on %d of %d sentences", equal_count, compared_count)
    if len(differences) > max_different_share * compared_count:
        raise TokenizerMismatch(
            f"tokenizer.json differs from SentencePiece on {len(differences)} of {compared_count} sentences, "
            f"the first {differences[0]}: use another SentencePiece model"
        )


def _read_comparable_texts(folder: Path) -> list[str]:
    """Return the first sentences of a language without special tokens, which SentencePiece reads as ordinary text."""
    texts: list[str] = []
    for text in _read_texts(folder):
        if len(texts) == COMPARED_SENTENCES:
            break
        if not any(token in text for token in SPECIAL_TOKENS):
            texts.append(text)
    return texts


# ---------------------------------------------------------------- shards


class NamedChunk(NamedTuple):
    """Consecutive rows of a table of a prepared corpus."""

    table_name: str  # such as mono/en/news
    rows: pa.Table


def _encode(
    corpus: Path, tokenizer: SerializedTokenizer, block_tokens: int, output: Path, parallel_map: ParallelMap
) -> dict[str, dict[str, Any]]:
    """Encode every corpus, write its shards, and return the sizes of all tables by name."""
    files: list[Path] = []
    for kind in ("held_out", "mono", "pairs"):
        files += sorted(corpus.glob(f"{kind}/*/*.parquet"))
    row_count = sum(count_rows(path) for path in files)
    # The results of `parallel_map` have no names, so the chunks are iterated twice: to encode and to name them.
    chunks, chunks_to_encode = itertools.tee(_iterate_named_chunks(files, corpus))
    encode = functools.partial(encode_chunk, tokenizer=tokenizer)
    encoded_rows = parallel_map(encode, (chunk.rows for chunk in chunks_to_encode))
    tables: dict[str, dict[str, Any]] = {}
    with show_progress("tokenizing", row_count, "rows") as advance:
        chunks_and_results = zip(chunks, encoded_rows, strict=True)
        for table_name, table_results in itertools.groupby(chunks_and_results, key=_get_table_name):
            tables[table_name] = write_table(output, table_name, _iterate_results(table_results, advance), block_tokens)
    return tables


def _iterate_named_chunks(files: Iterable[Path], corpus: Path) -> Iterator[NamedChunk]:
    """Yield the chunks of all tables of a prepared corpus, one table after the other."""
    for path in files:
        table_name = str(path.relative_to(corpus).with_suffix(""))
        for rows in _iterate_chunks(path):
            yield NamedChunk(table_name, rows)


def _get_table_name(chunk_and_result: tuple[NamedChunk, pa.Table]) -> str:
    """Return the name of the table to which a chunk and its encoded rows belong."""
    chunk, _ = chunk_and_result
    return chunk.table_name


def _iterate_results(
    chunks_and_results: Iterable[tuple[NamedChunk, pa.Table]], advance: Callable[[int], None]
) -> Iterator[pa.Table]:
    """Yield the encoded rows of each chunk, and advance the progress bar after their use."""
    for chunk, encoded_rows in chunks_and_results:
        yield encoded_rows
        advance(len(chunk.rows))


def _read_texts(folder: Path) -> Iterator[str]:
    """Yield the sentences of a language in order, without reading a whole file into memory."""
    for path in sorted(folder.glob("*.parquet")):
        for chunk in _iterate_chunks(path):
            yield from chunk[TEXT].to_pylist()


def _iterate_chunks(path: Path) -> Iterator[pa.Table]:
    """Yield the text columns of a table of a prepared corpus in chunks."""
    with translate_arrow_errors(path, "prepare the text again", DataCorrupt), pq.ParquetFile(path) as file:
        columns = [name for name in (TEXT, *PAIR_COLUMNS) if name in file.schema_arrow.names]
        for batch in file.iter_batches(CHUNK, columns=columns):
            batch.validate(full=True)  # detects invalid UTF-8
            yield pa.Table.from_batches([batch])
