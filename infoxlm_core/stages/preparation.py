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
import logging
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from infoxlm_core import manifests, outside
from infoxlm_core.config import CorpusSource, PreparationConfig
from infoxlm_core.corpora import fingerprints, length_ratio
from infoxlm_core.corpora.parallel import ParallelMap, in_process
from infoxlm_core.corpora.phases import clean, compare, reserve, write
from infoxlm_core.corpora.phases.job import FileKey, Files, Job, Part, Record, RowCounts, add_counts, run_phase
from infoxlm_core.corpora.tables import HELD_OUT, ROW_GROUP, TRAINING
from infoxlm_core.errors import CorpusTooSmall, EncodingError, InputError

logger = logging.getLogger(__name__)

MAX_WRONG_LANGUAGE = 0.3  # share of a file's rows above which the config names the wrong language
MIN_ROWS_TO_JUDGE = 1000  # of a file or language; in fewer rows a share is not significant
MAX_LOSS = 0.05  # share of a language's rows above which a filter is suspected not to suit the language
_FILTERS = (
    "too_short", "too_long", "few_words", "one_sign", "no_letters", "wrong_script", "wrong_language", "untranslated",
    "other_numbers", "other_placeholders", "length_ratio", "held_out", "evaluation_set", "overlap", "not_similar",
)  # fmt: skip
_OUTPUT_NAMES = (*TRAINING, *HELD_OUT, write.LABELLED_TABLE, "report.json", manifests.NAME)
PARTS_OF_PARTITION = 32
"""Parts for which one task compares all keys. It bounds the memory of the task and does not affect the result."""


