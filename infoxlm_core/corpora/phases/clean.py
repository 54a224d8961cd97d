"""Phases read and clean: cut each source into parts of bounded size, then clean the rows of each part.

raw/PART                 rows of a source in one language or language pair, as they were read
staged/PART              clean rows in the same order, with their keys
reserved/SET/PART        digests of the rows that are held out (`held_out`), and of their runs of words (`overlap`)
owners/PART              near keys of the part's training rows, if `labelled_share` is set
candidates/PART          messages that are drawn for the labelled test set
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

LABELLED_CHARACTERS = 20  # the corpus of a shorter message cannot be predicted from its text
PART_ROWS = 1 << 17
PART_CHARACTERS = 1 << 26
NOT_DRAWN, DRAWN_HELD_OUT, DRAWN_LABELLED = range(3)
CANDIDATE = np.dtype([("source", "<u8"), ("target", "<u8")])  # near keys of a pair
KEYS = tuple((name, pa.list_(pa.uint64())) for name in Keys._fields)
_TEXTS = (("texts", pa.list_(pa.string())), ("file", pa.string()))
_DOCUMENT = ("document", pa.int64())  # line on which it begins; 0 if lines are compared
_RAW = pa.schema([*_TEXTS, _DOCUMENT, ("dropped", pa.string())])
_STAGED = pa.schema([
    *_TEXTS, _DOCUMENT, *KEYS, ("log_ratio", pa.float64()), ("drawn", pa.uint8()), ("is_long", pa.bool_())
])  # fmt: skip


# ---------------------------------------------------------------- read


def read(job: Job, number: int) -> Record:
    """Read a source and put its rows in parts."""
    config = job.config
    source_config = config.model_copy(
        update={"corpora": config.corpora[number : number + 1], "evaluation_sets": (), "cleaning": CleaningConfig()}
    )
    if job.localise:
        source_config = job.localise(source_config)
    [source] = source_config.corpora
    parts: list[tuple[str, str]] = []
    source_rows = formats.read(source, config.languages, config.pivot, _check_paths(source))
    for rows in _split_rows(source_rows, source.compares_documents):
        rows_of_languages: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
        for row in rows:
            document = row.line if source.compares_documents else 0
            rows_of_languages["-".join(row.languages)].append((row.texts, row.file, document, row.dropped))
        for language_pair in sorted(rows_of_languages):
            name = f"{number:04}-{len(parts):06}"
            job.put_table(f"raw/{name}", tables.make_table(_RAW, rows_of_languages[language_pair]))
            parts.append((name, language_pair))
    return {"parts": parts}


def _split_rows(rows: Iterable[Row], between_documents: bool) -> Iterator[list[Row]]:
    """Yield the rows in lists of bounded size.

    With `between_documents`, all rows of a document are in one list. Then `Row.line` is the first line of the document.
    Raise InputError if a document is too long for a list.
    """
    split_rows: list[Row] = []
    character_count = 0
    for row in rows:
        is_full = len(split_rows) >= PART_ROWS or character_count >= PART_CHARACTERS
        if is_full and not (between_documents and row.line == split_rows[-1].line):
            yield split_rows
            split_rows = []
            character_count = 0
        # The document began before the list was full, so it alone exceeds the size of a list.
        if len(split_rows) >= 2 * PART_ROWS or character_count >= 2 * PART_CHARACTERS:
            raise InputError(
                f"{row.file}: the document that begins on line {row.line} has over {PART_ROWS:,} lines or "
                f"{PART_CHARACTERS:,} characters: write a blank line after each document, or set deduplicate to lines"
            )
        split_rows.append(row)
        character_count += sum(len(text) for text in row.texts)
    if split_rows:
        yield split_rows


def _check_paths(source: CorpusSource) -> list[Path]:
    """Return the files and folders of a corpus. Raise InputError if any is missing or has an unexpected digest."""
    paths = [Path(path) for path in source.paths]
    for path in paths:
        if not path.exists():
            raise InputError(
                f"{path}: no such file or folder: check the path of the corpus, which every worker must reach"
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


def clean(job: Job, number: int) -> Record:
    """Clean the rows of a part, store those that are not dropped in `staged`, and count all."""
    part = job.parts[number]
    config = job.config
    # Runs of words are compared only with held-out and test text; computing them takes most of the time.
    has_test_text = bool(config.held_out or config.held_out_share or config.evaluation_sets)
    overlap = config.overlap if has_test_text else 0
    compares_rows = part.kind in tables.TRAINING and not config.corpora[part.source].compares_documents
    has_bands = config.cleaning.near_duplicates == "minhash" and compares_rows
    counts: RowCounts = defaultdict(Counter)
    length_ratios: Counter[int] = Counter()
    first_invalid: dict[str, str] = {}
    staged = [_STAGED.empty_table()]
    for batch in job.read_table(f"raw/{part.name}").to_batches(CHUNK):
        staged_rows = []
        for texts, file, document, reason in tables.iterate_rows(batch):
            file_counts = counts[FileKey(part.corpus, part.languages[-1], part.kind, file)]
            file_counts["read"] += 1
            if not reason:
                texts = [cleaning.normalise(text) for text in texts]
                reason = cleaning.find_reason_to_drop_row(texts, part.languages, config.languages, config.cleaning)
            if reason:
                file_counts[reason] += 1
                if reason == "invalid_utf8":
                    first_invalid.setdefault(file, texts[0])
                continue
            log_ratio = None
            if len(texts) == 2:
                log_ratio = length_ratio.compute_log_ratio(texts)
                length_ratios[length_ratio.find_bin(texts)] += 1
            keys = fingerprints.compute_keys(texts, overlap)
            if has_bands:
                keys = keys._replace(bands=fingerprints.compute_bands(texts))
            is_long = len(texts[0]) >= LABELLED_CHARACTERS
            drawn = _draw_message(keys, is_long, part, config)
            staged_rows.append((texts, file, document, *keys, log_ratio, drawn, is_long))
        if staged_rows:
            staged.append(tables.make_table(_STAGED, staged_rows))
    rows = pa.concat_tables(staged).combine_chunks()
    job.put_table(f"staged/{part.name}", rows)
    _put_reserved(job, part, rows)
    return {
        "counts": counts_to_json(counts),
        "staged_rows": len(rows),
        "length_ratios": length_ratios,
        "first_invalid": first_invalid,
    }


def _draw_message(keys: Keys, is_long: bool, part: Part, config: PreparationConfig) -> int:
    """Return whether a row is drawn for `held_out_share`, for `labelled_share`, or not at all.

    The draw depends only on the pivot's side, so that the same messages are drawn in all languages.
    """
    if part.kind != "pairs":
        return NOT_DRAWN
    seed = str(config.seed)
    message = str(keys.near[0])
    if config.held_out_share and _draw("held_out", seed, message) < config.held_out_share:
        return DRAWN_HELD_OUT
    if config.labelled_share and is_long and _draw(seed, message) < config.labelled_share:
        return DRAWN_LABELLED
    return NOT_DRAWN


def _draw(*values: str) -> float:
    """Return a number from 0 to 1 that is equal for equal values in every process."""
    return cleaning.digest(*values) / 2**64


def _put_reserved(job: Job, part: Part, rows: pa.Table) -> None:
    """Store the digests of a part's reserved rows, and the near keys that decide which messages are labelled."""
    drawn = rows["drawn"].to_numpy()
    is_held_out = (drawn == DRAWN_HELD_OUT) | (part.corpus in job.config.held_out)
    held_out = rows.filter(pa.array(is_held_out))
    equal_or_near = np.concatenate([flatten_lists(held_out["equal"]), flatten_lists(held_out["near"])])
    job.files.put(f"reserved/held_out/{part.name}", np.unique(equal_or_near).tobytes())
    job.files.put(f"reserved/overlap/{part.name}", np.unique(flatten_lists(held_out["runs"])).tobytes())
    if job.config.labelled_share:
        partition_count = job.partition_count
        keys = np.unique(flatten_lists(rows.filter(pa.array(~is_held_out))["near"]))
        job.put_slices(f"owners/{part.name}", keys, find_partitions(keys, partition_count), partition_count)
        candidates = np.unique(flatten_lists(rows.filter(pa.array(drawn == DRAWN_LABELLED))["near"]).view(CANDIDATE))
        partitions = find_partitions(candidates["source"], partition_count)
        job.put_slices(f"candidates/{part.name}", candidates, partitions, partition_count)


def flatten_lists(column: pa.ChunkedArray) -> np.ndarray:
    """Return the values of all lists of a column as a flat array."""
    return pc.list_flatten(column).to_numpy()


def find_partitions(keys: np.ndarray, count: int) -> np.ndarray:
    """Return the partition, from 0 to `count` - 1, of each 64-bit key."""
    high_bits = keys >> np.uint64(32)
    return ((high_bits * np.uint64(count)) >> np.uint64(32)).astype(np.int64)
