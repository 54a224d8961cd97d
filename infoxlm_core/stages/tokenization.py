"""Stage tokenize_corpus: prepared corpora -> a SentencePiece unigram model in XLM-R's id layout, and token shards.

shards/tokenizer/   sentencepiece.bpe.model, and tokenizer.json for `transformers`: equal ids
shards/mono/, shards/pairs/   flat arrays, see data/shards.py
"""

import functools
import hashlib
import io
import itertools
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import sentencepiece

from infoxlm_core import manifests, outside
from infoxlm_core.config import TokenizationConfig
from infoxlm_core.corpora.parallel import CHUNK, ParallelMap, in_processes
from infoxlm_core.corpora.tables import count_rows, reading
from infoxlm_core.data import shards
from infoxlm_core.data.encoding import SENTENCE_ID, SIDES, encode, encode_chunk, processor_of
from infoxlm_core.data.sampling import generator, probabilities
from infoxlm_core.data.vocabulary import SPECIAL_TOKENS
from infoxlm_core.errors import CorpusTooSmall, DataCorrupt, InputError, TokenizerMismatch
from infoxlm_core.model.huggingface import tokenizers
from infoxlm_core.progress import progress

logger = logging.getLogger(__name__)
MAX_REPEATS = 5  # of a training sentence; with more, whole words of a few sentences become pieces
COMPARED = 2_000  # sentences of each language on which both tokenizers are compared


def tokenize(
    config: TokenizationConfig, corpus: Path, output: Path, parallel_map: ParallelMap | None = None
) -> dict[str, Any]:
    """Train or read the SentencePiece model, encode every corpus and write shards.

    Args:
        config: the model, or how to train one.
        corpus: a prepared corpus.
        output: folder of the artifact; the caller writes its manifest.
        parallel_map: encodes chunks of sentences; None: in `config.processes` processes. The result is the same.

    Returns:
        The facts of the manifest.

    Raises:
        InputError: `corpus` is not a prepared corpus, or `config.model` is not a SentencePiece model.
        CorpusTooSmall: too little text for a vocabulary of this size.
        TokenizerMismatch: `config.model` has another vocabulary size, or the exported tokenizer gives other ids.
    """
    manifest = manifests.read(corpus, "corpus", producer="prepare_corpus")
    model = _read_model(config) if config.model else _train_model(config, corpus)
    folder = output / "tokenizer"
    folder.mkdir(parents=True)
    (folder / tokenizers.MODEL).write_bytes(model)
    tokenizers.write_fast(model, folder)
    # The scores of our models are rounded, so that both tokenizers always agree. With XLM-R's model they rarely differ,
    # where two segmentations have the same score.
    _compare_tokenizers(folder, model, corpus, max_different_share=0.001 if config.model else 0.0)
    tables = _encode(corpus, model, output, parallel_map or in_processes(config.processes))
    training = [table for name, table in tables.items() if not name.startswith("held_out/")]
    rows = sum(table["rows"] for table in training)
    tokens = sum(table["tokens"] for table in training)
    logger.info("wrote %d sequences (%d tokens) to %s", rows, tokens, output)
    shard_facts: dict[str, Any] = {
        "sequences": rows,
        "tokens": tokens,
        "vocabulary_size": tokenizers.vocabulary_size(model),
        "tokenizer": "sha256:" + hashlib.sha256(model).hexdigest(),
        "corpus": manifest["digest"],
        "tables": tables,
    }
    if "reserved" in manifest["facts"]:
        shard_facts["reserved"] = manifest["facts"]["reserved"]
    return shard_facts


def _list_files(corpus: Path, language: str) -> list[Path]:
    return sorted((corpus / "mono" / language).glob("*.parquet"))


def _read_texts(corpus: Path, language: str) -> Iterator[str]:
    """Yield sentences in order, reading in chunks because a file may be larger than memory."""
    for path in _list_files(corpus, language):
        for chunk in _chunks(path):
            yield from chunk["text"].to_pylist()


