"""Stage prepare_corpus: raw text files -> clean, deduplicated, decontaminated corpora, as Parquet with a report.

Two passes. The first reads and cleans every row, stages the good ones and notes what is kept for evaluation. The
second takes duplicates and everything kept for evaluation out of the staged text and writes the result. Then the
result is read again, to prove it. What is done to a row by itself is most of the work and may be spread over many
machines (`corpora/parallel.py`); what rows have to do with each other is decided here, in their order.

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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from infoxlm_core import manifests, outside
from infoxlm_core.config import CorpusSource, PreparationConfig
from infoxlm_core.corpora import cleaning, evaluation_sets, formats, row_chunks, tables
from infoxlm_core.corpora.fingerprints import Keys
from infoxlm_core.corpora.parallel import ParallelMap, in_process
from infoxlm_core.corpora.reserved import LABELLED_CHARACTERS, Reserved, check_leaks
from infoxlm_core.corpora.tables import HELD_OUT, TRAINING, Tables, read_rows
from infoxlm_core.errors import CorpusTooSmall, EncodingError, InputError
from infoxlm_core.progress import progress

logger = logging.getLogger(__name__)

MAX_WRONG_LANGUAGE = 0.3  # of a file's rows; beyond it, the file is not what the config says …
JUDGED_ROWS = 1000  # … unless it is so small that chance decides
_OURS = (*TRAINING, *HELD_OUT, "staging", "labelled.parquet", "report.json", manifests.NAME)
_WRITTEN = [tables.of_text(*columns) for columns in (("text",), ("source", "target"), tables.LABELLED)]
_STAGED = pa.schema([row_chunks.TEXTS, row_chunks.FILE, *row_chunks.KEYS])

Entry = tuple[str, str, str, str]  # corpus, language, kind, file
Outcomes = defaultdict[Entry, Counter[str]]  # rows `read`, `kept`, and dropped for each reason


def prepare(config: PreparationConfig, output: Path, parallel_map: ParallelMap | None = None) -> dict[str, Any]:
    """Prepare the corpora of a run, which are all on this machine, and return the report.

    What an earlier attempt left in `output`, the folder of the artifact, is replaced; the caller writes its manifest.
    `parallel_map` has the work on single rows done, with the same result wherever that is; None: in this process.

    Raises:
        InputError: something that was given cannot be used; nothing stays in `output`.
        EvaluationLeak: a sentence kept for evaluation survived in the training text; nothing stays either.
    """
    output.mkdir(parents=True, exist_ok=True)
    _remove(output)
    outcomes: Outcomes = defaultdict(Counter)
    try:
        reserved, known = _reserve(config)
        reserved = _stage(config, output / "staging", reserved, outcomes, parallel_map or in_process)
        _write(config, output, reserved, outcomes)
        shutil.rmtree(output / "staging", ignore_errors=True)
        report = _report(outcomes, output, config.pivot)
        if known:
            report["evaluation_sets"] = known
        check_leaks(output, reserved, parallel_map or in_process)
    except BaseException:
        _remove(output)
        raise
    manifests.write_atomically(output / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return report


def digest_sources(config: PreparationConfig) -> list[str]:
    """Digests of the corpora's files on this machine: with the config (and its digests of wheels), all that is read."""
    paths = [Path(path) for path in config.paths]
    there = [path for path in paths if path.is_file() or any(file.is_file() for file in outside.list_tree(path))]
    return [manifests.digest_files(path) for path in there]


def facts(report: dict[str, Any]) -> dict[str, Any]:
    """Return what of a report belongs into the manifest: counts, and which files of test sets are in no text of it."""
    counts = report["languages"]
    totals = {
        "sentences": sum(counts["mono"].values()),
        "translation_pairs": sum(counts["pairs"].values()),
        "held_out_pairs": sum(counts["held_out"].values()),
    }
    reserved = sorted({one["sha256"] for one in report.get("evaluation_sets", ())})
    return totals | counts | {"totals": report["totals"]} | ({"reserved": reserved} if reserved else {})


def _remove(output: Path) -> None:
    for path in (output / name for name in _OURS):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


# ---------------------------------------------------------------- first pass: read, clean, stage


