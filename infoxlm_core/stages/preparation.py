"""Stage prepare_corpus: raw text files -> clean, deduplicated, decontaminated corpora, as Parquet with a report.

The first pass reads and cleans every row, writes the clean rows to a temporary folder and collects the text reserved
for evaluation. The second pass removes duplicates and reserved text from these rows and writes the others to the
corpus, which is then read again to prove that it contains no reserved text. Cleaning of single rows is most of the work
and may run on many machines (`corpora/parallel.py`). Comparisons between rows run in this process, in the order of the
rows.

    mono/<language>/<corpus>.parquet              text
    pairs/<pivot>-<language>/<corpus>.parquet     source (the pivot's side), target
    held_out/<pivot>-<language>/<corpus>.parquet  source, target; held_out_mono/<language>/… if monolingual
    labelled.parquet                              text, label (its corpus), language, split
    report.json                                   for every file: read = kept + dropped by reason
"""

import functools
import json
import logging
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from infoxlm_core import manifests, outside
from infoxlm_core.config import CorpusSource, PreparationConfig
from infoxlm_core.corpora import evaluation_sets, formats, length_ratio, row_chunks, tables
from infoxlm_core.corpora.fingerprints import Keys
from infoxlm_core.corpora.parallel import ParallelMap, in_process
from infoxlm_core.corpora.reserved import LABELLED_CHARACTERS, Reserved, check_leaks
from infoxlm_core.corpora.row_writer import CleanedRow, FileKey, RowCounts, RowWriter
from infoxlm_core.corpora.tables import HELD_OUT, TRAINING, Tables, read_rows
from infoxlm_core.errors import CorpusTooSmall, EncodingError, InputError
from infoxlm_core.progress import progress

logger = logging.getLogger(__name__)

MAX_WRONG_LANGUAGE = 0.3  # share of a file's rows above which the config names the wrong language
MIN_ROWS_TO_JUDGE = 1000  # of a file or language; in fewer rows a share is not significant
MAX_LOSS = 0.05  # share of a language's rows above which a filter is suspected not to suit the language
_FILTERS = (
    "too_short", "too_long", "few_words", "one_sign", "no_letters", "wrong_script", "wrong_language", "untranslated",
    "length_ratio", "held_out", "evaluation_set", "overlap",
)  # fmt: skip
_OUTPUT_NAMES = (*TRAINING, *HELD_OUT, "staging", "labelled.parquet", "report.json", manifests.NAME)
_WRITTEN = [tables.of_text(*columns) for columns in (("text",), ("source", "target"), tables.LABELLED)]
_STAGED = pa.schema([row_chunks.TEXTS, row_chunks.FILE, *row_chunks.KEYS])


