"""Phases read_source and clean_part: split each source into parts of bounded size, then clean each part.

raw/PART                  unprocessed rows of a source in one language or language pair
staged/PART               clean rows in the same order, with their keys
reserved/SET/PART         digests of held-out rows (`held_out`) and of their word n-grams (`overlap`)
letters/PART              letter digests of the part's training text, if `labelled_share` is set
labelled_candidates/PART  messages drawn for the labelled test set, if `labelled_share` is set
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infoxlm_core import manifests
from infoxlm_core.config import CleaningConfig, CorpusSource, PreparationConfig
from infoxlm_core.corpora import cleaning, fingerprints, formats, length_ratio, tables
from infoxlm_core.corpora.fingerprints import Keys
from infoxlm_core.corpora.lines import Row
from infoxlm_core.corpora.parallel import CHUNK
from infoxlm_core.corpora.phases.job import FileKey, Job, Part, Record, RowCounts, counts_to_json
from infoxlm_core.errors import InputError

LABELLED_CHARACTERS = 20  # shorter messages do not reveal their corpus
PART_ROWS = 1 << 17  # largest number of rows with tables and keys that fit into a small worker's memory
PART_CHARACTERS = 1 << 26  # the same for rows that are long documents
NOT_DRAWN, DRAWN_HELD_OUT, DRAWN_LABELLED = range(3)
LETTERS_OF_PAIR = np.dtype([("source", "<u8"), ("target", "<u8")])  # digests in `Keys.letters` of both sides
KEY_COLUMNS = tuple((name, pa.list_(pa.uint64())) for name in Keys._fields)
_TEXT_COLUMNS = (("texts", pa.list_(pa.string())), ("file", pa.string()), ("document_line", pa.int64()))
_RAW_SCHEMA = pa.schema([*_TEXT_COLUMNS, ("dropped", pa.string())])
_STAGED_SCHEMA = pa.schema([
    *_TEXT_COLUMNS, *KEY_COLUMNS, ("log_ratio", pa.float64()), ("drawn", pa.uint8()), ("is_long", pa.bool_())
])  # fmt: skip


# ---------------------------------------------------------------- read


def read_source(job: Job, source_number: int) -> Record:
    """Read a source and store its rows in parts of bounded size. Each part has one language or language pair."""
    source = _localise_source(job, source_number)
    source_rows = formats.read_rows(source, job.config.languages, job.config.pivot, _check_paths(source))
    parts: list[tuple[str, str]] = []
    for rows in _split_rows(source_rows, source.compares_documents):
        rows_by_languages: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
        for row in rows:
            document_line = row.line if source.compares_documents else 0  # 0: not needed
            rows_by_languages["-".join(row.languages)].append((row.texts, row.file, document_line, row.dropped))
        for languages in sorted(rows_by_languages):
            name = f"{source_number:04}-{len(parts):06}"
            job.put_table(f"raw/{name}", tables.make_table(_RAW_SCHEMA, rows_by_languages[languages]))
            parts.append((name, languages))
    return {"parts": parts}


def _localise_source(job: Job, source_number: int) -> CorpusSource:
    """Return a source of the config with local paths."""
    source = job.config.corpora[source_number]
    if job.localise is None:
        return source
    # Remove all other inputs from the config, so that only this source is fetched.
    only_source = job.config.model_copy(
        update={"corpora": (source,), "evaluation_sets": (), "cleaning": CleaningConfig()}
    )
    return job.localise(only_source).corpora[0]


def _split_rows(rows: Iterable[Row], keeps_documents: bool) -> Iterator[list[Row]]:
    """Split rows into lists of bounded size.

    Args:
        rows: rows of a source.
        keeps_documents: whether to keep a document in one list. Rows of the same document have the same `Row.line`.

    Raises:
        InputError: a document exceeds the list size.
    """
    part_rows: list[Row] = []
    character_count = 0
    for row in rows:
        is_full = len(part_rows) >= PART_ROWS or character_count >= PART_CHARACTERS
        continues_document = keeps_documents and bool(part_rows) and row.line == part_rows[-1].line
        if is_full and not continues_document:
            yield part_rows
            part_rows = []
            character_count = 0
        # A list exceeds its limit only to finish a document that began below the limit. At twice the limit, this
        # document alone is over the limit.
        if len(part_rows) >= 2 * PART_ROWS or character_count >= 2 * PART_CHARACTERS:
            raise InputError(
                f"{row.file}: the document that begins on line {row.line} has over {PART_ROWS:,} lines, or over "
                f"{PART_CHARACTERS:,} characters: write a blank line after each document, or set deduplicate to lines"
            )
        part_rows.append(row)
        character_count += sum(len(text) for text in row.texts)
    if part_rows:
        yield part_rows


def _check_paths(source: CorpusSource) -> list[Path]:
    """Return a source's paths. Raise InputError if a path does not exist or has an unexpected digest."""
    paths = [Path(path) for path in source.paths]
    for path in paths:
        if not path.exists():
            raise InputError(
                f"{path}: no such file or directory: check the path of the corpus, and that every worker can read it"
            )
        if not source.sha256:
            continue
        if not path.is_file():
            raise InputError(
                f"{path} is not a file, so its sha256 cannot be checked: leave sha256 out or give an archive"
            )
        digest = manifests.file_sha256(path)
        if digest != source.sha256:
            raise InputError(f"{path} has sha256 {digest}, expected {source.sha256}: check the config")
    return paths


# ---------------------------------------------------------------- clean


