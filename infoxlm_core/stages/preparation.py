"""Stage prepare_corpus: raw text files -> clean, deduplicated and decontaminated Parquet corpora with a report.

Tasks on any number of machines read, compare and write the rows, and exchange 16-byte keys instead of text
(`corpora/phases`). This process lists the tasks, adds up their records, and joins the finished tables part by part.
After a restart, only unfinished tasks run again.

    mono/<language>/<corpus>.parquet              text
    pairs/<pivot>-<language>/<corpus>.parquet     source (in the pivot language), target
    held_out/<pivot>-<language>/<corpus>.parquet  source, target; held_out_mono/<language>/… if monolingual
    labelled.parquet                              text, label (its corpus), language, split
    report.json                                   row counts of every file: read = kept + dropped by reason
"""

import contextlib
import itertools
import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from infoxlm_core import manifests, user_files
from infoxlm_core.config import PreparationConfig
from infoxlm_core.corpora import fingerprints, length_ratio
from infoxlm_core.corpora.parallel import ParallelMap, map_in_process
from infoxlm_core.corpora.phases import clean, deduplicate, reserve, write
from infoxlm_core.corpora.phases.job import Files, Job, Part, Record, RowCounts, add_counts, run_phase
from infoxlm_core.corpora.report import check_files, check_remaining_rows, make_report
from infoxlm_core.corpora.tables import HELD_OUT, ROW_GROUP, TRAINING
from infoxlm_core.errors import CorpusTooSmall

_OUTPUT_NAMES = (*TRAINING, *HELD_OUT, write.LABELLED_TABLE, "report.json", manifests.NAME)
PARTS_OF_PARTITION = 32
"""Number of parts whose keys one task compares. It limits the task's memory without affecting the result."""


