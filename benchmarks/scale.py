"""python -m benchmarks.scale: prepare 10^5 rows and more, and compare the cost per row with datatrove.

The rows are repeated copies of the demo's English and German messages. A word made of letters marks each copy, because
texts that differ only in digits are near-duplicates. One copy in ten has no mark and is dropped as a duplicate. Each
case runs in its own process. Times are CPU seconds, so they do not depend on other processes.

Intermediate files are in a directory or under `s3://bucket/prefix`. The peer runs in the environment of `make bench`:

    python -m benchmarks.scale --rows 100000 1000000 --workers 0 1 2 --peer .venv-peers/bin/python
"""

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from infoxlm_core.config import PreparationConfig

LANGUAGES = ("en", "de")
FILES_PER_LANGUAGE = 2
UNMARKED = 10  # one row in ten has no mark
LETTERS = "bcdfghjklmnpqrstvwxz"
PEER_TASKS = len(LANGUAGES) * FILES_PER_LANGUAGE  # datatrove's unit of work is a file
LARGE_ROWS = (10**9, 10**10)
LARGE_CORES = 256
TASK_SECONDS = 0.0004  # CPU time of the driver for one Ray task
ROWS_PER_TASK = 1 << 17  # as in `phases.clean.PART_ROWS`


def write_rows(directory: Path, row_count: int) -> None:
    """Write rows of text as JSON Lines, in several files per language."""
    directory.mkdir(parents=True)
    for language in LANGUAGES:
        messages = read_messages(language)
        for number in range(FILES_PER_LANGUAGE):
            with (directory / f"{language}-{number}.jsonl").open("w", encoding="utf-8") as file:
                # Divide the rows evenly among the files of the language.
                for row in range(number, row_count // len(LANGUAGES), FILES_PER_LANGUAGE):
                    copy, message = divmod(row, len(messages))
                    is_marked = row % UNMARKED > 0  # a copy without a mark is a duplicate
                    text = mark(messages[message], copy, is_marked)
                    file.write(json.dumps({"text": text, "language": language}, ensure_ascii=False) + "\n")


def read_messages(language: str) -> list[str]:
    """Return the distinct messages in the demo's translation catalogs, in one language."""
    from benchmarks.speed import corpus
    from infoxlm_core.corpora import catalogs

    texts: dict[str, None] = {}  # a set that keeps the order
    for source in corpus.list_corpora():
        for row in catalogs.read_rows(["de"], "en", Path(source["path"])):
            if row.dropped is None:
                text = row.texts[LANGUAGES.index(language)]
                # Keep the text on one line, because our reader splits rows at line ends.
                texts[" ".join(text.split())] = None
    return list(texts)


def mark(text: str, copy: int, is_marked: bool) -> str:
    """Append a word that encodes the number of the copy in letters. Leave the first copy unmarked."""
    if not copy or not is_marked:
        return text
    letters = []  # not digits, because texts that differ only in digits are near-duplicates
    while copy:
        copy, letter = divmod(copy, len(LETTERS))
        letters.append(LETTERS[letter])
    return f"{text} q{''.join(letters)}"


@dataclass
class MeasuredTask:
    """Runs a preparation task. Returns its record, CPU seconds and peak memory."""

    work: Any  # partial of a phase's function

    def __call__(self, number: int) -> tuple[Any, float, float]:
        """Run the task with this number. The process that runs it also measures it."""
        start_seconds = time.process_time()
        record = self.work(number)
        return record, time.process_time() - start_seconds, peak_memory()


def make_config(text: Path) -> PreparationConfig:
    """Make the config for preparing the rows in a directory."""
    corpora = []
    for path in sorted(text.iterdir()):
        language = path.name.partition("-")[0]
        corpora.append({
            "name": "messages", "format": "jsonl", "path": str(path), "languages": [language], "text_field": "text"
        })  # fmt: skip
    return PreparationConfig.parse({"languages": list(LANGUAGES), "pivot": "en", "corpora": corpora})


def run_ours(text: Path, workers: int, files_location: str) -> dict[str, Any]:
    """Prepare the rows with `workers` processes. Return the CPU time and peak memory of tasks and driver."""
    from components.adapters import storage
    from infoxlm_core.corpora import parallel
    from infoxlm_core.stages import preparation

    run_tasks = parallel.ProcessPoolMap(workers) if workers else parallel.map_in_process
    seconds_of_tasks: list[float] = []
    memory_of_tasks: list[float] = []
    phases: set[str] = set()

    def measure(work: Any, items: Iterable[Any]) -> Iterator[Any]:
        """Run a phase's tasks as `run_tasks` does, and collect their time and memory."""
        phases.add(work.args[0].__name__)  # `work` is a partial, and its first argument the function of a phase
        for record, seconds, memory in run_tasks(MeasuredTask(work), items):
            seconds_of_tasks.append(seconds)
            memory_of_tasks.append(memory)
            yield record

    with tempfile.TemporaryDirectory(dir=scratch_directory()) as directory:
        files = storage.open(f"{files_location}/{os.getpid()}" if files_location else f"{directory}/files")
        output = Path(directory) / "corpus"
        start_seconds = time.process_time()
        report = preparation.prepare(make_config(text), output, files, measure)
        process_seconds = time.process_time() - start_seconds
        digest = digest_rows(output)  # must not depend on the number of workers
        files.delete(*(entry.name for entry in files.entries()))
    task_seconds = sum(seconds_of_tasks)
    # Without workers, this process also runs the tasks.
    driver_seconds = process_seconds if workers else process_seconds - task_seconds
    return {
        "kept": sum(report["languages"]["mono"].values()), "digest": digest, "driver": driver_seconds,
        "tasks": task_seconds, "driver_memory": peak_memory(), "task_memory": max(memory_of_tasks),
        "phases": len(phases),
    }  # fmt: skip


def digest_rows(corpus: Path) -> str:
    """Return a digest of a corpus's rows in order."""
    digest = hashlib.sha256()
    for path in sorted(corpus.rglob("*.parquet")):  # the file system returns files in any order
        for batch in pq.ParquetFile(path).iter_batches():
            digest.update("\n".join(batch.column(0).to_pylist()).encode())
    return digest.hexdigest()[:16]


def peak_memory() -> float:
    """Return this process's peak memory in MiB. `getrusage` would include the parent's memory."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 2**10


def scratch_directory() -> Path:
    """Return a directory on disk, because /tmp may be in memory."""
    directory = Path(os.environ.get("TMPDIR", "/var/tmp"))
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def clean_document(document: Any) -> bool:
    """Normalise a document as our preparation does. Return whether to keep the document."""
    from infoxlm_core.config import CleaningConfig
    from infoxlm_core.corpora import cleaning

    document.text = cleaning.normalise(document.text)
    language = document.metadata["language"]
    return cleaning.find_reason_to_drop_row([document.text], [language], LANGUAGES, CleaningConfig()) is None


def near_key_of(document: Any) -> bytes:
    """Return the text by which our preparation recognises near-duplicates."""
    from infoxlm_core.corpora import cleaning

    return f"{document.metadata['language']} {cleaning.extract_letters(document.text)}".encode()


def run_peer(text: Path) -> dict[str, Any]:
    """Clean and deduplicate the rows with datatrove, stage by stage in this process."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup.exact_dedup import (
        ExactDedupConfig,
        ExactDedupFilter,
        ExactDedupSignature,
        ExactFindDedups,
    )  # fmt: skip
    from datatrove.pipeline.filters import LambdaFilter
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers.jsonl import JsonlWriter

    with tempfile.TemporaryDirectory(dir=scratch_directory()) as directory:
        config = ExactDedupConfig(content_getter=near_key_of)
        stages: list[tuple[int, list[Any]]] = [
            (PEER_TASKS, [JsonlReader(str(text)), LambdaFilter(clean_document), JsonlWriter(f"{directory}/clean")]),
            (PEER_TASKS, [JsonlReader(f"{directory}/clean"), ExactDedupSignature(f"{directory}/signatures", config)]),
            (1, [ExactFindDedups(f"{directory}/signatures", f"{directory}/duplicates", config)]),
            (PEER_TASKS, [
                JsonlReader(f"{directory}/clean"), ExactDedupFilter(f"{directory}/duplicates", config),
                JsonlWriter(f"{directory}/result", compression=None),  # so that its lines can be counted below
            ]),
        ]  # fmt: skip
        start_seconds = time.process_time()
        for number, (task_count, pipeline) in enumerate(stages):
            LocalPipelineExecutor(pipeline, task_count, workers=1, logging_dir=f"{directory}/logs/{number}").run()
        seconds = time.process_time() - start_seconds
        row_count = sum(1 for path in Path(directory, "result").glob("*") for _ in path.open("rb"))
    return {
        "kept": row_count, "digest": "", "tasks": seconds, "driver": 0.0, "task_memory": peak_memory(),
        "driver_memory": 0.0,
    }  # fmt: skip