def _list_languages(corpus: Path) -> list[str]:
    folder = corpus / "mono"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _read_model(config: TokenizationConfig) -> bytes:
    """Return the SentencePiece model of the config; an error if it cannot be read or has another vocabulary size."""
    path = Path(config.model or "")
    try:
        model = outside.check_readable(path).read_bytes()
        size = tokenizers.vocabulary_size(model)
    except (OSError, RuntimeError) as error:
        raise InputError(f"{path}: not a SentencePiece model ({error}): set tokenization.model to one") from None
    if config.vocabulary_size not in (None, size):
        raise TokenizerMismatch(
            f"{path} gives {size} ids, tokenization.vocabulary_size says {config.vocabulary_size}: set it to {size}"
        )
    return model


def _draw_sentences(config: TokenizationConfig, corpus: Path) -> list[str]:
    """Draw the sentences that train the vocabulary; the same sentence may occur several times."""
    sizes = {}
    for language in _list_languages(corpus):
        rows = sum(count_rows(path) for path in _list_files(corpus, language))
        if rows:
            sizes[language] = rows
    if not sizes:
        raise CorpusTooSmall(f"{corpus}/mono has no text to train a vocabulary (have=0 need=1): prepare more text")
    counts = _count_sentences(np.array(list(sizes.values())), config)
    sentences: list[str] = []
    for (language, size), count in zip(sizes.items(), counts, strict=True):
        # Every sentence is repeated equally often, and a random choice of them once more.
        repeats = np.full(size, count // size)
        order = generator(config.seed, "vocabulary", language).permutation(size)
        repeats[order[: count % size]] += 1
        for text, repeat_count in zip(_read_texts(corpus, language), repeats, strict=True):
            sentences += [text] * repeat_count
    return sentences


def _count_sentences(sizes: np.ndarray, config: TokenizationConfig) -> np.ndarray:
    """Return how many sentences of each language train the vocabulary; their shares are proportional to n^alpha.

    A small language repeats each sentence up to `MAX_REPEATS` times. If its share needs more repeats, the total is
    reduced, but to no less than half. A language that is too small even for half the total gets less than its share.

    Args:
        sizes: (languages,) sentences of each language, at least 1.
        config: the exponent and the largest total.
    """
    shares = probabilities(sizes, config.alpha)
    total = min(config.training_sentences, sizes.sum())
    sufficient_totals = MAX_REPEATS * sizes / shares  # the largest total for which a language has enough sentences
    total = min([total, *sufficient_totals[sufficient_totals >= total / 2]])
    return np.minimum(np.rint(shares * total), MAX_REPEATS * sizes).astype(np.int64)


def _train_model(config: TokenizationConfig, corpus: Path) -> bytes:
    """Train a unigram model on sentences whose languages are drawn with exponent alpha."""
    sentences = _draw_sentences(config, corpus)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="unigram",
            vocab_size=config.new_vocabulary_size - 2,  # <pad> and <mask> are added later
            character_coverage=config.character_coverage,
            num_threads=2,  # fixed: the result depends on it
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explain_failure(str(error), config, f"{corpus}: {len(sentences)} sentences") from None
    logger.info("trained a vocabulary of %d ids on %d sentences", config.new_vocabulary_size, len(sentences))
    return tokenizers.round_scores(model.getvalue())


def _explain_failure(message: str, config: TokenizationConfig, text: str) -> CorpusTooSmall:
    """Return the error for a message of SentencePiece, which fails if the text does not fit the vocabulary's size."""
    problem = f"{text} do not give a vocabulary of {config.new_vocabulary_size}"
    required_characters = re.search(r"required_chars\. \d+ vs (\d+)", message)
    if required_characters:
        need = int(required_characters[1]) + 2
        return CorpusTooSmall(
            f"{problem} (their characters alone need {need}): raise tokenization.vocabulary_size to {need} or more, or "
            f"lower tokenization.character_coverage ({config.character_coverage}; at least 0.98)"
        )
    largest_size = re.search(r"value <= (\d+)", message)
    reason = f"at most {int(largest_size[1]) + 2} are possible" if largest_size else " ".join(message.split())[-160:]
    return CorpusTooSmall(f"{problem} ({reason}): lower tokenization.vocabulary_size or prepare more text")


def _compare_tokenizers(folder: Path, model: bytes, corpus: Path, max_different_share: float) -> None:
    """Raise TokenizerMismatch if tokenizer.json and SentencePiece differ on more than a share of sentences."""
    fast_tokenizer = tokenizers.load_fast(folder).backend_tokenizer
    processor = processor_of(model)
    compared = 0
    different = []
    for language in _list_languages(corpus):
        texts = list(itertools.islice(_read_without_special_tokens(corpus, language), COMPARED))
        encodings = fast_tokenizer.encode_batch(texts, add_special_tokens=False)
        for text, token_ids, encoding in zip(texts, encode(processor, texts), encodings, strict=True):
            if token_ids.tolist() != encoding.ids:
                different.append(f"{language} {text!r:.80}")
        compared += len(texts)
    logger.info("tokenizer.json equals SentencePiece on %d of %d sentences", compared - len(different), compared)
    if len(different) > max_different_share * compared:
        raise TokenizerMismatch(
            f"tokenizer.json differs from SentencePiece on {len(different)} of {compared} sentences, "
            f"the first {different[0]}: use another SentencePiece model"
        )


def _read_without_special_tokens(corpus: Path, language: str) -> Iterator[str]:
    """Yield the sentences in which no special token is written out: `transformers` reads "<s>" as the token itself."""
    for text in _read_texts(corpus, language):
        if not any(token in text for token in SPECIAL_TOKENS):
            yield text


def _encode(corpus: Path, model: bytes, output: Path, parallel_map: ParallelMap) -> dict[str, dict[str, int]]:
    """Encode every corpus, write its shards, and return the facts of all tables."""
    files: list[Path] = []
    for kind in ("held_out", "mono", "pairs"):
        files += sorted(corpus.glob(f"{kind}/*/*.parquet"))
    total = sum(count_rows(path) for path in files)
    all_chunks = ((path, chunk) for path in files for chunk in _chunks(path))
    # The results have no file names, so the chunks are iterated twice: to encode them, and to name their results.
    local_chunks, sent_chunks = itertools.tee(all_chunks)
    encoded = parallel_map(functools.partial(encode_chunk, model=model), (chunk for _, chunk in sent_chunks))
    tables: dict[str, dict[str, int]] = {}
    with progress("tokenizing", total, "rows") as advance:

        def results() -> Iterator[tuple[Path, pa.Table]]:
            for (path, chunk), result in zip(local_chunks, encoded, strict=True):
                yield path.relative_to(corpus).with_suffix(""), result
                advance(len(chunk))

        for name, group in itertools.groupby(results(), key=lambda item: item[0]):
            tables |= _write(output, str(name), (result for _, result in group))
    return tables


def _chunks(path: Path) -> Iterator[pa.Table]:
    """Yield the text columns of a table of a prepared corpus in chunks."""
    with reading(path, "prepare the text again", DataCorrupt), pq.ParquetFile(path) as file:
        columns = [name for name in SIDES if name in file.schema_arrow.names]
        for batch in file.iter_batches(CHUNK, columns=columns):
            batch.validate(full=True)  # detects invalid UTF-8
            yield pa.Table.from_batches([batch])


def _write(output: Path, name: str, results: Iterable[pa.Table]) -> dict[str, dict[str, int]]:
    """Write the encoded chunks of one corpus; return the facts of its tables."""
    writers: dict[str, shards.TableWriter] = {}
    sentence_ids = []
    for result in results:
        for column in result.column_names:
            if column == SENTENCE_ID:
                sentence_ids.append(result[column].to_numpy().astype(shards.SENTENCE_IDS))
                continue
            table = f"{name}{SIDES[column]}"
            if table not in writers:
                writers[table] = shards.TableWriter(output / table)
            rows = result[column].combine_chunks()
            writers[table].add(rows.flatten().to_numpy(), pc.list_value_length(rows).to_numpy())
    if sentence_ids:
        shards.write_array(output / f"{name}.meanings", np.concatenate(sentence_ids))
    return {table: writer.close() for table, writer in sorted(writers.items())}