def prepare(config: PreparationConfig, output: Path, parallel_map: ParallelMap | None = None) -> dict[str, Any]:
    """Prepare the corpora of a run and return the report.

    Args:
        config: names corpora on this machine.
        output: folder of the artifact. Files of an earlier attempt are replaced; the caller writes the manifest.
        parallel_map: runs the work on single rows; None: in this process. The result is the same.

    Raises:
        InputError: a corpus or test set cannot be used; `output` is left empty.
        EvaluationLeak: the training text contains a sentence reserved for evaluation; `output` is left empty.
    """
    output.mkdir(parents=True, exist_ok=True)
    _remove_outputs(output)
    counts: RowCounts = defaultdict(Counter)
    try:
        reserved, test_files = _reserve_test_sets(config)
        reserved, medians = _clean_and_stage(config, output / "staging", reserved, counts, parallel_map or in_process)
        _write(config, output, reserved, medians, counts)
        shutil.rmtree(output / "staging", ignore_errors=True)
        report = _make_report(counts, output, config)
        if test_files:
            report["evaluation_sets"] = test_files
        check_leaks(output, reserved, parallel_map or in_process)
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
    path = corpus / "labelled.parquet"
    labels = set()
    if path.is_file():
        labels = {label for _, label, _, split in read_rows(path) if split == "train"}
    if len(labels) < 2:
        raise CorpusTooSmall(
            f"labelled_share ({config.labelled_share:g}) needs training messages of two corpora, with at least "
            f"{LABELLED_CHARACTERS} characters and in no other corpus, but has those of {', '.join(labels) or 'none'} "
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


# ---------------------------------------------------------------- first pass: read, clean, stage


def _reserve_test_sets(config: PreparationConfig) -> tuple[Reserved, list[dict[str, Any]]]:
    """Return the texts of all test sets, and the name, digest and number of texts of each file."""
    reserved = Reserved(overlap=config.overlap)
    test_files = []
    for path in map(Path, config.evaluation_sets):
        for file in evaluation_sets.list_files(path):
            text_count = 0
            for text in evaluation_sets.read(file):
                reserved.add_test_text(text)
                text_count += 1
            test_files.append({"file": file.name, "sha256": evaluation_sets.digest(file), "texts": text_count})
        logger.info("%s: its texts will be removed from the training text", path)
    return reserved, test_files


def _clean_and_stage(
    config: PreparationConfig, staging: Path, reserved: Reserved, counts: RowCounts, parallel_map: ParallelMap
) -> tuple[Reserved, dict[str, float]]:
    """Read and clean all corpora, write the clean rows into `staging`, and count all rows in `counts`.

    Returns:
        All text reserved for evaluation, and the median log length ratio of each language pair.
    """
    length_ratios: defaultdict[str, Counter[int]] = defaultdict(Counter)
    # All paths are verified before the first corpus is read, because reading may take hours.
    paths_of_sources = [_verify_paths(source) for source in config.corpora]
    with Tables(staging, _STAGED) as staged, progress("reading", len(config.corpora), "corpora") as advance:
        for source, paths in zip(config.corpora, paths_of_sources, strict=True):
            source_counts: RowCounts = defaultdict(Counter)
            first_invalid: dict[FileKey, str] = {}
            for row in _read_and_clean(source, paths, config, parallel_map):
                source_counts[row.file_key]["read"] += 1
                if row.reason_to_drop:
                    source_counts[row.file_key][row.reason_to_drop] += 1
                    if row.reason_to_drop == "invalid_utf8":
                        first_invalid.setdefault(row.file_key, row.texts[0])
                    continue
                staged.add(f"{row.corpus}/{row.language_pair}.parquet", (row.texts, row.file, *row.keys))
                reserved.add_row(row.texts, row.keys, row.corpus, config)
                if len(row.texts) == 2:
                    length_ratios[row.language_pair][length_ratio.bin_of(row.texts)] += 1
            _check_files(source, config.cleaning.max_invalid_utf8, source_counts, first_invalid)
            _check_corpus(source, sum(source_counts.values(), Counter()))
            for file_key, file_counts in source_counts.items():
                counts[file_key].update(file_counts)
            advance(1)
    medians = {languages: length_ratio.median_of(histogram) for languages, histogram in length_ratios.items()}
    return reserved.finalise(), medians


def _read_and_clean(
    source: CorpusSource, paths: Sequence[Path], config: PreparationConfig, parallel_map: ParallelMap
) -> Iterator[CleanedRow]:
    """Yield the rows of a corpus, normalised, with their keys and the reason to drop them, if any."""
    # Runs of words are compared only with held-out and test text; computing them takes most of the time.
    has_test_text = bool(config.held_out or config.held_out_share or config.evaluation_sets)
    overlap = config.overlap if has_test_text else 0
    clean = functools.partial(row_chunks.clean_rows, languages=config.languages, rules=config.cleaning, overlap=overlap)
    chunks = row_chunks.chunks(formats.read(source, config.languages, config.pivot, paths))
    for chunk in parallel_map(clean, chunks):
        for language_pair, texts, file, reason, *digests in tables.rows_of(chunk):
            languages = tuple(language_pair.split("-"))
            kind = _choose_folder(source.name, languages, config)
            yield CleanedRow(source.name, languages, kind, file, texts, Keys(*digests), reason)


def _choose_folder(corpus: str, languages: Sequence[str], config: PreparationConfig) -> str:
    """Return the folder for rows of a corpus: mono, pairs, held_out_mono or held_out."""
    folders = HELD_OUT if corpus in config.held_out else TRAINING
    return folders[len(languages) - 1]


def _verify_paths(source: CorpusSource) -> list[Path]:
    """Return the files and folders of a corpus. Raise InputError if one is missing or has an unexpected digest."""
    paths = [Path(path) for path in source.paths]
    for path in paths:
        if not path.exists():
            raise InputError(f"{path}: no such file or folder: check the path of the corpus")
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


def _check_files(
    source: CorpusSource, max_invalid: float, counts_of_files: RowCounts, first_invalid: dict[FileKey, str]
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
                f"{first_invalid[file_key]}: invalid UTF-8 begins here, {counts['invalid_utf8']} of {rows} lines have "
                f"it, cleaning.max_invalid_utf8 allows a share of {max_invalid:g}: convert the file to UTF-8"
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
        logger.warning("read %s: it has no row in a language of this run", source.name)
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


# ---------------------------------------------------------------- second pass: filter, write


def _write(
    config: PreparationConfig, output: Path, reserved: Reserved, medians: dict[str, float], counts: RowCounts
) -> None:
    """Write every staged row that no filter drops."""
    corpora = dict.fromkeys(source.name for source in config.corpora)  # several sources may belong to one corpus
    with Tables(output, *_WRITTEN) as written:
        writer = RowWriter(config, reserved, medians, written, counts)
        for corpus in corpora:
            for staged_file in sorted((output / "staging" / corpus).glob("*.parquet")):
                languages = tuple(staged_file.stem.split("-"))
                kind = _choose_folder(corpus, languages, config)
                for texts, file, *digests in read_rows(staged_file):
                    writer.add(CleanedRow(corpus, languages, kind, file, texts, Keys(*digests)))


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
    if (output / "labelled.parquet").is_file():
        for _, _, _, split in read_rows(output / "labelled.parquet"):
            kept_rows["labelled"][split] += 1
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
