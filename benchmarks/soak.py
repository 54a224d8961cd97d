"""python -m benchmarks.soak [--runs N] [--seconds S] [--seed K]: whole runs under random faults, each ending EXACT.

A run is the DAG on toy text: prepare, tokenize, pre-train, fine-tune two encoders, evaluate, register. Something
happens to it at a random moment: its process or one of two workers is killed, it gets SIGTERM, a server is killed and
started again or stopped for a while, the disk is full, the clock jumps, a file of the store gets a wrong bit. Then the
same command is given again until it ends. EXACT is a run whose artifacts have the digests, and whose losses the bits,
of the run that nobody disturbed, with one version in the registry and no process left.

Results are appended to benchmarks/results/soak.json, so that another call goes on with the next seed, and shown in
soak.md. All stages of a run are in one process, forked from one that has imported all, so that it takes seconds; two of
three runs in directories begin with the pre-training. The clock is that of libc (clock.c, for which a C compiler is
needed); a full disk is a small file system in memory, which only root may mount: what cannot be done on a machine is
left out.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import random
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results/soak.json"
CLOCK = "INFOXLM_SOAK_CLOCK"
"""Environment variable: file of eight bytes, the seconds by which the clock of every process is off."""
LONGEST = 600.0
"""Seconds that one attempt may take; a hang ends the run as a failure."""
ATTEMPTS = 12
FAULTS = (
    "kill the command", "kill a worker", "SIGTERM", "kill S3", "stop S3", "kill MLflow", "full disk", "move the clock",
    "damage",
)  # fmt: skip
NAME = "toy"
WITH_TIMES = ("metrics.jsonl", "report.html", "model_card.md", ".png")
"""Files of artifacts that speak of seconds."""


@dataclass
class Run:
    """What came of one run."""

    seed: int
    store: str
    workers: int
    faults: list[str]
    fired: list[str] = field(default_factory=list)
    """With the second of the attempt in which it happened."""
    codes: list[int] = field(default_factory=list)
    """Exit codes of the attempts; a signal is negative."""
    said: list[str] = field(default_factory=list)
    """Last lines of the attempts that failed."""
    seconds: float = 0.0
    wrong: str = ""
    """Why it is not EXACT."""


def with_a_clock_that_jumps(directory: Path) -> None:
    """Start this process again with a libc whose clock can be moved, if there is a compiler."""
    if os.environ.get(CLOCK) or not shutil.which("cc"):
        return
    library, offset = directory / "clock.so", directory / "clock"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, HERE / "clock.c", "-ldl"], check=True)
    offset.write_bytes(bytes(8))
    changed = {CLOCK: str(offset), "LD_PRELOAD": str(library), "INFOXLM_SOAK": str(directory)}
    os.execve(sys.executable, [sys.executable, "-m", "benchmarks.soak", *sys.argv[1:]], os.environ | changed)


def move_clock(seconds: int) -> None:
    with Path(os.environ[CLOCK]).open("r+b") as file:  # in place: processes have it mapped
        file.write(struct.pack("q", seconds))


def settings(text: Path) -> dict[str, Any]:
    """The toy config, smaller."""
    import yaml

    from tests.toys.run import write_config

    values = yaml.safe_load(write_config(text).read_text())
    pretraining = values["pretraining"]
    pretraining["optimization"] |= {"steps": 40, "warmup_steps": 5}
    pretraining["checkpoints"] = {"every": 4}
    values["finetuning"] |= {"optimization": {"steps": 6, "warmup_steps": 1}, "checkpoints": {"every": 2}}
    values["evaluation"] = {"retrieval_pairs": 40, "perplexity_sentences": 10}
    values["registration"] = {"name": NAME}
    return values


def pipeline(values: dict[str, Any], store: str, workers: int, scratch: Path) -> None:
    """All stages, one after the other, in this process; it ends as a stage ends."""
    from kfp import dsl

    from components.evaluate import evaluate
    from components.finetune import finetune
    from components.prepare_corpus import prepare_corpus
    from components.pretrain import pretrain
    from components.register import register
    from components.tokenize_corpus import tokenize_corpus

    def new(name: str, kind: type = dsl.Artifact) -> Any:
        return kind(name=name, uri=str(scratch / name))

    corpus, shards, encoder, start, tuned, tuned_start, scores = map(
        new, ("corpus", "shards", "encoder", "start", "tuned", "tuned_start", "scores")
    )
    metrics, pages = new("metrics", dsl.Metrics), {"report": new("report"), "model_card": new("model_card")}
    given: dict[str, Any] = {"store": store, "metrics": metrics}
    prepare_corpus.python_func(values["preparation"], corpus=corpus, **given)
    tokenize_corpus.python_func(values["tokenization"], corpus=corpus, shards=shards, **given)
    pretrain.python_func(values["pretraining"], workers, shards=shards, encoder=encoder, start=start, **given)
    for model, output in ((encoder, tuned), (start, tuned_start)):
        finetune.python_func(values["finetuning"], 0, encoder=model, corpus=corpus, classifier=output, **given)
    evaluate.python_func(
        values["evaluation"], corpus=corpus, encoder=encoder, classifier=tuned, scores=scores, start=start,
        classifier_of_start=tuned_start, **pages, **given,
    )  # fmt: skip
    register.python_func(values["registration"], encoder=encoder, scores=scores, **given)


def start(body: Callable[[], None], log: Path) -> int:
    """Fork a process that does it; its id. It writes to a file, and ends with the code that a command would."""
    if child := os.fork():
        return child
    code = 70
    try:
        os.setpgid(0, 0)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        body()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass
class World:
    """Servers, text and the undisturbed runs that all runs of this process share."""

    directory: Path
    values: dict[str, Any]
    servers: "Servers"
    lines: dict[int, int] = field(default_factory=dict)
    """How many an undisturbed run logs, by workers."""
    result: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What comes of a run that nobody disturbs, by workers."""


