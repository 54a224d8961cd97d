"""Stage: prepared corpora -> a SentencePiece unigram model in XLM-R's id layout, and token shards.

shards/tokenizer/   sentencepiece.bpe.model, and tokenizer.json for `transformers`: equal ids
shards/mono/, shards/pairs/   flat arrays, see data/shards.py
"""

import hashlib
import io
import itertools
import logging
import multiprocessing
import re
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import sentencepiece

from infoxlm_core import manifests
from infoxlm_core.config import TokenizationConfig
from infoxlm_core.data import shards
from infoxlm_core.data.sampling import generator, probabilities
from infoxlm_core.data.vocabulary import EOS, SPECIAL_TOKENS
from infoxlm_core.errors import CorpusTooSmall, InputError, TokenizerMismatch
from infoxlm_core.model import tokenizers
from infoxlm_core.progress import progress

logger = logging.getLogger(__name__)
CHUNK = 4096
"""Sentences encoded by one call of a worker process."""
COMPARED = 2_000
"""Sentences a language on which both tokenizers must agree."""


def tokenize(config: TokenizationConfig, corpus: Path, output: Path) -> dict:
    """Train or take the SentencePiece model, encode every corpus, write shards; return the facts of the manifest.

    Raises:
        InputError: `corpus` is no prepared corpus, or `config.model` is no SentencePiece model.
        CorpusTooSmall: too little text for a vocabulary of this size.
        TokenizerMismatch: `config.model` has another vocabulary size, or the exported tokenizer gives other ids.
    """
    manifest = manifests.read(corpus, "corpus", made_with="prepare_corpus")
    model = _given_model(config) if config.model else _train_model(config, corpus)
    folder = output / "tokenizer"
    folder.mkdir(parents=True)
    (folder / tokenizers.MODEL).write_bytes(model)
    tokenizers.write_fast(model, folder)
    # a model of our own has rounded scores and so no differences; XLM-R's has a few where two splits tie
    _compare(folder, corpus, tolerated=0.001 if config.model else 0.0)
    tables = _encode(config, corpus, folder / tokenizers.MODEL, output)
    training = [table for name, table in tables.items() if not name.startswith("held_out/")]
    rows, tokens = (sum(table[what] for table in training) for what in ("rows", "tokens"))
    logger.info("wrote %d sequences (%d tokens) to %s", rows, tokens, output)
    return {
        "sequences": rows,
        "tokens": tokens,
        "vocabulary_size": tokenizers.vocabulary_size(model),
        "tokenizer": "sha256:" + hashlib.sha256(model).hexdigest(),
        "corpus": manifest["digest"],
        "tables": tables,
    }


def _texts(corpus: Path, language: str, column: str = "text") -> Iterator[str]:
    for path in sorted((corpus / "mono" / language).glob("*.parquet")):
        yield from pq.read_table(path, columns=[column])[column].to_pylist()


def _languages(corpus: Path) -> list[str]:
    return sorted(path.name for path in (corpus / "mono").iterdir()) if (corpus / "mono").is_dir() else []


def _given_model(config: TokenizationConfig) -> bytes:
    path = Path(config.model or "")
    try:
        model = path.read_bytes()
        size = tokenizers.vocabulary_size(model)
    except (OSError, RuntimeError) as error:
        raise InputError(f"{path}: not a SentencePiece model ({error}): set tokenization.model to one") from None
    if size != config.vocabulary_size:
        raise TokenizerMismatch(
            f"{path} gives {size} ids, tokenization.vocabulary_size says {config.vocabulary_size}: set it to {size}"
        )
    return model


def _train_model(config: TokenizationConfig, corpus: Path) -> bytes:
    """Unigram model of sentences drawn by language with exponent alpha, English no more than its share."""
    texts = {language: list(_texts(corpus, language)) for language in _languages(corpus)}
    sizes = np.array([len(found) for found in texts.values()])
    if not sizes.sum():
        raise CorpusTooSmall(f"{corpus}/mono: have=0 need=1 sentence to train a vocabulary: prepare more text")
    wanted = probabilities(sizes, config.alpha) * min(config.training_sentences, sizes.sum())
    sentences: list[str] = []
    for (language, found), count in zip(texts.items(), wanted, strict=True):
        rng = generator(config.seed, "vocabulary", language)
        chosen = rng.permutation(len(found))[: round(count)]
        sentences += [found[i] for i in np.sort(chosen)]
    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=written,
            model_type="unigram",
            vocab_size=config.vocabulary_size - 2,  # without <pad> and <mask>, which SentencePiece does not know
            character_coverage=config.character_coverage,
            num_threads=2,  # fixed: the result depends on it
            minloglevel=2,
        )
    except RuntimeError as error:
        most = re.search(r"value <= (\d+)", str(error))
        remedy = f"at most {int(most[1]) + 2} are possible" if most else " ".join(str(error).split())[-160:]
        raise CorpusTooSmall(
            f"{corpus}: {len(sentences)} sentences do not give a vocabulary of {config.vocabulary_size} ({remedy}): "
            "lower tokenization.vocabulary_size or prepare more text"
        ) from None
    logger.info("trained a vocabulary of %d ids on %d sentences", config.vocabulary_size, len(sentences))
    return tokenizers.round_scores(written.getvalue())


