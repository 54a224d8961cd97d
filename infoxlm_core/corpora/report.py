"""Report on a preparation: count the rows of every file, refuse unusable corpora, and warn of strict filters."""

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from infoxlm_core.config import CorpusSource, PreparationConfig
from infoxlm_core.corpora.phases.job import FileKey, RowCounts
from infoxlm_core.corpora.tables import HELD_OUT, TRAINING
from infoxlm_core.errors import CorpusTooSmall, EncodingError, InputError

logger = logging.getLogger(__name__)

MAX_WRONG_LANGUAGE = 0.3  # largest share of a file's rows in other languages
MIN_ROWS_TO_JUDGE = 1000  # per file or language; shares of fewer rows are not significant
MAX_LOSS = 0.05  # a filter that drops a larger share of a language's rows may not suit the language
_FILTERS = (
    "too_short", "too_long", "few_words", "one_sign", "no_letters", "wrong_script", "wrong_language", "untranslated",
    "other_numbers", "other_placeholders", "length_ratio", "held_out", "evaluation_set", "overlap", "not_similar",
)  # fmt: skip


def check_files(counts_of_files: RowCounts, first_invalid: Mapping[str, str], max_invalid: float) -> None:
    """Check that files are UTF-8 and in the language that the config names.

    Args:
        counts_of_files: row counts after cleaning.
        first_invalid: mapping from file name to the position (file:line:byte) of its first invalid UTF-8.
        max_invalid: largest share of a file's lines that may be invalid UTF-8.

    Raises:
        EncodingError: too many lines of a file are not UTF-8.
        InputError: too many rows of a file are in another language.
    """
    for file_key, counts in counts_of_files.items():
        rows = counts["read"]
        if counts["invalid_utf8"] > max_invalid * rows:
            raise EncodingError(
                f"{first_invalid[file_key.file]}: invalid UTF-8 begins here ({counts['invalid_utf8']} of {rows} lines; "
                f"cleaning.max_invalid_utf8 allows a share of {max_invalid:g}): convert the file to UTF-8"
            )
        rows_in_other_languages = counts["wrong_script"] + counts["wrong_language"]
        if rows >= MIN_ROWS_TO_JUDGE and rows_in_other_languages > MAX_WRONG_LANGUAGE * rows:
            raise InputError(
                f"{file_key.file} (corpus {file_key.corpus}): {rows_in_other_languages} of {rows} rows are not in the "
                f"language expected ({file_key.language}): check the languages of the corpus"
            )


def check_remaining_rows(source: CorpusSource, counts: Counter[str]) -> None:
    """Log how many of a corpus's rows were dropped in cleaning. Raise CorpusTooSmall if no row remains."""
    rows = counts["read"]
    dropped = counts.total() - rows  # all other counts are reasons to drop a row
    if not rows and not source.languages:  # a corpus with many languages may lack this run's languages
        logger.warning("read %s: it has no rows in the languages of this run", source.name)
    elif rows == dropped:
        reasons = _describe_reasons(counts) or "it has no rows"
        raise CorpusTooSmall(
            f"corpus {source.name}: none of its {rows} rows can be used ({reasons}): check its format, languages and "
            "columns, or remove it from the config"
        )
    else:
        logger.info("read %s: %d rows, %d dropped in cleaning", source.name, rows, dropped)


def make_report(
    counts: RowCounts, labelled_rows_by_split: Mapping[str, int], config: PreparationConfig
) -> dict[str, Any]:
    """Return the content of report.json: the numbers of rows read, kept, and dropped for each reason.

    Args:
        counts: row counts of all files.
        labelled_rows_by_split: number of labelled rows by split.
        config: config of the preparation.

    Raises:
        CorpusTooSmall: no training text remains, or `held_out_share` holds out no pair.
    """
    totals: dict[str, Counter[str]] = {kind: Counter() for kind in (*TRAINING, *HELD_OUT)}
    kept_rows: dict[str, Counter[str]] = {kind: Counter() for kind in (*TRAINING, *HELD_OUT)}
    for file_key, file_counts in counts.items():
        totals[file_key.kind].update(file_counts)
        if file_counts["kept"]:
            is_monolingual = file_key.kind in ("mono", "held_out_mono")
            language = file_key.language if is_monolingual else f"{config.pivot}-{file_key.language}"
            kept_rows[file_key.kind][language] += file_counts["kept"]
    if not (kept_rows["pairs"] or kept_rows["mono"]):
        reasons = _describe_reasons(totals["pairs"] + totals["mono"]) or "nothing was read"
        raise CorpusTooSmall(
            f"no training text remains ({reasons}): check corpora and cleaning, or lower held_out_share and "
            "labelled_share"
        )
    if config.held_out_share and not kept_rows["held_out"]:
        raise CorpusTooSmall(
            f"held_out_share ({config.held_out_share:g}) holds out none of {totals['pairs']['read']} pairs: raise it, "
            "or prepare more pairs"
        )
    rows_by_kind = {**kept_rows, "labelled": labelled_rows_by_split}
    return {
        "files": [_describe_file(file_key, file_counts) for file_key, file_counts in sorted(counts.items())],
        "totals": {kind: dict(sorted(kind_counts.items())) for kind, kind_counts in totals.items()},
        "languages": {kind: dict(sorted(kind_rows.items())) for kind, kind_rows in rows_by_kind.items()},
        "warnings": _warn_of_strict_filters(counts),
    }


def _describe_reasons(counts: Counter[str]) -> str:
    """Return the three most frequent reasons for dropping rows, with their counts."""
    reasons = Counter({reason: count for reason, count in counts.items() if reason not in ("read", "kept")})
    return ", ".join(f"{reason} {count}" for reason, count in reasons.most_common(3))


def _describe_file(file_key: FileKey, counts: Counter[str]) -> dict[str, Any]:
    """Return a file's entry in the report. Check that every row is either kept or dropped."""
    dropped = {reason: counts[reason] for reason in sorted(counts) if reason not in ("read", "kept")}
    if counts["read"] != counts["kept"] + sum(dropped.values()):
        raise RuntimeError(f"{file_key}: a row is neither kept nor dropped: report this as a bug")
    return {**file_key._asdict(), "read": counts["read"], "kept": counts["kept"], "dropped": dropped}


def _warn_of_strict_filters(counts_of_files: RowCounts) -> list[str]:
    """Log and return a warning for each filter that drops more than `MAX_LOSS` of a language's training rows."""
    counts_of_languages: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for file_key, file_counts in counts_of_files.items():
        if file_key.kind in TRAINING:
            counts_of_languages[file_key.kind, file_key.language].update(file_counts)
    dropped_shares: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for (kind, language), counts in sorted(counts_of_languages.items()):
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