def run_case(python: str, *arguments: str) -> dict[str, Any]:
    """Run one case in its own process and return its figures."""
    command = [python, "-m", "benchmarks.scale", "--case", *arguments]
    completed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    # Only the last line is the result, because libraries may print lines of their own.
    return json.loads(completed.stdout.splitlines()[-1])


def describe(rows: int, label: str, result: dict[str, Any]) -> str:
    """Format the result of one case as a row of the Markdown table."""
    cpu_seconds = result["tasks"] + result["driver"]
    cells = [
        f"{rows:,}", label, f"{result['kept']:,}", f"{cpu_seconds / rows * 1e6:.1f}", f"{rows / cpu_seconds:,.0f}",
        f"{result['driver'] / cpu_seconds:.1%}", f"{result['task_memory']:.0f}", f"{result['driver_memory']:.0f}",
        result["digest"],
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def estimate_hours(rows: int, result: dict[str, Any], large_rows: int) -> float:
    """Estimate the hours for `large_rows` rows: the tasks on `LARGE_CORES` cores, and the driver's time per task."""
    seconds_per_row = result["tasks"] / rows
    task_count = result["phases"] * large_rows / ROWS_PER_TASK
    return (large_rows * seconds_per_row / LARGE_CORES + TASK_SECONDS * task_count) / 3600


def main() -> None:
    """Run all cases, print a Markdown table, and estimate the time of larger runs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000], help="numbers of rows to prepare")
    parser.add_argument("--workers", nargs="+", default=["0", "1", "2"], help="numbers of processes; 0: this process")
    parser.add_argument("--files", nargs="+", default=[""], help="s3://bucket/prefix, or '' for a directory")
    parser.add_argument("--peer", help="Python of an environment with datatrove and this project")
    # For the child process of `run_case`, which measures a single case.
    parser.add_argument("--case", nargs=3, metavar=("TEXT", "WORKERS", "FILES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        text, workers, files = options.case
        result = run_peer(Path(text)) if workers == "peer" else run_ours(Path(text), int(workers), files)
        print(json.dumps(result))
        return
    print("| rows | workers | kept | CPU µs a row | rows a core-second | driver | MiB a task | MiB driver | digest |")
    print("|---|---|---|---|---|---|---|---|---|")
    last_results: dict[int, dict[str, Any]] = {}  # by number of rows
    for rows in options.rows:
        with tempfile.TemporaryDirectory(dir=scratch_directory()) as directory:
            text = f"{directory}/text"
            write_rows(Path(text), rows)
            for files, workers in itertools.product(options.files, options.workers):
                last_results[rows] = run_case(sys.executable, text, workers, files)
                label = f"{workers}, S3" if files else f"{workers}, directory"
                print(describe(rows, label, last_results[rows]), flush=True)
            if options.peer:
                print(describe(rows, "datatrove", run_case(options.peer, text, "peer", "")), flush=True)
    rows, result = max(last_results.items())  # the most rows, which give the best estimate
    for large_rows in LARGE_ROWS:
        hours = estimate_hours(rows, result, large_rows)
        print(f"\n{large_rows:,} rows on {LARGE_CORES} cores: {hours:.2f} hours (calculated)")


if __name__ == "__main__":
    main()
