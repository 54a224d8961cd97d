"""Stage prepare_corpus: raw text files -> clean, deduplicated, decontaminated corpora, as Parquet with a report.

The first pass reads and cleans every row, stages the clean ones and collects what is reserved for evaluation. The
second pass removes duplicates and everything reserved from the staged text and writes the result. The result is then
read again to prove that nothing leaked. Cleaning of single rows is most of the work and may run on many machines
(`corpora/parallel.py`). Comparisons between rows run here, in the order of the rows.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from infoxlm_core import manifests, outside
from infoxlm_core.config import CorpusSource, PreparationConfig
from infoxlm_core.corpora import cleaning, evaluation_sets, formats, length_ratio, row_chunks, tables
from infoxlm_core.corpora.fingerprints import Keys
from infoxlm_core.corpora.parallel import ParallelMap, in_process
from infoxlm_core.corpora.reserved import LABELLED_CHARACTERS, Reserved, check_leaks
from infoxlm_core.corpora.tables import HELD_OUT, TRAINING, Tables, read_rows
from infoxlm_core.errors import CorpusTooSmall, EncodingError, InputError
from infoxlm_core.progress import progress

logger = logging.getLogger(__name__)

MAX_WRONG_LANGUAGE = 0.3  # share of a file's rows above which the config names the wrong language
MIN_ROWS_TO_JUDGE = 1000  # of a file or language; in fewer rows a share is not significant
MAX_LOSS = 0.05  # share of a language's rows above which a filter is suspected to be wrong for the language
_FILTERS = (
    "too_short", "too_long", "few_words", "one_sign", "no_letters", "wrong_script", "wrong_language", "untranslated",
    "length_ratio", "held_out", "evaluation_set", "overlap",
)  # fmt: skip
_OURS = (*TRAINING, *HELD_OUT, "staging", "labelled.parquet", "report.json", manifests.NAME)
_WRITTEN = [tables.of_text(*columns) for columns in (("text",), ("source", "target"), tables.LABELLED)]
_STAGED = pa.schema([row_chunks.TEXTS, row_chunks.FILE, *row_chunks.KEYS])

Entry = tuple[str, str, str, str]  # corpus, language, kind, file
Outcomes = defaultdict[Entry, Counter[str]]  # rows `read`, `kept`, and dropped for each reason


class CleanedRow(NamedTuple):
    """A sentence or pair after cleaning."""

    corpus: str
    languages: tuple[str, ...]
    kind: str  # the folder of its table
    file: str
    texts: Sequence[str]
    keys: Keys
    reason_to_drop: str | None = None

    @property
    def entry(self) -> Entry:
        return self.corpus, self.languages[-1], self.kind, self.file

    @property
    def language_pair(self) -> str:
        """Return the languages as in file names: "en-de"; "de" for a sentence."""
        return "-".join(self.languages)

    def sides(self) -> list["CleanedRow"]:
        """Return each side of a pair as a monolingual sentence."""
        return [
            self._replace(languages=(language,), kind="mono", texts=[self.texts[side]], keys=self.keys.of(side))
            for side, language in enumerate(self.languages)
        ]


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
    _remove(output)
    outcomes: Outcomes = defaultdict(Counter)
    try:
        reserved, test_files = _reserve(config)
        reserved, medians = _stage(config, output / "staging", reserved, outcomes, parallel_map or in_process)
        _write(config, output, reserved, medians, outcomes)
        shutil.rmtree(output / "staging", ignore_errors=True)
        report = _report(outcomes, output, config.pivot)
        if test_files:
            report["evaluation_sets"] = test_files
        check_leaks(output, reserved, parallel_map or in_process)
    except BaseException:
        _remove(output)
        raise
    manifests.write_atomically(output / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return report


def digest_sources(config: PreparationConfig) -> list[str]:
    """Return digests of the local files of all corpora and test sets; the config itself names those of wheels."""
    paths = [Path(path) for path in config.paths]
    local = [path for path in paths if path.is_file() or any(file.is_file() for file in outside.list_tree(path))]
    return [manifests.digest_files(path) for path in local]


def facts(report: dict[str, Any]) -> dict[str, Any]:
    """Return the counts of a report and the digests of its test sets, for the manifest."""
    counts = report["languages"]
    totals = {
        "sentences": sum(counts["mono"].values()),
        "translation_pairs": sum(counts["pairs"].values()),
        "held_out_pairs": sum(counts["held_out"].values()),
    }
    reserved = sorted({test_file["sha256"] for test_file in report.get("evaluation_sets", ())})
    return totals | counts | {"totals": report["totals"]} | ({"reserved": reserved} if reserved else {})


def _remove(output: Path) -> None:
    for path in (output / name for name in _OURS):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


# ---------------------------------------------------------------- first pass: read, clean, stage


def _reserve(config: PreparationConfig) -> tuple[Reserved, list[dict[str, Any]]]:
    """Return the texts of all test sets, and the name, digest and number of texts of each file."""
    reserved = Reserved(overlap=config.overlap)
    test_files = []
    for path in map(Path, config.evaluation_sets):
        for file in evaluation_sets.list_files(path):
            texts = 0
            for text in evaluation_sets.read(file):
                reserved.add_test_text(text)
                texts += 1
            test_files.append({"file": file.name, "sha256": evaluation_sets.digest(file), "texts": texts})
        logger.info("%s: its texts will be removed from the training text", path)
    return reserved, test_files


def _stage(
    config: PreparationConfig, staging: Path, reserved: Reserved, outcomes: Outcomes, parallel_map: ParallelMap
) -> tuple[Reserved, dict[str, float]]:
    """Read and clean all corpora into `staging`.

    Returns:
        Everything that is reserved for evaluation, and the median log length ratio of each language pair.
    """
    length_ratios: defaultdict[str, Counter[int]] = defaultdict(Counter)
    paths = [[_verify_path(path, source.sha256) for path in source.paths] for source in config.corpora]
    with Tables(staging, _STAGED) as staged, progress("reading", len(paths), "corpora") as advance:
        for source, local_paths in zip(config.corpora, paths, strict=True):
            source_outcomes: Outcomes = defaultdict(Counter)
            first_invalid: dict[Entry, str] = {}
            for row in _read_and_clean(source, local_paths, config, parallel_map):
                source_outcomes[row.entry]["read"] += 1
                if row.reason_to_drop:
                    source_outcomes[row.entry][row.reason_to_drop] += 1
                    if row.reason_to_drop == "invalid_utf8":
                        first_invalid.setdefault(row.entry, row.texts[0])
                    continue
                staged.add(f"{row.corpus}/{row.language_pair}.parquet", (row.texts, row.file, *row.keys))
                reserved.add_row(row.texts, row.keys, row.corpus, config)
                if len(row.texts) == 2:
                    length_ratios[row.language_pair][length_ratio.bin_of(row.texts)] += 1
            _check_files(source, config.cleaning.max_invalid_utf8, source_outcomes, first_invalid)
            _check_corpus(source, sum(source_outcomes.values(), Counter()))
            for entry, counts in source_outcomes.items():
                outcomes[entry].update(counts)
            advance(1)
    medians = {languages: length_ratio.median_of(histogram) for languages, histogram in length_ratios.items()}
    return reserved.finalise(), medians


def _read_and_clean(
    source: CorpusSource, paths: Sequence[Path], config: PreparationConfig, parallel_map: ParallelMap
) -> Iterator[CleanedRow]:
    overlap = config.overlap if config.held_out or config.evaluation_sets else 0
    clean = functools.partial(row_chunks.clean_rows, languages=config.languages, rules=config.cleaning, overlap=overlap)
    chunks = row_chunks.chunks(formats.read(source, config.languages, config.pivot, paths))
    for chunk in parallel_map(clean, chunks):
        for language_pair, texts, file, reason, *digests in tables.rows_of(chunk):
            languages = tuple(language_pair.split("-"))
            kind = _kind_of(source.name, languages, config)
            yield CleanedRow(source.name, languages, kind, file, texts, Keys(*digests), reason)


def _kind_of(corpus: str, languages: Sequence[str], config: PreparationConfig) -> str:
    """Return the folder of a corpus' rows of one or two languages."""
    kinds = HELD_OUT if corpus in config.held_out else TRAINING
    return kinds[len(languages) - 1]


