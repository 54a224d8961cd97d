"""Stage prepare_corpus: raw text files -> clean, deduplicated, decontaminated corpora, as Parquet with a report.

Tasks on any number of machines read, compare and write the rows, and exchange 16-byte keys instead of text
(`corpora/phases`). This process lists the tasks, adds up their records, and joins the finished tables part by part. If
it is killed and started again, it continues after the tasks that have finished.

    mono/<language>/<corpus>.parquet              text
    pairs/<pivot>-<language>/<corpus>.parquet     source (the pivot's side), target
    held_out/<pivot>-<language>/<corpus>.parquet  source, target; held_out_mono/<language>/… if monolingual
    labelled.parquet                              text, label (its corpus), language, split
    report.json                                   for every file: read = kept + dropped by reason
"""

import contextlib
import functools
import itertools
import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
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
"""Parts for which one task compares all keys. It bounds the memory of the task and does not affect the result."""


def prepare(
    config: PreparationConfig,
    output: Path,
    files: Files,
    parallel_map: ParallelMap = map_in_process,
    localise: Callable[[PreparationConfig], PreparationConfig] | None = None,
) -> dict[str, Any]:
    """Prepare the corpora of a run and return the report.

    Args:
        config: the corpora, and test sets on this machine.
        output: folder of the artifact. Files of an earlier attempt are replaced; the caller writes the manifest.
        files: empty, or the intermediate files of an interrupted preparation of this config, which continues.
        parallel_map: runs the tasks. The result does not depend on it.
        localise: returns a config with the paths of its corpora on the machine of a task; None: they are the same.

    Raises:
        InputError: a corpus or test set cannot be used, or a library is missing; `output` is left empty.
        EvaluationLeak: the training text contains a sentence reserved for evaluation; `output` is left empty.
    """
    if config.cleaning.near_duplicates == "minhash":
        fingerprints.check_minhash()
    output.mkdir(parents=True, exist_ok=True)
    _remove_outputs(output)
    try:
        report = _run_phases(Job(config, files, localise), output, parallel_map)
    except BaseException:
        _remove_outputs(output)
        raise
    manifests.write_atomically(output / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return report


def check_labels(config: PreparationConfig, corpus: Path) -> None:
    """Check that the labelled text of a prepared corpus can train a classifier, if the config has several labels.

    Raises:
        CorpusTooSmall: its training rows have fewer than two labels.
    """
    if len(config.labels) < 2:
        return
    path = corpus / write.LABELLED_TABLE
    labels = set()
    if path.is_file():
        training_rows = pq.read_table(path, columns=["label"], filters=[("split", "==", "train")])
        labels = set(training_rows["label"].unique().to_pylist())
    if len(labels) < 2:
        names = ", ".join(labels) or "none"
        raise CorpusTooSmall(
            f"labelled_share ({config.labelled_share:g}) needs training messages of two corpora, with at least "
            f"{clean.LABELLED_CHARACTERS} characters and in no other corpus, but has those of {names} "
            f"(have={len(labels)} need=2): set it to 0, or add a corpus of pairs"
        )


def digest_sources(config: PreparationConfig) -> list[str]:
    """Return the digest of each corpus and test set that is a local file or folder.

    The config itself has the digests of wheels from the package index.
    """
    digests = []
    for path in map(Path, config.paths):
        has_files = path.is_file() or any(file.is_file() for file in user_files.list_tree(path))
        if has_files:
            digests.append(manifests.digest_files(path))
    return digests


def facts(report: dict[str, Any]) -> dict[str, Any]:
    """Return what the manifest records of a report: the numbers of rows, and the digests of the test sets."""
    rows_of_languages = report["languages"]
    corpus_facts: dict[str, Any] = {
        "sentences": sum(rows_of_languages["mono"].values()),
        "translation_pairs": sum(rows_of_languages["pairs"].values()),
        "held_out_pairs": sum(rows_of_languages["held_out"].values()),
        **rows_of_languages,
        "totals": report["totals"],
    }
    test_digests = {test_file["sha256"] for test_file in report.get("evaluation_sets", ())}
    if test_digests:
        corpus_facts["reserved"] = sorted(test_digests)
    return corpus_facts


def _remove_outputs(output: Path) -> None:
    """Remove the files that this stage writes, and no others: a user may have named an existing folder."""
    for name in _OUTPUT_NAMES:
        path = output / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _run_phases(job: Job, output: Path, parallel_map: ParallelMap) -> dict[str, Any]:
    """Run all tasks, write the corpora to `output`, and return the report, which is the sum of the tasks' records."""
    counts: RowCounts = defaultdict(Counter)
    job.put_marker()
    finished = {entry.name for entry in job.files.entries()}
    run = functools.partial(run_phase, finished_records=finished, parallel_map=parallel_map)
    [test_sets] = run_phase(reserve.reserve_test_sets, job, 1, finished, map_in_process)  # test sets are small

    # Read all sources into parts of bounded size, and drop the rows that are unusable on their own.
    parts = _list_parts(job, run(clean.read_source, job, len(job.config.corpora)))
    parts_of_partition = PARTS_OF_PARTITION
    if job.config.cleaning.near_duplicates == "minhash":
        parts_of_partition = max(1, PARTS_OF_PARTITION // 8)  # a row has 20 bands as further keys
    job = replace(job, parts=parts, partition_count=1 + len(parts) // parts_of_partition)
    job = _collect_clean_parts(job, counts, run(clean.clean_part, job, len(job.parts)))

    # Collect all text that is reserved for evaluation.
    if job.config.labelled_share:
        list(run(reserve.choose_labelled_test_set, job, job.partition_count))
    [reserved_text] = run(reserve.merge_reserved_digests, job, 1)
    job = replace(job, reserved_digest=reserved_text["digest"])

    # Compare all rows with the reserved text and with each other, and write those that remain.
    if job.config.cleaning.similarity:
        from infoxlm_core.tasks import pair_similarity  # imports torch, which other preparations do not need

        list(run(pair_similarity.measure, job, len(job.parts)))
    list(run(deduplicate.write_keys, job, len(job.parts)))
    list(run(deduplicate.find_duplicates, job, job.partition_count))
    _join_tables(job, output, counts, run(write.write_tables, job, len(job.parts)))
    report = make_report(counts, _count_labelled_rows(output), job.config)
    if test_sets["test_files"]:
        report["evaluation_sets"] = test_sets["test_files"]
    return report


def _list_parts(job: Job, records: Iterator[Record]) -> list[Part]:
    """Return all parts in the order in which the first of several duplicates is kept: by corpus, language and file."""
    parts = []
    for number, record in enumerate(records):
        source = job.config.corpora[number]
        kinds = HELD_OUT if source.name in job.config.held_out else TRAINING
        if not record["parts"]:
            check_remaining_rows(source, Counter())
        for name, language_pair in record["parts"]:
            languages = tuple(language_pair.split("-"))
            kind = kinds[len(languages) - 1]  # the first is for text of one language, the second for pairs
            parts.append(Part(name, number, source.name, kind, languages))
    corpora = [source.name for source in job.config.corpora]  # several sources may belong to one corpus
    # With the dot that follows in a file name, the pairs "en-de." are before the sentences "en.".
    return sorted(parts, key=lambda part: (corpora.index(part.corpus), "-".join(part.languages) + ".", part.name))


def _collect_clean_parts(job: Job, counts: RowCounts, records: Iterator[Record]) -> Job:
    """Count the rows of all parts. Return the job with the parts that have clean rows and the medians of length ratios.

    Raises:
        EncodingError: a file has too many lines that are not UTF-8.
        InputError: a file is in another language than the config says.
        CorpusTooSmall: a corpus has no rows that can be used.
    """
    clean_parts = []
    length_ratios: defaultdict[str, Counter[int]] = defaultdict(Counter)
    parts_and_records = zip(job.parts, records, strict=True)
    # The parts of a corpus are neighbours, so an unusable corpus is refused before the next one is cleaned.
    for _, corpus_records in itertools.groupby(parts_and_records, key=lambda item: item[0].corpus):
        counts_of_files: RowCounts = defaultdict(Counter)
        counts_of_sources: defaultdict[int, Counter[str]] = defaultdict(Counter)
        first_invalid: dict[str, str] = {}
        for part, record in corpus_records:
            add_counts(counts, record)
            add_counts(counts_of_files, record)
            for *_, file_counts in record["counts"]:
                counts_of_sources[part.source_number].update(file_counts)
            first_invalid = record["first_invalid"] | first_invalid
            if record["staged_rows"]:
                clean_parts.append(part)
                histogram = {int(bin_number): count for bin_number, count in record["length_ratios"].items()}
                length_ratios["-".join(part.languages)].update(histogram)
        check_files(counts_of_files, first_invalid, job.config.cleaning.max_invalid_utf8)
        for number, source_counts in sorted(counts_of_sources.items()):
            check_remaining_rows(job.config.corpora[number], source_counts)
    medians = {pair: length_ratio.find_median(ratios) for pair, ratios in length_ratios.items() if ratios}
    return replace(job, parts=clean_parts, medians=medians)


def _join_tables(job: Job, output: Path, counts: RowCounts, records: Iterator[Record]) -> None:
    """Concatenate the tables of all parts, write them to `output`, and add up their row counts."""
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
    """Return the number of rows of each split of the labelled text."""
    path = output / write.LABELLED_TABLE
    if not path.is_file():
        return {}
    splits = pq.read_table(path, columns=["split"])["split"]
    return {count["values"]: count["counts"] for count in splits.value_counts().to_pylist()}