def _reserve(config: PreparationConfig) -> tuple[Reserved, list[dict[str, Any]]]:
    """What training text must not contain of test sets, and their files: name, digest, number of texts."""
    reserved = Reserved(overlap=config.overlap)
    known = []
    for path in map(Path, config.evaluation_sets):
        for file in evaluation_sets.files(path):
            texts = 0
            for text in evaluation_sets.read(file):
                reserved.note_test(text)
                texts += 1
            known.append({"file": file.name, "sha256": evaluation_sets.digest(file), "texts": texts})
        logger.info("%s: its texts stay out of the training text", path)
    return reserved, known


def _stage(
    config: PreparationConfig, staging: Path, reserved: Reserved, outcomes: Outcomes, parallel_map: ParallelMap
) -> Reserved:
    """Read and clean all corpora into `staging`; return what training text must not contain."""
    paths = [[_verified(path, source.sha256) for path in source.paths] for source in config.corpora]
    overlap = config.overlap if config.held_out or config.evaluation_sets else 0
    clean = functools.partial(row_chunks.clean_rows, languages=config.languages, rules=config.cleaning, overlap=overlap)
    sources = list(zip(config.corpora, paths, strict=True))
    with Tables(staging, _STAGED) as staged, progress("reading", len(sources), "corpora") as advance:
        for source, local in sources:
            found: Outcomes = defaultdict(Counter)
            invalid: dict[Entry, str] = {}
            chunks = row_chunks.chunks(formats.read(source, config.languages, config.pivot, local))
            for row in (row for cleaned in parallel_map(clean, chunks) for row in tables.rows_of(cleaned)):
                languages, texts, file, reason, keys = row[0].split("-"), *row[1:4], Keys(*row[4:])
                kind = (HELD_OUT if source.name in config.held_out else TRAINING)[len(languages) - 1]
                entry = (source.name, languages[-1], kind, file)
                found[entry].update({"read": 1, reason: 1} if reason else {"read": 1})
                if reason is None:
                    staged.add(f"{source.name}/{row[0]}.parquet", (texts, file, *keys))
                    reserved.note(texts, keys, source.name, config)
                elif reason == "invalid_utf8":
                    invalid.setdefault(entry, texts[0])
            _refuse_or_log(source, config.cleaning.max_invalid_utf8, found, invalid)
            for entry, counts in found.items():
                outcomes[entry].update(counts)
            advance(1)
    return reserved.settle()


def _verified(path: str, sha256: str | None) -> Path:
    """The file or folder at a path, which must have the digest that the config says, if it says one."""
    found = Path(path)
    if not found.exists():
        raise InputError(f"{path}: no such file or folder: check the path of the corpus")
    if sha256 and not found.is_file():
        raise InputError(f"{path} is no file, so its sha256 cannot be checked: leave sha256 out or give an archive")
    if sha256 and (digest := manifests.file_sha256(found)) != sha256:
        raise InputError(f"{path} has sha256 {digest}, expected {sha256}: check the config")
    return found


def _refuse_or_log(source: CorpusSource, max_invalid: float, found: Outcomes, invalid: dict[Entry, str]) -> None:
    """Refuse a corpus with a file that is not what the config says; log what was read of the others."""
    for entry, counts in found.items():
        _, language, _, file = entry
        rows, wrong = counts["read"], counts["wrong_script"] + counts["wrong_language"]
        if counts["invalid_utf8"] > max_invalid * rows:
            raise EncodingError(
                f"{invalid[entry]}: invalid UTF-8 begins here, {counts['invalid_utf8']} of {rows} lines have it, "
                f"cleaning.max_invalid_utf8 allows a share of {max_invalid:g}: convert the file to UTF-8"
            )
        if rows >= JUDGED_ROWS and wrong > MAX_WRONG_LANGUAGE * rows:
            raise InputError(
                f"{file} (corpus {source.name}): {wrong} of {rows} rows are not in the language expected "
                f"({language}): check its languages"
            )
    total = sum(found.values(), Counter())
    dropped = total.total() - total["read"]
    if not total["read"] and not source.languages:  # such as one of many files for all languages
        logger.warning("read %s: it holds no row in a language of this run", source.name)
        return
    if total["read"] == dropped:
        most = ", ".join(f"{why} {n}" for why, n in total.most_common(4) if why != "read") or "it holds no row"
        raise CorpusTooSmall(
            f"corpus {source.name}: none of its {dropped} rows can be used: have=0 need=1 ({most}): check its format, "
            "languages and columns, or take it out of the config"
        )
    logger.info("read %s: %d rows, %d dropped in cleaning", source.name, total["read"], dropped)