def _verify_path(name: str, sha256: str | None) -> Path:
    """Return the path of a file or folder; InputError if it is missing or has another digest than the config says."""
    path = Path(name)
    if not path.exists():
        raise InputError(f"{path}: no such file or folder: check the path of the corpus")
    if not sha256:
        return path
    if not path.is_file():
        raise InputError(f"{path} is not a file, so its sha256 cannot be checked: leave sha256 out or give an archive")
    digest = manifests.file_sha256(path)
    if digest != sha256:
        raise InputError(f"{path} has sha256 {digest}, expected {sha256}: check the config")
    return path


def _check_files(source: CorpusSource, max_invalid: float, outcomes: Outcomes, first_invalid: dict[Entry, str]) -> None:
    """Refuse a corpus with a file that is not UTF-8 or in another language than the config says.

    Args:
        source: the corpus.
        max_invalid: share of a file's lines that may be invalid UTF-8.
        outcomes: the counts of this corpus.
        first_invalid: file:line:byte of the first invalid UTF-8 of each entry.

    Raises:
        EncodingError: a file has too many lines that are not UTF-8.
        InputError: a file is in another language than the config says.
    """
    for entry, counts in outcomes.items():
        _, language, _, file = entry
        rows = counts["read"]
        rows_in_other_languages = counts["wrong_script"] + counts["wrong_language"]
        if counts["invalid_utf8"] > max_invalid * rows:
            raise EncodingError(
                f"{first_invalid[entry]}: invalid UTF-8 begins here, {counts['invalid_utf8']} of {rows} lines have it, "
                f"cleaning.max_invalid_utf8 allows a share of {max_invalid:g}: convert the file to UTF-8"
            )
        if rows >= MIN_ROWS_TO_JUDGE and rows_in_other_languages > MAX_WRONG_LANGUAGE * rows:
            raise InputError(
                f"{file} (corpus {source.name}): {rows_in_other_languages} of {rows} rows are not in the language "
                f"expected ({language}): check its languages"
            )