def prepare(
    config: PreparationConfig,
    output: Path,
    files: Files,
    parallel_map: ParallelMap = in_process,
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
        has_files = path.is_file() or any(file.is_file() for file in outside.list_tree(path))
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


# ---------------------------------------------------------------- phases


def _run_phases(job: Job, output: Path, parallel_map: ParallelMap) -> dict[str, Any]:
    """Run all tasks, write the corpora to `output`, and return the report, which is the sum of the tasks' records."""
    counts: RowCounts = defaultdict(Counter)
    job.put_marker()
    finished = {entry.name for entry in job.files.entries()}
    run = functools.partial(run_phase, finished=finished, parallel_map=parallel_map)
    [tests] = run_phase(reserve.reserve, job, 1, finished, in_process)  # test sets are small
    parts = _list_parts(job, run(clean.read, job, len(job.config.corpora)))
    parts_of_partition = PARTS_OF_PARTITION
    if job.config.cleaning.near_duplicates == "minhash":
        parts_of_partition = max(1, PARTS_OF_PARTITION // 8)  # a row has 20 bands as further keys
    job = replace(job, parts=parts, partition_count=1 + len(parts) // parts_of_partition)
    job = _clean(job, counts, run(clean.clean, job, len(job.parts)))
    if job.config.labelled_share:
        list(run(reserve.label, job, job.partition_count))
    [united] = run(reserve.unite, job, 1)
    job = replace(job, reserved_digest=united["digest"])
    if job.config.cleaning.similarity:
        from infoxlm_core.tasks import pair_similarity  # imports torch, which other preparations do not need

        list(run(pair_similarity.measure, job, len(job.parts)))
    list(run(compare.offer, job, len(job.parts)))
    list(run(compare.reduce, job, job.partition_count))
    _write(job, output, counts, run(write.write, job, len(job.parts)))
    report = _make_report(counts, output, job.config)
    if tests["test_files"]:
        report["evaluation_sets"] = tests["test_files"]
    return report


def _list_parts(job: Job, records: Iterator[Record]) -> list[Part]:
    """Return all parts in the order in which the first of several duplicates is kept: by corpus, language and file."""
    parts = []
    for number, record in enumerate(records):
        source = job.config.corpora[number]
        folders = HELD_OUT if source.name in job.config.held_out else TRAINING
        if not record["parts"]:
            _check_corpus(source, Counter())
        for name, language_pair in record["parts"]:
            languages = tuple(language_pair.split("-"))
            parts.append(Part(name, number, source.name, folders[len(languages) - 1], languages))
    corpora = [source.name for source in job.config.corpora]  # several sources may belong to one corpus
    # With the dot that follows in a file name, the pairs "en-de." are before the sentences "en.".
    return sorted(parts, key=lambda part: (corpora.index(part.corpus), "-".join(part.languages) + ".", part.name))


def _clean(job: Job, counts: RowCounts, records: Iterator[Record]) -> Job:
    """Count the rows of all parts. Return the job with the parts that have clean rows and the medians of length ratios.

    Raises as `_check_files` and `_check_corpus`.
    """
    length_ratios: defaultdict[str, Counter[int]] = defaultdict(Counter)
    parts = []
    numbered_records = zip(job.parts, records, strict=True)
    for _, records_of_corpus in itertools.groupby(numbered_records, key=lambda item: item[0].corpus):
        counts_of_sources: defaultdict[int, RowCounts] = defaultdict(lambda: defaultdict(Counter))
        first_invalid_of_sources: defaultdict[int, dict[str, str]] = defaultdict(dict)
        for part, record in records_of_corpus:
            add_counts(counts_of_sources[part.source], record)
            add_counts(counts, record)
            first_invalid = first_invalid_of_sources[part.source]
            first_invalid_of_sources[part.source] = record["first_invalid"] | first_invalid
            if record["staged_rows"]:
                parts.append(part)
                histogram = {int(bin_number): count for bin_number, count in record["length_ratios"].items()}
                length_ratios["-".join(part.languages)].update(histogram)
        for number, source_counts in sorted(counts_of_sources.items()):
            source = job.config.corpora[number]
            max_invalid = job.config.cleaning.max_invalid_utf8
            _check_files(source, max_invalid, source_counts, first_invalid_of_sources[number])
            _check_corpus(source, sum(source_counts.values(), Counter()))
    medians = {pair: length_ratio.median_of(ratios) for pair, ratios in length_ratios.items() if ratios}
    return replace(job, parts=parts, medians=medians)


def _write(job: Job, output: Path, counts: RowCounts, records: Iterator[Record]) -> None:
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


def _check_files(
    source: CorpusSource, max_invalid: float, counts_of_files: RowCounts, first_invalid: dict[str, str]
) -> None:
    """Refuse a corpus with a file that is not UTF-8 or in another language than the config says.

    Args:
        source: the corpus.
        max_invalid: share of a file's lines that may be invalid UTF-8.
        counts_of_files: the counts of this corpus.
        first_invalid: file:line:byte of the first invalid UTF-8 of each file.

    Raises:
        EncodingError: a file has too many lines that are not UTF-8.
        InputError: a file is in another language than the config says.
    """
    for file_key, counts in counts_of_files.items():
        rows = counts["read"]
        rows_in_other_languages = counts["wrong_script"] + counts["wrong_language"]
        if counts["invalid_utf8"] > max_invalid * rows:
            raise EncodingError(
                f"{first_invalid[file_key.file]}: invalid UTF-8 begins here, {counts['invalid_utf8']} of {rows} lines "
                f"have it, cleaning.max_invalid_utf8 allows a share of {max_invalid:g}: convert the file to UTF-8"
            )
        if rows >= MIN_ROWS_TO_JUDGE and rows_in_other_languages > MAX_WRONG_LANGUAGE * rows:
            raise InputError(
                f"{file_key.file} (corpus {source.name}): {rows_in_other_languages} of {rows} rows are not in the "
                f"language expected ({file_key.language}): check its languages"
            )


def _check_corpus(source: CorpusSource, counts: Counter[str]) -> None:
    """Log the counts of a corpus. Raise CorpusTooSmall if none of its rows can be used."""
    rows = counts["read"]
    dropped = counts.total() - rows
    if not rows and not source.languages:  # a corpus of many languages may lack those of this run
        logger.warning("read %s: it has no rows in the languages of this run", source.name)
    elif rows == dropped:
        reasons = _describe_reasons(counts) or "it has no rows"
        raise CorpusTooSmall(
            f"corpus {source.name}: none of its {rows} rows can be used (have=0 need=1; {reasons}): check its format, "
            "languages and columns, or remove it from the config"
        )
    else:
        logger.info("read %s: %d rows, %d dropped in cleaning", source.name, rows, dropped)


def _describe_reasons(counts: Counter[str]) -> str:
    """Return the three most frequent reasons for which rows were dropped, with their counts."""
    reasons = Counter({reason: count for reason, count in counts.items() if reason not in ("read", "kept")})
    return ", ".join(f"{reason} {count}" for reason, count in reasons.most_common(3))


# ---------------------------------------------------------------- report


def _make_report(counts: RowCounts, output: Path, config: PreparationConfig) -> dict[str, Any]:
    """Return the content of report.json: how many rows were read, kept, and dropped for each reason.

    Raises:
        CorpusTooSmall: there is nothing to train on, or `held_out_share` holds out nothing.
    """
    totals: dict[str, Counter[str]] = {kind: Counter() for kind in (*TRAINING, *HELD_OUT)}
    kept_rows: dict[str, Counter[str]] = {kind: Counter() for kind in (*TRAINING, *HELD_OUT, "labelled")}
    for file_key, file_counts in sorted(counts.items()):
        totals[file_key.kind].update(file_counts)
        if file_counts["kept"]:
            language = file_key.language
            if "mono" not in file_key.kind:
                language = f"{config.pivot}-{language}"
            kept_rows[file_key.kind][language] += file_counts["kept"]
    labelled_path = output / write.LABELLED_TABLE
    splits = (
        pq.read_table(labelled_path, columns=["split"])["split"].value_counts().to_pylist()
        if labelled_path.is_file()
        else []
    )
    kept_rows["labelled"] = Counter({count["values"]: count["counts"] for count in splits})
    _check_amount_of_text(totals, kept_rows, config)
    return {
        "files": [_describe_file(file_key, file_counts) for file_key, file_counts in sorted(counts.items())],
        "totals": {kind: dict(sorted(kind_counts.items())) for kind, kind_counts in totals.items()},
        "languages": {kind: dict(sorted(kind_counts.items())) for kind, kind_counts in kept_rows.items()},
        "warnings": _warn_of_strict_filters(counts),
    }


def _check_amount_of_text(
    totals: dict[str, Counter[str]], kept_rows: dict[str, Counter[str]], config: PreparationConfig
) -> None:
    """Raise CorpusTooSmall if there is nothing to train on, or `held_out_share` holds out nothing."""
    if not kept_rows["pairs"].total() + kept_rows["mono"].total():
        reasons = _describe_reasons(totals["pairs"] + totals["mono"]) or "nothing was read"
        raise CorpusTooSmall(f"no training text remains (have=0 need=1; {reasons}): check corpora and cleaning")
    if config.held_out_share and not kept_rows["held_out"].total():
        raise CorpusTooSmall(
            f"held_out_share ({config.held_out_share:g}) holds out none of {totals['pairs']['read']} pairs (have=0 "
            "need=1): raise it, or prepare more pairs"
        )


def _describe_file(file_key: FileKey, counts: Counter[str]) -> dict[str, Any]:
    """Return the counts of a file as the report lists them. Every row that was read must be kept or dropped."""
    dropped = {reason: counts[reason] for reason in sorted(counts) if reason not in ("read", "kept")}
    if counts["read"] != counts["kept"] + sum(dropped.values()):
        raise RuntimeError(f"{file_key}: a row is neither kept nor dropped: report this as a bug")
    return {**file_key._asdict(), "read": counts["read"], "kept": counts["kept"], "dropped": dropped}


def _warn_of_strict_filters(counts_of_files: RowCounts) -> list[str]:
    """Log and return a line for each filter that drops too large a share of a language's training rows."""
    counts_of_language: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for file_key, file_counts in counts_of_files.items():
        if file_key.kind in TRAINING:
            counts_of_language[file_key.kind, file_key.language].update(file_counts)
    dropped_shares: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for (kind, language), counts in sorted(counts_of_language.items()):
        if counts["read"] < MIN_ROWS_TO_JUDGE:
            continue
        for filter_name in _FILTERS:
            share = counts[filter_name] / counts["read"]
            if share > MAX_LOSS:
                dropped_shares[kind, filter_name].append(f"{share:.1%} of {language}")
    warnings = []
    for (kind, filter_name), shares in dropped_shares.items():
        warning = (
            f"{kind}: the filter {filter_name} drops {', '.join(shares)}, more than {MAX_LOSS:.0%}: check its setting "
            "and the files of these languages"
        )
        logger.warning("%s", warning)
        warnings.append(warning)
    return warnings