def _compare(folder: Path, corpus: Path, tolerated: float) -> None:
    """Refuse a `transformers` tokenizer that differs from SentencePiece on more than a share of the sentences."""
    fast = tokenizers.load_fast(folder)
    processor = _processor(str(folder / tokenizers.MODEL))
    compared, different = 0, []
    for language in _languages(corpus):
        # `transformers` takes a literal "<s>" in a text for the token of this name, as it does with XLM-R's own
        plain = (text for text in _texts(corpus, language) if not any(token in text for token in SPECIAL_TOKENS))
        texts = list(itertools.islice(plain, COMPARED))
        theirs = fast.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        pairs = zip(texts, tokenizers.encode(processor, texts), theirs, strict=True)
        different += [f"{language} {text!r:.80}" for text, own, other in pairs if own.tolist() != other.ids]
        compared += len(texts)
    logger.info("tokenizer.json equals SentencePiece on %d of %d sentences", compared - len(different), compared)
    if len(different) > tolerated * compared:
        raise TokenizerMismatch(
            f"tokenizer.json differs from SentencePiece on {len(different)} of {compared} sentences, "
            f"the first {different[0]}: use another SentencePiece model"
        )


@cache
def _processor(path: str) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=path)


def meaning(text: str) -> int:
    """64-bit hash of a pivot sentence: pairs of equal hash mean the same."""
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return int.from_bytes(hashlib.blake2b(plain.encode(), digest_size=8).digest(), "little")


def _encode_chunk(model: str, columns: list[list[str]], end: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """Encode rows of one or two columns; a row with an empty column goes. Runs in a worker process."""
    ids = [tokenizers.encode(_processor(model), texts) for texts in columns]
    kept = [row for row in range(len(columns[0])) if all(len(column[row]) for column in ids)]
    results = []
    for column in ids:
        rows = [np.append(column[i], EOS) if end else column[i] for i in kept]
        lengths = np.array([len(row) for row in rows], np.int64)
        results.append((np.concatenate([np.empty(0, np.int64), *rows]), lengths))
    if len(columns) == 2:
        results.append((np.array([meaning(columns[0][i]) for i in kept], np.uint64), np.ones(len(kept), np.int64)))
    return results


def _encode(config: TokenizationConfig, corpus: Path, model: Path, output: Path) -> dict[str, dict]:
    """Encode every corpus in several processes; the shards do not depend on how many."""
    files = sorted(path for kind in ("mono", "pairs", "held_out") for path in corpus.glob(f"{kind}/*/*.parquet"))
    total = sum(pq.read_metadata(path).num_rows for path in files)
    tables: dict[str, dict] = {}
    spawn = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with (
        ProcessPoolExecutor(config.processes, mp_context=spawn) as pool,
        progress("tokenizing", total, "rows") as advance,
    ):
        for path in files:
            name = path.relative_to(corpus).with_suffix("")
            mono = name.parts[0] == "mono"
            columns = ["text"] if mono else ["source", "target"]
            batches = [
                [batch.column(column).to_pylist() for column in columns]
                for batch in pq.ParquetFile(path).iter_batches(CHUNK, columns=columns)
            ]
            jobs = [pool.submit(_encode_chunk, str(model), batch, mono) for batch in batches]
            chunks = []
            for job, batch in zip(jobs, batches, strict=True):
                chunks.append(job.result())
                advance(len(batch[0]))
            for side, suffix in enumerate([""] if mono else [".source", ".target"]):
                table = f"{name}{suffix}"
                tables[table] = shards.write_table(output / table, [chunk[side] for chunk in chunks])
            if not mono:
                meanings = np.concatenate([np.empty(0, np.uint64), *(chunk[2][0] for chunk in chunks)])
                shards.write_array(output / f"{name}.meanings", meanings.astype(shards.MEANINGS))
    return tables