def _check_corpus(source: CorpusSource, counts: Counter[str]) -> None:
    """Log the counts of a corpus; raise CorpusTooSmall if none of its rows can be used."""
    rows = counts["read"]
    dropped = counts.total() - rows
    if not rows and not source.languages:  # a corpus of many languages may lack those of this run
        logger.warning("read %s: it has no row in a language of this run", source.name)
    elif rows == dropped:
        raise CorpusTooSmall(
            f"corpus {source.name}: none of its {rows} rows can be used: have=0 need=1 "
            f"({_describe(counts) or 'it has no rows'}): check its format, languages and columns, or remove it from "
            "the config"
        )
    else:
        logger.info("read %s: %d rows, %d dropped in cleaning", source.name, rows, dropped)


def _describe(counts: Counter[str]) -> str:
    """Return the most frequent reasons for which rows were dropped."""
    reasons = Counter({reason: count for reason, count in counts.items() if reason not in ("read", "kept")})
    return ", ".join(f"{reason} {count}" for reason, count in reasons.most_common(3))


# ---------------------------------------------------------------- second pass: filter, write


def _write(
    config: PreparationConfig, output: Path, reserved: Reserved, medians: dict[str, float], outcomes: Outcomes
) -> None:
    """Write every staged row that no filter drops."""
    with Tables(output, *_WRITTEN) as written:
        writer = Writer(config, reserved, medians, written, outcomes)
        for corpus in dict.fromkeys(source.name for source in config.corpora):
            for staged in sorted((output / "staging" / corpus).glob("*.parquet")):
                languages = tuple(staged.stem.split("-"))
                kind = _kind_of(corpus, languages, config)
                for texts, file, *digests in read_rows(staged):
                    writer.add(CleanedRow(corpus, languages, kind, file, texts, Keys(*digests)))