# ---------------------------------------------------------------- second pass: filter, write


def _write(config: PreparationConfig, output: Path, reserved: Reserved, outcomes: Outcomes) -> None:
    """Write what was staged, each row where it belongs: a training pair also as two sentences and as labelled text."""
    with Tables(output, *_WRITTEN) as written:
        writer = Writer(written, outcomes)
        for corpus in dict.fromkeys(source.name for source in config.corpora):
            for staged in sorted((output / "staging" / corpus).glob("*.parquet")):
                languages = tuple(staged.stem.split("-"))
                kind = (HELD_OUT if corpus in config.held_out else TRAINING)[len(languages) - 1]
                for texts, file, *digests in read_rows(staged):
                    keys = Keys(*digests)
                    if kind in HELD_OUT:
                        writer.keep(kind, corpus, languages, texts, keys, file)
                    elif reason := reserved.reason(keys):
                        outcomes[corpus, languages[-1], kind, file][reason] += 1
                        if reason == "labelled" and kind == "pairs" and keys.near[0] in reserved.messages:
                            writer.label("test", corpus, languages, texts, keys, reserved.owners)
                    elif writer.keep(kind, corpus, languages, texts, keys, file) and kind == "pairs":
                        if config.labelled_share and len(texts[0]) >= LABELLED_CHARACTERS:
                            writer.label("train", corpus, languages, texts, keys, reserved.owners)
                        if config.monolingual_from_pairs:
                            writer.keep_sides(corpus, languages, texts, keys, file)


@dataclass
class Writer:
    """Writes rows that were not written before."""

    tables: Tables
    outcomes: Outcomes
    seen: dict[int, int] = field(default_factory=dict)  # near key, kind and language -> digest of its text

    def keep(
        self, kind: str, corpus: str, languages: tuple[str, ...], texts: Sequence[str], keys: Keys, file: str
    ) -> bool:
        """Write a row, or count it as a duplicate; return whether it was written."""
        scope = f"{kind}/{'-'.join(languages)}"
        key, text = cleaning.digest(scope, *map(str, keys.near)), cleaning.digest(*map(str, keys.exact))
        outcome = "kept" if key not in self.seen else "duplicate" if self.seen[key] == text else "near_duplicate"
        self.outcomes[corpus, languages[-1], kind, file][outcome] += 1
        if outcome == "kept":
            self.seen[key] = text
            self.tables.add(f"{scope}/{corpus}.parquet", tuple(texts))
        return outcome == "kept"

    def keep_sides(self, corpus: str, languages: tuple[str, ...], texts: Sequence[str], keys: Keys, file: str) -> None:
        """Write each side of a pair as a sentence of its own."""
        for side, language in enumerate(languages):
            self.outcomes[corpus, language, "mono", file]["read"] += 1
            self.keep("mono", corpus, (language,), [texts[side]], keys.of(side), file)

    def label(
        self,
        split: str,
        corpus: str,
        languages: tuple[str, ...],
        texts: Sequence[str],
        keys: Keys,
        owners: dict[int, str | None],
    ) -> None:
        """Write each side with its corpus as label, unless it also stands in another corpus."""
        for language, text, near in zip(languages, texts, keys.near, strict=True):
            key = cleaning.digest("labelled", language, str(near))
            if owners[near] and key not in self.seen:
                self.seen[key] = 0
                self.tables.add("labelled.parquet", (text, corpus, language, split))


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
        most = (
            ", ".join(f"{reason} {n}" for reason, n in (totals["pairs"] + totals["mono"]).most_common(4)) or "nothing"
        )
        raise CorpusTooSmall(f"no training text remains: have=0 need=1 ({most}): check corpora and cleaning")
    return {
        "files": files,
        "totals": {kind: dict(sorted(counts.items())) for kind, counts in totals.items()},
        "languages": {kind: dict(sorted(counts.items())) for kind, counts in languages.items()},
    }