class Servers:
    """S3 and MLflow on loopback, to be killed and started again where they were."""

    def __init__(self, directory: Path) -> None:
        from tests.servers import s3
        from tests.servers.processes import free_port
        from tests.servers.tracking import running_mlflow

        for name in ("s3", "mlflow"):
            (directory / name).mkdir()
        ports, port = s3.free_ports(), free_port()
        self._start = {
            "S3": lambda: s3.running(directory / "s3", ports),
            "MLflow": lambda: running_mlflow(directory / "mlflow", port),
        }
        self._stack = contextlib.ExitStack()
        self.running: dict[str, subprocess.Popen] = {}
        self.environment = {
            **s3.environment(f"http://127.0.0.1:{ports[-1]}"),
            "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}",
        }

    def __enter__(self) -> "Servers":
        for name in self._start:
            self.start(name)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, name: str) -> None:
        self.running[name] = self._stack.enter_context(self._start[name]())

    def signal(self, name: str, number: int) -> None:
        os.killpg(self.running[name].pid, number)
        if number == signal.SIGKILL:
            self.running[name].wait()


@contextlib.contextmanager
def small_disk(directory: Path, megabytes: int = 160) -> Iterator[bool]:
    """A file system in memory at a directory, if this process may mount one; whether it may."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(directory)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(directory)], check=True)
        shutil.rmtree(directory, ignore_errors=True)


def fill(disk: Path) -> None:
    """Until nothing fits any more."""
    with contextlib.suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def workers(pid: int) -> list[int]:
    """The training's processes, which a command has spawned."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"spawn_main" in (path.parent / "cmdline").read_bytes():
                found.append(int(path.parent.name))
    return found