@dataclass
class Writer:
    """Filters rows by comparison with other rows, and writes the others to their tables."""

    config: PreparationConfig
    reserved: Reserved
    medians: dict[str, float]  # language pair -> median log length ratio
    tables: Tables
    outcomes: Outcomes
    seen: dict[int, int] = field(default_factory=dict)  # near key, kind and language -> digest of its text

    def add(self, row: CleanedRow) -> None:
        """Write a row unless it is dropped; write a training pair also as two sentences and as labelled text."""
        reason = self._reason_to_drop(row)
        if reason:
            self.outcomes[row.entry][reason] += 1
            if reason == "labelled" and row.kind == "pairs" and row.keys.near[0] in self.reserved.messages:
                self.label("test", row)
            return
        if self.keep(row) and row.kind == "pairs":
            if self.config.labelled_share and len(row.texts[0]) >= LABELLED_CHARACTERS:
                self.label("train", row)
            if self.config.monolingual_from_pairs:
                for sentence in row.sides():
                    self.outcomes[sentence.entry]["read"] += 1
                    self.keep(sentence)

    def _reason_to_drop(self, row: CleanedRow) -> str | None:
        if len(row.texts) == 2:
            median = self.medians[row.language_pair]
            if length_ratio.exceeds(self.config.cleaning.max_length_ratio, row.texts, median):
                return "length_ratio"
        return None if row.kind in HELD_OUT else self.reserved.reason(row.keys)

    def keep(self, row: CleanedRow) -> bool:
        """Write a row, or count it as a duplicate; return whether it was written."""
        scope = f"{row.kind}/{row.language_pair}"
        near_digest = cleaning.digest(scope, *map(str, row.keys.near))
        text_digest = cleaning.digest(*map(str, row.keys.exact))
        if near_digest not in self.seen:
            outcome = "kept"
        else:
            outcome = "duplicate" if self.seen[near_digest] == text_digest else "near_duplicate"
        self.outcomes[row.entry][outcome] += 1
        if outcome == "kept":
            self.seen[near_digest] = text_digest
            self.tables.add(f"{scope}/{row.corpus}.parquet", tuple(row.texts))
        return outcome == "kept"

    def label(self, split: str, row: CleanedRow) -> None:
        """Write each side with its corpus as the label, unless another corpus has the same text."""
        for language, text, near in zip(row.languages, row.texts, row.keys.near, strict=True):
            key = cleaning.digest("labelled", language, str(near))
            if self.reserved.owners[near] and key not in self.seen:
                self.seen[key] = 0
                self.tables.add("labelled.parquet", (text, row.corpus, language, split))


# ---------------------------------------------------------------- report


def _report(outcomes: Outcomes, output: Path, pivot: str) -> dict[str, Any]:
    """Return what happened to every row; raise CorpusTooSmall if there is nothing to train on."""
    files = []
    totals: dict[str, Counter[str]] = {kind: Counter() for kind in (*TRAINING, *HELD_OUT)}
    languages: dict[str, Counter[str]] = {kind: Counter() for kind in (*TRAINING, *HELD_OUT, "labelled")}
    for (corpus, language, kind, file), counts in sorted(outcomes.items()):
        dropped = {reason: counts[reason] for reason in sorted(counts) if reason not in ("read", "kept")}
        read, kept = counts["read"], counts["kept"]
        if read != kept + sum(dropped.values()):
            raise RuntimeError(f"{file} ({corpus}, {language}, {kind}): a row is unaccounted for")
        entry = {"corpus": corpus, "language": language, "kind": kind, "file": file, "read": read, "kept": kept}
        files.append(entry | {"dropped": dropped})
        totals[kind].update(counts)
        if kept:
            languages[kind][language if "mono" in kind else f"{pivot}-{language}"] += kept
    if (output / "labelled.parquet").is_file():
        languages["labelled"].update(split for *_, split in read_rows(output / "labelled.parquet"))
    if not languages["pairs"].total() + languages["mono"].total():
        reasons = _describe(totals["pairs"] + totals["mono"]) or "nothing was read"
        raise CorpusTooSmall(f"no training text remains: have=0 need=1 ({reasons}): check corpora and cleaning")
    return {
        "files": files,
        "totals": {kind: dict(sorted(counts.items())) for kind, counts in totals.items()},
        "languages": {kind: dict(sorted(counts.items())) for kind, counts in languages.items()},
        "warnings": _warn_of_losses(outcomes),
    }


def _warn_of_losses(outcomes: Outcomes) -> list[str]:
    """Log and return a line for each filter that drops too large a share of a language's training rows."""
    counts_of_language: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for (_, language, kind, _), counts in outcomes.items():
        if kind in TRAINING:
            counts_of_language[kind, language].update(counts)
    losses: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for (kind, language), counts in sorted(counts_of_language.items()):
        for reason in _FILTERS:
            share = counts[reason] / counts["read"]
            if counts["read"] >= MIN_ROWS_TO_JUDGE and share > MAX_LOSS:
                losses[kind, reason].append(f"{share:.1%} of {language}")
    warnings = []
    for (kind, reason), shares in losses.items():
        warnings.append(
            f"{kind}: the filter {reason} drops {', '.join(shares)}, more than {MAX_LOSS:.0%}: check its setting and "
            "the files of these languages"
        )
        logger.warning("%s", warnings[-1])
    return warnings