def prepare(
    config: PreparationConfig,
    output: Path,
    files: Files,
    parallel_map: ParallelMap = map_in_process,
    localise: Callable[[PreparationConfig], PreparationConfig] | None = None,
) -> dict[str, Any]:
    """Clean, deduplicate and decontaminate a run's corpora, and return the report.

    Args:
        config: stage settings. The paths of test sets must be on this machine.
        output: artifact directory. Files of an earlier attempt are replaced. The caller writes the manifest.
        files: storage for intermediate files. Files of an interrupted preparation are reused.
        parallel_map: function that runs the tasks; does not affect the result.
        localise: function that replaces corpus paths by those of a task's machine; None if the paths are the same.

    Raises:
        InputError: a corpus or test set is unusable, or a library is missing; `output` is left empty.
        EvaluationLeak: the training text contains a sentence reserved for evaluation; `output` is left empty.
    """
    if config.cleaning.near_duplicates == "minhash":
        fingerprints.check_minhash()
    output.mkdir(parents=True, exist_ok=True)
    _remove_outputs(output)
    try:
        report = _run_phases(Job(config, files, localise), output, parallel_map)
    except BaseException:  # also if a user or the system stops the process
        _remove_outputs(output)
        raise
    manifests.write_atomically(output / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return report


def check_labels(config: PreparationConfig, corpus: Path) -> None:
    """Check that a prepared corpus has labelled text for a classifier if the config names several labels.

    A text's label is the name of its corpus.

    Raises:
        CorpusTooSmall: the training rows have fewer than two labels.
    """
    if len(config.labels) < 2:
        return
    path = corpus / write.LABELLED_TABLE
    labels = set()
    if path.is_file():
        training_rows = pq.read_table(path, columns=["label"], filters=[("split", "==", "train")])
        labels = set(training_rows["label"].unique().to_pylist())
    if len(labels) < 2:
        raise CorpusTooSmall(
            f"labelled_share ({config.labelled_share:g}) needs training messages from two corpora, but has them from "
            f"{len(labels)} ({', '.join(labels) or 'none'}). Messages must have {clean.LABELLED_CHARACTERS} or more "
            "characters and be in one corpus only: set labelled_share to 0, lower it, or add a corpus of pairs"
        )


def digest_sources(config: PreparationConfig) -> list[str]:
    """Compute the digest of each corpus and test set that is a local file or directory.

    Corpora from the Python package index are not local, so they are skipped. The config contains their digests.
    """
    digests = []
    for path in map(Path, config.paths):
        has_files = path.is_file() or any(file.is_file() for file in user_files.list_tree(path))
        if has_files:
            digests.append(manifests.digest_files(path))
    return digests


def build_facts(report: dict[str, Any]) -> dict[str, Any]:
    """Build the facts for the corpus's manifest: row counts and test set digests."""
    rows_by_kind = report["languages"]  # kind of text -> language -> number of rows
    corpus_facts: dict[str, Any] = {
        "sentences": sum(rows_by_kind["mono"].values()),
        "translation_pairs": sum(rows_by_kind["pairs"].values()),
        "held_out_pairs": sum(rows_by_kind["held_out"].values()),
        **rows_by_kind,
        "totals": report["totals"],
    }
    test_digests = {test_file["sha256"] for test_file in report.get("evaluation_sets", ())}
    if test_digests:
        # Encoders inherit this list, and evaluations warn about test sets that are not on it.
        corpus_facts["reserved"] = sorted(test_digests)
    return corpus_facts


def _remove_outputs(output: Path) -> None:
    """Remove only files that this stage writes, because a user may have named an existing directory."""
    for name in _OUTPUT_NAMES:
        path = output / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _run_phases(job: Job, output: Path, parallel_map: ParallelMap) -> dict[str, Any]:
    """Run the tasks of all phases, write the corpora to `output`, and return the report."""
    counts: RowCounts = defaultdict(Counter)
    job.put_marker()  # lets tasks on other machines check that they see the same files
    finished = {entry.name for entry in job.files.entries()}  # names of records that an earlier attempt wrote
    # `run_phase` is a generator, so the tasks of a phase run while its records are iterated.
    [test_set_record] = run_phase(reserve.reserve_test_sets, job, 1, finished, map_in_process)  # test sets are small
    job = _read_sources(job, finished, parallel_map)
    clean_records = run_phase(clean.clean_part, job, len(job.parts), finished, parallel_map)
    job = _collect_clean_parts(job, counts, clean_records)
    job = _reserve_evaluation_text(job, finished, parallel_map)
    _find_duplicates(job, finished, parallel_map)
    write_records = run_phase(write.write_tables, job, len(job.parts), finished, parallel_map)
    _join_tables(job, output, counts, write_records)
    report = make_report(counts, _count_labelled_rows(output), job.config)
    if test_set_record["test_files"]:
        report["evaluation_sets"] = test_set_record["test_files"]
    return report


def _read_sources(job: Job, finished: Set[str], parallel_map: ParallelMap) -> Job:
    """Read all sources into parts of bounded size. Return the job with these parts."""
    records = run_phase(clean.read_source, job, len(job.config.corpora), finished, parallel_map)
    parts = _list_parts(job, records)
    parts_of_partition = PARTS_OF_PARTITION
    if job.config.cleaning.near_duplicates == "minhash":
        parts_of_partition = max(1, PARTS_OF_PARTITION // 8)  # MinHash adds 20 keys per row
    return replace(job, parts=parts, partition_count=1 + len(parts) // parts_of_partition)


def _reserve_evaluation_text(job: Job, finished: Set[str], parallel_map: ParallelMap) -> Job:
    """Collect the digests of all text reserved for evaluation. Return the job with a digest of the collection."""
    if job.config.labelled_share:
        # `run_phase` is a generator, so use `list` to run all its tasks before the next phase.
        list(run_phase(reserve.choose_labelled_test_set, job, job.partition_count, finished, parallel_map))
    [reserved_text] = run_phase(reserve.merge_reserved_digests, job, 1, finished, parallel_map)
    return replace(job, reserved_digest=reserved_text["digest"])


def _find_duplicates(job: Job, finished: Set[str], parallel_map: ParallelMap) -> None:
    """Compare all rows with the reserved text and with each other, and record the rows to drop."""
    if job.config.cleaning.similarity:
        from infoxlm_core.tasks import pair_similarity  # imports torch, which is slow and needed only here

        list(run_phase(pair_similarity.measure, job, len(job.parts), finished, parallel_map))
    # `run_phase` is a generator, so use `list` to run all tasks of a phase before the next phase.
    list(run_phase(deduplicate.write_keys, job, len(job.parts), finished, parallel_map))
    list(run_phase(deduplicate.find_duplicates, job, job.partition_count, finished, parallel_map))


def _list_parts(job: Job, records: Iterator[Record]) -> list[Part]:
    """List all parts by corpus, language and file. This order decides which duplicate is kept: the first."""
    parts = []
    for source_number, record in enumerate(records):
        source = job.config.corpora[source_number]
        is_held_out = source.name in job.config.held_out
        text_kind, pair_kind = HELD_OUT if is_held_out else TRAINING
        if not record["parts"]:
            check_remaining_rows(source, Counter())  # raises an error, or logs why the source may be empty
        for name, language_codes in record["parts"]:  # codes such as "de" or "en-de"
            languages = tuple(language_codes.split("-"))
            kind = text_kind if len(languages) == 1 else pair_kind
            parts.append(Part(name, source_number, source.name, kind, languages))
    corpora = [source.name for source in job.config.corpora]  # sources of one corpus have the same name
    return sorted(parts, key=lambda part: _make_sort_key(part, corpora))


def _make_sort_key(part: Part, corpora: list[str]) -> tuple[int, str, str]:
    """Return the key for sorting parts by corpus, language and file."""
    # As in file names, the trailing dot sorts pairs ("en-de.") before sentences ("en.").
    language_key = "-".join(part.languages) + "."
    return corpora.index(part.corpus), language_key, part.name


def _collect_clean_parts(job: Job, counts: RowCounts, records: Iterator[Record]) -> Job:
    """Count the rows of all parts. Return the job with its non-empty parts and each pair's median length ratio.

    Raises:
        EncodingError: a file has too many lines that are not UTF-8.
        InputError: a file's language differs from the configured language.
        CorpusTooSmall: a corpus has no usable rows.
    """
    clean_parts = []
    length_ratios: defaultdict[str, Counter[int]] = defaultdict(Counter)
    parts_and_records = zip(job.parts, records, strict=True)
    # Parts are sorted by corpus, so an unusable corpus is reported before the next corpus is cleaned.
    for _, group in itertools.groupby(parts_and_records, key=lambda item: item[0].corpus):
        corpus_records = list(group)
        _check_corpus(job, corpus_records)
        for part, record in corpus_records:
            add_counts(counts, record)
            if record["staged_rows"]:
                clean_parts.append(part)
                # Records are stored as JSON, whose keys are strings.
                histogram = {int(bin_number): count for bin_number, count in record["length_ratios"].items()}
                length_ratios["-".join(part.languages)].update(histogram)
    medians = {pair: length_ratio.find_median(ratios) for pair, ratios in length_ratios.items() if ratios}
    return replace(job, parts=clean_parts, medians=medians)


def _check_corpus(job: Job, corpus_records: Sequence[tuple[Part, Record]]) -> None:
    """Check the row counts of a corpus's files and sources. See `_collect_clean_parts` for errors."""
    counts_of_files: RowCounts = defaultdict(Counter)
    counts_of_sources: defaultdict[int, Counter[str]] = defaultdict(Counter)
    first_invalid: dict[str, str] = {}  # file -> first invalid line
    for part, record in corpus_records:
        add_counts(counts_of_files, record)
        for *_file_key, file_counts in record["counts"]:
            counts_of_sources[part.source_number].update(file_counts)
        # The right side wins, so a file in several parts keeps the invalid line of its first part.
        first_invalid = record["first_invalid"] | first_invalid
    check_files(counts_of_files, first_invalid, job.config.cleaning.max_invalid_utf8)
    for source_number, source_counts in sorted(counts_of_sources.items()):
        check_remaining_rows(job.config.corpora[source_number], source_counts)


def _join_tables(job: Job, output: Path, counts: RowCounts, records: Iterator[Record]) -> None:
    """Concatenate the tables of all parts into `output`, and add the parts' row counts to `counts`."""
    # Iterating `records` waits for each task, so the first tables are joined while later tasks still run.
    with contextlib.ExitStack() as open_files:
        writers: dict[str, pq.ParquetWriter] = {}
        for number, record in enumerate(records):
            add_counts(counts, record)
            for name in record["tables"]:
                table = job.read_table(f"tables/{number}/{name}")
                if name not in writers:
                    (output / name).parent.mkdir(parents=True, exist_ok=True)
                    writer = pq.ParquetWriter(output / name, table.schema, compression="zstd")
                    writers[name] = open_files.enter_context(writer)
                writers[name].write_table(table, row_group_size=ROW_GROUP)


def _count_labelled_rows(output: Path) -> dict[str, int]:
    """Count the rows of each split of the labelled text."""
    path = output / write.LABELLED_TABLE
    if not path.is_file():
        return {}
    splits = pq.read_table(path, columns=["split"])["split"]
    return {count["values"]: count["counts"] for count in splits.value_counts().to_pylist()}
