"""Fuzz for as long as you like: each target gets its share of the time.

    make fuzz MINUTES=10                      all targets
    make fuzz MINUTES=10 TARGETS="tmx po"     only these
    python -m tests.fuzz 10 tmx po            the same

What ends otherwise than well or in an error of ours is saved in `tests/fuzz/inputs/TARGET/` and read by the suite from
then on. Each target runs in a process of its own, whose memory is bounded, and which an alarm ends that takes too long
over one input. Exit code 1 if anything was found.
"""

import contextlib
import hashlib
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tests.fuzz import targets
from tests.fuzz.mutations import mutate

INPUTS = Path(__file__).parent / "inputs"
LONGEST = 20
"""Seconds that one input may take."""
MEMORY = 512 << 20
"""Bytes by which the process may grow with one input, of a megabyte at most."""
SPACE = 8 << 30
"""Bytes of address space of all inputs together: what asks for more at once fails, and the machine does not."""
INPUTS_A_PROCESS = 4_000
"""pyarrow keeps a megabyte of address space, not of memory, for each damaged file that it unpacks."""


def main(minutes: float, names: list[str]) -> int:
    """Fuzz; return how many different things were found."""
    names = names or list(targets.TARGETS)
    if unknown := set(names) - targets.TARGETS.keys():
        raise SystemExit(f"no target {', '.join(sorted(unknown))}; known are {', '.join(targets.TARGETS)}")
    torch.set_num_threads(1)
    seconds, total, inputs = 60 * minutes / len(names), 0, 0
    for name in names:
        count, refused, found = _fuzz(name, seconds)
        print(f"{name:20} {count:8,} inputs {refused / max(1, count):5.0%} refused, {len(found)} findings", flush=True)
        for what in found:
            print(f"    {what}", flush=True)
        total, inputs = total + len(found), inputs + count
    print(f"{len(names)} targets, {inputs:,} inputs, {total} findings", flush=True)
    return total


def _fuzz(name: str, seconds: float) -> tuple[int, int, list[str]]:
    """Inputs, how many of them were refused, and what was found; a child that dies is followed by another."""
    fork = multiprocessing.get_context("fork")
    deadline, count, refused, found = time.monotonic() + seconds, 0, 0, dict[str, str]()
    while True:
        ours, theirs = fork.Pipe(duplex=False)
        with tempfile.TemporaryDirectory() as folder:
            current = Path(folder) / "current"
            seed = random.SystemRandom().randrange(2**32)
            child = fork.Process(target=_work, args=(name, Path(folder), current, seed, deadline, theirs))
            child.start()
            theirs.close()
            before = count
            with contextlib.suppress(EOFError):
                while True:
                    number, no, what, content = ours.recv()
                    count, refused = before + number, refused + no
                    if what and what not in found:
                        found[what] = _save(name, content)
            child.join()
            if child.exitcode:
                how = "takes too long" if child.exitcode == -signal.SIGALRM else f"ends with {child.exitcode}"
                what = f"the process {how}"
                if what not in found:
                    found[what] = _save(name, current.read_bytes() if current.exists() else b"")
        if time.monotonic() >= deadline:
            return count, refused, [f"{path}: {what}" for what, path in found.items()]


def _work(name: str, folder: Path, current: Path, seed: int, deadline: float, out: Connection) -> None:
    """Read one damaged input after the other, and tell of what is found."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings, page after page
    draw, work = random.Random(seed), folder / "work"
    work.mkdir()
    examples = targets.TARGETS[name].examples(work)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + SPACE, resource.RLIM_INFINITY))
    count = refused = 0
    while time.monotonic() < deadline and count < INPUTS_A_PROCESS:
        content = mutate(examples[draw.randrange(len(examples))], examples, draw.randrange)
        current.write_bytes(content)
        signal.alarm(LONGEST)
        what, before = "", _peak()
        try:
            refused += targets.attack(name, work, content) is not None
        except BaseException as error:  # a panic of Rust is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            what = _describe(error)
        signal.alarm(0)
        if count and _peak() - before > MEMORY:
            what = f"takes {(_peak() - before) >> 20} MiB"
        count += 1
        if what or count % 50 == 0:
            out.send((count, refused, what, content if what else b""))
            refused = 0
    out.send((count, refused, "", b""))


def _peak() -> int:
    """Bytes that this process has ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _describe(error: BaseException) -> str:
    """What tells one finding from another: its class, and where in our code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/tests/fuzz/" not in frame.filename]
    own = [frame for frame in frames if "/site-packages/" not in frame.filename and "/lib/python" not in frame.filename]
    where = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"
    said = " ".join(str(error).split())[:120]
    return (
        f"{type(error).__name__} at {where} ({said})"
        if isinstance(error, AssertionError)
        else (f"{type(error).__name__} at {where}")
    )


def _save(name: str, content: bytes) -> str:
    path = INPUTS / name / hashlib.sha256(content).hexdigest()[:12]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]) > 0)