def clean_part(job: Job, part_number: int) -> Record:
    """Clean the rows of a part, store the clean rows and their keys in `staged`, and count all rows."""
    part = job.parts[part_number]
    config = job.config
    # N-grams take most of the time, and are compared only with reserved text. Skip them if nothing is reserved.
    has_reserved_text = bool(config.held_out or config.held_out_share or config.evaluation_sets)
    ngram_length = config.overlap if has_reserved_text else 0
    compares_rows = part.kind in tables.TRAINING and not config.corpora[part.source_number].compares_documents
    has_minhash = config.cleaning.near_duplicates == "minhash" and compares_rows
    counts: RowCounts = defaultdict(Counter)
    length_ratios: Counter[int] = Counter()
    first_invalid: dict[str, str] = {}
    staged_tables = [_STAGED_SCHEMA.empty_table()]
    for batch in job.read_table(f"raw/{part.name}").to_batches(CHUNK):
        staged_rows = []
        for texts, file, document_line, reason in tables.iterate_rows(batch):
            file_counts = counts[FileKey(part.corpus, part.languages[-1], part.kind, file)]
            file_counts["read"] += 1
            if reason == "invalid_utf8":
                first_invalid.setdefault(file, texts[0])  # position file:line:byte
            if not reason:
                texts = [cleaning.normalise(text) for text in texts]
                reason = cleaning.find_reason_to_drop_row(texts, part.languages, config.languages, config.cleaning)
            if reason:
                file_counts[reason] += 1
                continue
            log_ratio = None
            if len(texts) == 2:
                log_ratio = length_ratio.compute_log_ratio(texts)
                length_ratios[length_ratio.find_bin(log_ratio)] += 1
            keys = fingerprints.compute_keys(texts, ngram_length)
            if has_minhash:
                keys = keys._replace(minhash_bands=fingerprints.compute_minhash_bands(texts))
            is_long = len(texts[0]) >= LABELLED_CHARACTERS
            drawn = _draw_message(keys, is_long, part, config)
            staged_rows.append((texts, file, document_line, *keys, log_ratio, drawn, is_long))
        if staged_rows:
            staged_tables.append(tables.make_table(_STAGED_SCHEMA, staged_rows))
    rows = pa.concat_tables(staged_tables).combine_chunks()
    _put_clean_rows(job, part, rows)
    return {
        "counts": counts_to_json(counts),
        "staged_rows": len(rows),
        "length_ratios": length_ratios,
        "first_invalid": first_invalid,
    }


def _draw_message(keys: Keys, is_long: bool, part: Part, config: PreparationConfig) -> int:
    """Draw a row at random for `held_out_share`, for `labelled_share`, or not at all.

    The draw depends only on the pivot's side, so that it is the same in all languages.
    """
    if part.kind != "pairs":
        return NOT_DRAWN
    seed = str(config.seed)
    pivot_text = str(keys.letters[0])
    # The word "held_out" makes the first draw independent of the second.
    if config.held_out_share and _draw_number("held_out", seed, pivot_text) < config.held_out_share:
        return DRAWN_HELD_OUT
    if config.labelled_share and is_long and _draw_number(seed, pivot_text) < config.labelled_share:
        return DRAWN_LABELLED
    return NOT_DRAWN


def _draw_number(*seeds: str) -> float:
    """Return a pseudo-random number in [0, 1] that depends only on the seeds."""
    return cleaning.digest(*seeds) / 2**64


def _put_clean_rows(job: Job, part: Part, rows: pa.Table) -> None:
    """Store a part's clean rows, and the digests that later phases collect from all parts."""
    job.put_table(f"staged/{part.name}", rows)
    is_held_out = (rows["drawn"].to_numpy() == DRAWN_HELD_OUT) | (part.corpus in job.config.held_out)
    _put_held_out_digests(job, part, rows.filter(pa.array(is_held_out)))
    if job.config.labelled_share:
        _put_label_keys(job, part, rows, is_held_out)


def _put_held_out_digests(job: Job, part: Part, held_out_rows: pa.Table) -> None:
    """Store the digests of a part's held-out rows, for dropping training rows with the same text."""
    text_digests = [flatten_lists(held_out_rows[column]) for column in ("casefolded", "letters")]
    job.files.put(f"reserved/held_out/{part.name}", np.unique(np.concatenate(text_digests)).tobytes())
    job.files.put(f"reserved/overlap/{part.name}", np.unique(flatten_lists(held_out_rows["ngrams"])).tobytes())


def _put_label_keys(job: Job, part: Part, rows: pa.Table, is_held_out: np.ndarray) -> None:
    """Store a part's digests for `choose_labelled_test_set`, in slices by partition."""
    training_rows = rows.filter(pa.array(~is_held_out))
    letter_digests = np.unique(flatten_lists(training_rows["letters"]))
    partitions = find_partitions(letter_digests, job.partition_count)
    job.put_slices(f"letters/{part.name}", letter_digests, partitions, job.partition_count)
    drawn_rows = rows.filter(pa.array(rows["drawn"].to_numpy() == DRAWN_LABELLED))
    # View two digests as one pair. Its partition is that of the pivot's text, to compare the text with all corpora.
    candidates = np.unique(flatten_lists(drawn_rows["letters"]).view(LETTERS_OF_PAIR))
    partitions = find_partitions(candidates["source"], job.partition_count)
    job.put_slices(f"labelled_candidates/{part.name}", candidates, partitions, job.partition_count)


def flatten_lists(column: pa.ChunkedArray) -> np.ndarray:
    """Return the values of all lists in a column as one flat array."""
    return pc.list_flatten(column).to_numpy()


def find_partitions(keys: np.ndarray, partition_count: int) -> np.ndarray:
    """Return the partition of each 64-bit key, from 0 to `partition_count` - 1. Keys must be uniformly distributed."""
    # Use only the high half of a key, so that the product fits into 64 bits.
    high_bits = keys >> np.uint64(32)
    return ((high_bits * np.uint64(partition_count)) >> np.uint64(32)).astype(np.int64)
