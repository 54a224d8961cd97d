"""Check results and measure speed on a GPU, in ten minutes: `make gpu`, or `python3 -m benchmarks.gpu`.

A check compares the GPU with the CPU in a higher precision, or counts events. Each check and each measurement runs in
its own process, because a process cannot use its GPU after an illegal memory access. Every row is printed and saved
immediately as a line of JSON, so that a crash or a time limit loses nothing. The required packages are torch, numpy,
pyarrow, pydantic, safetensors, sentencepiece and PyYAML. If an optional package is missing, only the checks that need
it fail. On a machine without a GPU, `--cpu` runs the checks on a small model.
"""

import argparse
import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REQUIRED = ("torch", "numpy", "pyarrow", "pydantic", "safetensors", "sentencepiece", "yaml")
RESULTS = Path(__file__).parents[1] / "results"
COMMAND = [sys.executable, "-m", "benchmarks.gpu"]
SECONDS = 300.0
"""Time limit of a check. A measurement has four times as long."""
Row = dict[str, Any]


def main() -> int:
    """Run the checks and measurements that the options select. Return 1 if a check failed, 2 if nothing ran."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="run the checks on a small model on the CPU; save nothing")
    parser.add_argument("--full", action="store_true", help="also measure the model large; takes twice as long")
    parser.add_argument("--only", help="run this check or measurement in this process; save nothing")
    parser.add_argument("--reference", type=Path, help=argparse.SUPPRESS)  # for the child process of `check_step`
    options = parser.parse_args()
    missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"These packages are missing: {', '.join(missing)}. Install them, with --no-deps if torch is installed.")
        return 2
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # set before torch starts CUDA, or it has no effect

    import torch

    from benchmarks.gpu import checks, speed

    if options.reference:
        checks.save_reference(options.reference, small=options.cpu)
        return 0
    if not options.cpu and not torch.cuda.is_available():
        print("This machine has no CUDA device. Use --cpu to run the checks on the CPU.")
        return 2
    if options.only:
        is_measurement = options.only in speed.FIGURES
        rows = speed.FIGURES[options.only](options.full) if is_measurement else run_check(options)
        for row in rows:
            write_row(row)
        return 0
    names = list(checks.CHECKS)
    path = None
    if not options.cpu:
        names += [*checks.GPU_CHECKS, *speed.FIGURES]
        path = RESULTS / f"{time.strftime('%Y-%m-%d-%H%M', time.gmtime())}-gpu.jsonl"
    failures = run_all(names, options, lambda row: write_row(row, path))
    print(f"{failures} checks failed.")
    if path:
        print(f"All rows are in {path}.")
    return 1 if failures else 0


def write_row(row: Row, path: Path | None = None) -> None:
    """Print a row and append it to a file."""
    line = json.dumps(row, default=float)  # a row may have numbers of NumPy or torch
    print(line, flush=True)
    if path:
        with path.open("a", encoding="utf-8") as file:
            print(line, file=file)


def run_check(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of the check `options.only`. If the check raises an error, the last row describes the error."""
    from benchmarks.gpu import checks

    try:
        yield from (checks.CHECKS | checks.GPU_CHECKS)[options.only](options.cpu)
    except Exception as error:
        yield {"ok": False, "why": f"{type(error).__name__}: {error}"[:500]}


def run_all(names: list[str], options: argparse.Namespace, write: Callable[[Row], None]) -> int:
    """Run checks and measurements, each in its own process, and write their rows. Return the number of failed rows."""
    from benchmarks import machine

    write({"check": "machine", **machine.facts()})
    failures = 0
    for name in names:
        start_time = time.monotonic()
        for row in run_in_process(name, options):
            write({"check": name} | row)
            failures += not row.get("ok", True)
        write({"check": name, "seconds": round(time.monotonic() - start_time, 1)})
    return failures


def run_in_process(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows printed by a new process, and a failed row if the process crashes or exceeds its time limit."""
    from benchmarks.gpu import speed

    time_limit = SECONDS * (4 if name in speed.FIGURES else 1)
    command = [*COMMAND, "--only", name]
    if options.cpu:
        command.append("--cpu")
    if options.full:
        command.append("--full")
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} | os.environ  # as in training runs
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        timer = threading.Timer(time_limit, process.kill)
        timer.start()
        try:
            for line in process.stdout:
                if line.startswith("{"):  # libraries may print other lines
                    yield json.loads(line)
        finally:
            process.kill()  # still runs if the caller stops early, for example after Ctrl-C
            code = process.wait()
            timed_out = not timer.is_alive()  # the timer ends only when it has killed the process
            timer.cancel()
    if timed_out:
        yield {"ok": False, "why": f"The process did not end within {time_limit:.0f} s."}
    elif code:
        yield {"ok": False, "why": f"The process ended with code {code}."}


if __name__ == "__main__":
    sys.exit(main())