def left_of(seed: int) -> list[int]:
    """Processes that a run has started and that are still there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"RUN_ID=soak-{seed}\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def damage(disk: Path, chance: random.Random) -> str:
    """A wrong bit in a checkpoint, or in an artifact, on this machine."""
    files = [
        path for path in sorted(disk.rglob("*"))
        if path.is_file() and path.stat().st_size and re.search(
            r"/runs/[^/]+/step=\d+/|/(corpus|shards|pretrained|classifier|scores)/\w{16}/", str(path))
    ]  # fmt: skip
    if not files:
        return ""
    newest = [path for path in files if "/step=" in str(path)][-4:]
    path = chance.choice(newest if newest and chance.random() < 0.5 else files)
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return str(path.relative_to(disk))


def outcome(store: str, name: str, place: Path) -> None:
    """Write down what came of a run: the digests of its artifacts, its losses, its versions in the registry."""
    from mlflow import MlflowClient

    from components.adapters import storage

    files: dict[str, Any] = {}
    if storage.is_remote(store):
        from tests.servers import s3

        _, _, bucket, prefix = store.split("/", 3)
        found = s3.bucket(os.environ["AWS_ENDPOINT_URL"], bucket).objects.filter(Prefix=prefix + "/")
        files = {one.key[len(prefix) + 1 :]: one.get()["Body"].read() for one in found}
    else:
        files = {str(path.relative_to(store)): path.read_bytes() for path in Path(store).rglob("*.json*")}
    said: dict[str, Any] = {"files": {}, "facts": {}, "losses": [], "versions": []}
    for path, content in files.items():
        if re.fullmatch(r"\w+/\w{16}/manifest.json", path):
            manifest = json.loads(content)
            said["facts"][path] = manifest["facts"]
            said["files"][path] = {n: e["sha256"] for n, e in manifest["files"].items() if not n.endswith(WITH_TIMES)}
        if re.fullmatch(r"pretrained/\w{16}/encoder/metrics.jsonl", path):
            points = [json.loads(line) for line in content.splitlines()]
            said["losses"] = [[n, float(v).hex()] for point in points for n, v in point.items() if "loss" in n]
    client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{store}/mlflow.db")
    aliases = client.get_registered_model(name).aliases
    for version in client.search_model_versions(f"name = '{name}'"):
        own = sorted(alias for alias, number in aliases.items() if int(number) == int(version.version))
        said["versions"].append([version.tags["digest"], own])
    place.write_text(json.dumps(said))


class Soak:
    """One run: its attempts, and what happens to them."""

    def __init__(self, world: World, run: Run, directory: Path, disk: Path) -> None:
        self.world, self.run, self.directory, self.disk = world, run, directory, disk
        self.chance = random.Random(run.seed)
        self.store = f"s3://soak/run-{run.seed}" if run.store == "S3" else str(disk / "store")
        self.name = f"{NAME}-{run.seed}" if run.store == "S3" else NAME
        self.pid = 0

    def _body(self) -> None:
        os.environ |= {"INFOXLM_TRACKER": "none", "RUN_ID": f"soak-{self.run.seed}", "INFOXLM_LAUNCHER": "torchrun"}
        os.environ |= {"INFOXLM_CACHE": str(self.disk / "cache"), "TMPDIR": str(self.directory)}
        if self.run.store == "S3":
            os.environ |= self.world.servers.environment
        tempfile.tempdir = None
        values = self.world.values | {"registration": {"name": self.name}}
        pipeline(values, self.store, self.run.workers, self.directory)

    def attempt(self, fault: str | None) -> int:
        """The command once; its exit code. The fault comes within seconds of any line that the run may log."""
        log = self.directory / "log"
        began, size = time.monotonic(), log.stat().st_size if log.exists() else 0
        moment, jitter = self.chance.uniform(0, self.world.lines.get(self.run.workers, 0)), self.chance.uniform(0, 2)
        if of_workers := fault == "kill a worker":  # they are there for a part of a run only: within seconds of that
            moment, jitter = 0, 6 * jitter
        reached = None
        self.pid = start(self._body, log)
        undo: list[tuple[float, Callable[[], None]]] = []
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            passed = time.monotonic() - began
            if pid or passed > LONGEST:
                break
            if reached is None and fault and log.exists() and log.read_bytes().count(b"\n", size) >= moment:
                reached = passed + jitter if not of_workers or len(workers(self.pid)) > 1 else None
            due = fault is not None and reached is not None and passed >= reached
            if due and (after := self.fire(fault)) is not None:
                name = "kill the command" if fault == "damage" else fault  # what is damaged, is between two attempts
                self.run.fired.append(f"{name} at {passed:.1f}")
                undo, fault = [(passed + delay, act) for delay, act in after], None
            for one in [one for one in undo if passed >= one[0]]:
                undo.remove(one)
                one[1]()
            time.sleep(0.05)
        for _, act in undo:
            act()
        (self.disk / "ballast").unlink(missing_ok=True)
        if not pid:
            os.kill(self.pid, signal.SIGUSR1)  # where it hangs
            time.sleep(2)
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.run.wrong = f"an attempt took more than {LONGEST:.0f} s"
            return -signal.SIGKILL
        code = os.waitstatus_to_exitcode(status)
        if code:
            with log.open("rb") as file:
                file.seek(size)
                lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
            self.run.said.append(lines[-1][-400:] if lines else "")
        return code

    def fire(self, fault: str) -> list[tuple[float, Callable[[], None]]] | None:
        """Let it happen; what to do how many seconds later. None: not yet possible."""
        servers, delay = self.world.servers, self.chance.uniform(0.5, 8)
        if fault in ("kill the command", "damage"):
            os.kill(self.pid, signal.SIGKILL)
        if fault == "SIGTERM":
            os.kill(self.pid, signal.SIGTERM)
        if fault == "kill a worker":
            found = workers(self.pid)
            if len(found) < 2:
                return None
            os.kill(self.chance.choice(found), signal.SIGKILL)
        if fault.startswith("kill S3") or fault.startswith("kill MLflow"):
            name = fault.removeprefix("kill ")
            servers.signal(name, signal.SIGKILL)
            return [(delay, lambda: servers.start(name))]
        if fault == "stop S3":
            servers.signal("S3", signal.SIGSTOP)
            return [(2 * delay, lambda: servers.signal("S3", signal.SIGCONT))]
        if fault == "full disk":
            fill(self.disk)
        if fault == "move the clock":
            near = self.run.store == "S3"  # which refuses requests that are a quarter of an hour off
            move_clock(self.chance.choice([-600, 600] if near else [-86400, -3600, 3600, 86400]))
        return []

    def until_it_ends(self) -> None:
        began, plan, repaired = time.monotonic(), list(self.run.faults), 0
        for _ in range(ATTEMPTS):
            fault = plan.pop(0) if plan else None
            code = self.attempt(fault)
            self.run.codes.append(code)
            if self.run.wrong or not code:
                break
            if fault == "damage" and code == -signal.SIGKILL and (what := damage(self.disk, self.chance)):
                self.run.fired.append(f"wrong bit in {what}")
            elif code == 3 and not any(one.startswith("wrong bit") for one in self.run.fired):
                self.run.wrong = f"damaged, and not by us: {self.run.said[-1]}"
                break
            elif code == 3 and (found := re.search(rf"{re.escape(self.store)}/\w+/\w{{16}}", self.run.said[-1])):
                shutil.rmtree(found[0], ignore_errors=True)  # the remedy of an artifact that is damaged
                repaired += 1
                if repaired > 3:
                    self.run.wrong = "what is damaged is not made again"
                    break
            elif code not in (75, -signal.SIGKILL, -signal.SIGTERM):
                self.run.wrong = f"ended with {code}"
                break
        else:
            self.run.wrong = f"not done after {ATTEMPTS} attempts"
        self.run.seconds = round(time.monotonic() - began, 1)
        self.run.wrong = self.run.wrong or self.wrong()

    def wrong(self) -> str:
        """What is not as in the run that nobody disturbed, or is left of this one."""
        deadline = time.monotonic() + 60  # workers notice that nobody waits for them
        while (left := left_of(self.run.seed)) and time.monotonic() < deadline:
            time.sleep(0.5)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        if left:
            return f"{len(left)} processes are left"
        place = self.directory / "outcome.json"

        def look() -> None:
            os.environ.update(self.world.servers.environment if self.run.store == "S3" else {})
            outcome(self.store, self.name, place)

        _, status = os.waitpid(start(look, self.directory / "log"), 0)
        if status:
            return "its outcome cannot be read"
        found = json.loads(place.read_text())
        expected = self.world.result.setdefault(self.run.workers, found)
        self.world.lines.setdefault(self.run.workers, (self.directory / "log").read_bytes().count(b"\n"))
        return differs(found, expected)


def differs(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """What of an `outcome` is not as expected; empty: nothing."""
    if found["versions"] != [[expected["versions"][0][0], ["candidate", "champion"]]]:
        return f"versions {found['versions']}"
    if found["losses"] != expected["losses"] or not found["losses"]:
        return "other losses"
    for part in ("files", "facts"):
        if names := sorted(
            name for name in {*found[part], *expected[part]} if found[part].get(name) != expected[part].get(name)
        ):
            return f"other {part}: {names[:3]}"
    return ""


def one_run(world: World, seed: int, faults: list[str], store: str, workers: int) -> Run:
    run = Run(seed, store, workers, faults)
    directory = world.directory / f"run-{seed}"
    directory.mkdir()
    with small_disk(directory / "disk") as small:
        if not small and "full disk" in faults:
            faults.remove("full disk")
        disk = directory / "disk"
        (disk / "store").mkdir(parents=True)
        shutil.copy(world.directory / "empty/mlflow.db", disk / "store")
        if seed % 3 and (world.directory / "made").exists():  # two of three begin with the pre-training
            shutil.copytree(world.directory / "made", disk / "store", dirs_exist_ok=True)
        Soak(world, run, directory, disk).until_it_ends()
        for kind in ("corpus", "shards"):
            if seed < 0 and store == "directory" and not (made := world.directory / "made" / kind).exists():
                shutil.copytree(disk / "store" / kind, made)
    if "move the clock" in faults:
        move_clock(0)
    if run.wrong:
        shutil.copy(directory / "log", world.directory / f"wrong-{seed}.log")
    shutil.rmtree(directory, ignore_errors=True)
    return run


def plan(seed: int) -> tuple[list[str], str, int]:
    """What is to happen to a run, in its first attempts one after the other; its store, and its workers."""
    chance = random.Random(f"plan {seed}")
    possible = [one for one in FAULTS if one != "move the clock" or os.environ.get(CLOCK)]
    faults = chance.sample(possible, chance.choice([1, 1, 2]))
    store = "S3" if any("S3" in one or "MLflow" in one for one in faults) or chance.random() < 0.2 else "directory"
    return faults, store, 2 if "kill a worker" in faults else 0


def prepare(directory: Path) -> World:
    """Import all that a run needs, write its text, start servers."""
    import importlib

    for name in (
        "mlflow.transformers", "transformers", "matplotlib.pyplot", "components.evaluate", "components.pretrain",
        "components.adapters.mlflow.model_registry", "components.adapters.s3.store", "infoxlm_core.stages.pretraining",
        "infoxlm_core.stages.finetuning", "infoxlm_core.stages.evaluation", "infoxlm_core.stages.preparation",
        "infoxlm_core.stages.tokenization", "components.platform.training_runs", "tests.servers.s3",
    ):  # fmt: skip
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    (directory / "empty").mkdir()

    def make() -> None:
        from components.adapters.mlflow import connection

        connection.connect(directory / "empty")

    os.waitpid(start(make, directory / "log"), 0)
    return World(directory, settings(directory / "text"), Servers(directory))


def soak(count: int, seconds: float, first: int) -> list[Run]:
    """So many runs, or as many as fit into the time; each is written down when it ends."""
    deadline, done = time.monotonic() + seconds, []
    world = prepare(Path(os.environ["INFOXLM_SOAK"]))
    with world.servers:
        for seed in range(first, first + count):
            if time.monotonic() > deadline:
                break
            faults, store, workers = plan(seed)
            if workers not in world.lines:
                calm = one_run(world, -1 - workers, [], "directory", workers)
                if calm.wrong:
                    raise RuntimeError(f"an undisturbed run is wrong: {calm}")
            run = one_run(world, seed, faults, store, workers)
            done.append(run)
            write([*read(), run])
            print(json.dumps(asdict(run), ensure_ascii=False), flush=True)
    return done


def read() -> list[Run]:
    return [Run(**one) for one in json.loads(RESULTS.read_text())["runs"]] if RESULTS.exists() else []


def write(runs: list[Run]) -> None:
    from benchmarks import machine

    facts = machine.facts()
    values = {"date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), "machine": facts}
    RESULTS.write_text(json.dumps(values | {"runs": [asdict(run) for run in runs]}, indent=1) + "\n")
    exact = [run for run in runs if not run.wrong]
    fired = Counter(name.partition(" at ")[0].partition(" in ")[0] for run in runs for name in run.fired)
    codes = Counter(code for run in runs for code in run.codes)
    lines = [
        f"# Soak of {values['date']}",
        "",
        f"Commit {facts['commit']}; {facts['cores']} × {facts['cpu']}. `python -m benchmarks.soak` appends to it.",
        "",
        f"{len(exact)} of {len(runs)} runs ended EXACT, seeds {min(run.seed for run in runs)} to "
        f"{max(run.seed for run in runs)}, after {sum(fired.values())} faults that happened, in "
        f"{statistics.median(run.seconds for run in runs):.0f} s a run (median), {max(len(run.codes) for run in runs)} "
        f"attempts at most.",
        "",
        "| fault | happened | in runs that were EXACT |",
        "|---|---|---|",
    ]
    for name, number in fired.most_common():
        lines.append(f"| {name} | {number} | {sum(any(f.startswith(name) for f in run.fired) for run in exact)} |")
    ended = ", ".join(f"{code} × {number}" for code, number in sorted(codes.items()))
    lines += [
        "",
        f"Attempts ended with {ended} (0 done, 75 run again, 3 damaged, negative: killed by that signal).",
        "",
    ]
    lines += [f"- not EXACT: seed {run.seed}, {run.fired}: {run.wrong}" for run in runs if run.wrong]
    RESULTS.with_suffix(".md").write_text("\n".join(lines).rstrip() + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so many")
    parser.add_argument("--seed", type=int, help="of the first run; by default the one after the last that is known")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    directory = Path(os.environ.get("INFOXLM_SOAK") or tempfile.mkdtemp(prefix="soak-"))
    os.environ["INFOXLM_SOAK"] = str(directory)
    with_a_clock_that_jumps(directory)
    first = options.seed if options.seed is not None else max((run.seed for run in read()), default=0) + 1
    done = soak(options.runs, options.seconds, first)
    print(f"{sum(not run.wrong for run in done)} of {len(done)} EXACT; logs of others in {directory}")
    return int(any(run.wrong for run in done))


if __name__ == "__main__":
    sys.exit(main())
