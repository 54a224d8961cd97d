"""python -m tests.e2e.soak [--runs N] [--seed K]: run the DAG under random faults and compare the results.

A run takes the toy text from preparation to registration. One or two faults hit it at random moments, and the same
command is repeated until it succeeds. The run passes if its artifacts have the digests and its losses the bits of an
undisturbed run, if the registry has one version, and if no process remains. Every run prints one line of JSON; the
logs of runs that fail are kept.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from components.adapters import storage
from tests.helpers.commands import environment
from tests.servers import s3
from tests.servers.processes import free_port, kill
from tests.servers.tracking import running_mlflow
from tests.toys.run import write_config

FAULTS = ("kill the command", "SIGTERM", "kill a worker", "kill S3", "kill MLflow", "flip a bit")
ATTEMPTS, SECONDS = 12, 600.0
"""Attempts of a run, and the time limit of one attempt."""
NOT_REPRODUCED = ("metrics.jsonl", "report.html", "model_card.md", ".png")
"""Files that contain times."""


class Servers:
    """S3 and MLflow on loopback, which can be killed and started again with their data."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        ports, port = s3.free_ports(), free_port()
        starts = {
            "S3": lambda: s3.running(directory / "S3", ports),
            "MLflow": lambda: running_mlflow(directory / "MLflow", port),
        }
        self.start: dict[str, Callable[[], None]] = {}
        self.running: dict[str, subprocess.Popen] = {}
        for name, start in starts.items():
            (directory / name).mkdir()
            self.start[name] = lambda name=name, start=start: self.running.update({name: stack.enter_context(start())})
            self.start[name]()
        self.environment = s3.environment(f"http://127.0.0.1:{ports[-1]}")
        self.environment["MLFLOW_TRACKING_URI"] = f"http://127.0.0.1:{port}"
        s3.bucket(self.environment["AWS_ENDPOINT_URL"], "soak")


class Run:
    """One run of the DAG, in a directory or on the servers, with an own name in the registry."""

    def __init__(self, seed: int, faults: list[str], base: Path, config: dict[str, Any], servers: Servers) -> None:
        self.chance, self.faults, self.servers = random.Random(seed), faults, servers
        self.directory = base / f"run-{seed}"
        self.name, self.marker = f"toy-{seed}", f"INFOXLM_SOAK=run-{seed}"
        by_url = any("S3" in fault or "MLflow" in fault for fault in faults)
        self.store = f"s3://soak/run-{seed}" if by_url else str(self.directory / "store")
        self.environment = environment() | dict([self.marker.split("=")]) | {"INFOXLM_LAUNCHER": "torchrun"}
        self.environment["INFOXLM_CACHE"] = str(self.directory / "cache")
        if by_url:
            self.environment |= servers.environment
        (self.directory / "cache").mkdir(parents=True)
        (self.directory / "toy.yaml").write_text(yaml.safe_dump(config | {"registration": {"name": self.name}}))

    def attempt(self, fault: str | None, within: float) -> tuple[int, str]:
        """Run the command once, with a fault in the first `within` seconds; return its exit code and its last line."""
        log = self.directory / "log"
        command = [str(Path(sys.executable).with_name("infoxlm")), "run", str(self.directory / "toy.yaml")]
        command += ["--store", self.store, "--set", "num_workers=2"]
        start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as file:
            process = subprocess.Popen(command, env=self.environment, stdout=file, stderr=file, start_new_session=True)
        moment, deadline = time.monotonic() + self.chance.uniform(0, within), time.monotonic() + SECONDS
        while process.poll() is None:
            if fault and time.monotonic() > moment and self.inject(fault, process):
                fault = None
            if time.monotonic() > deadline:
                kill(process)
                return -signal.SIGKILL, f"The attempt took more than {SECONDS:.0f} s."
            time.sleep(0.05)
        lines = log.read_bytes()[start:].decode(errors="replace").split("\n")
        return process.returncode, next((line for line in reversed(lines) if line.strip()), "")

    def inject(self, fault: str, process: subprocess.Popen) -> bool:
        """Inject a fault into the running command; return False if this is not possible yet."""
        if fault in ("kill the command", "flip a bit"):  # bits flip between two attempts
            process.kill()
        elif fault == "SIGTERM":
            process.terminate()
        elif fault == "kill a worker":
            workers = [pid for pid in self.processes() if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            if len(workers) < 2:
                return False
            os.kill(self.chance.choice(workers), signal.SIGKILL)
        else:
            name = fault.removeprefix("kill ")
            kill(self.servers.running[name])
            time.sleep(self.chance.uniform(0.5, 8))
            self.servers.start[name]()
        return True

    def processes(self) -> list[int]:
        """Return the ids of the processes that this run has started."""
        pids = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self.marker.encode() + b"\0" in path.read_bytes():
                    pids.append(int(path.parent.name))
        return pids

    def flip_bit(self) -> None:
        """Change one bit of a file of a checkpoint or an artifact in the local store."""
        pattern = re.compile(r"/store/(runs/[^/]+/step=\d+|(corpus|shards|pretrained|classifier|scores)/\w{16})/")
        files = [path for path in sorted(self.directory.rglob("*")) if path.is_file() and pattern.search(str(path))]
        files = [path for path in files if path.stat().st_size]
        if files:
            path = self.chance.choice(files)
            content = bytearray(path.read_bytes())
            content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(8)
            path.write_bytes(content)

    def finish(self, seconds: float) -> str:
        """Repeat the command until it succeeds; return why the run failed, or an empty string."""
        faults = list(self.faults)
        for _ in range(ATTEMPTS):
            fault = faults.pop(0) if faults else None
            code, line = self.attempt(fault, seconds)
            deadline = time.monotonic() + 60  # steps and workers notice that their parent is gone
            while self.processes() and time.monotonic() < deadline:
                time.sleep(0.5)
            if pids := self.processes():
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                return f"{len(pids)} processes remain"
            if code == 0:
                return ""
            if fault == "flip a bit":
                self.flip_bit()
            damaged = re.search(rf"{re.escape(self.store)}/\w+/\w{{16}}", line)
            if code == 3 and damaged and "flip a bit" in self.faults:
                shutil.rmtree(damaged[0])  # as the message recommends
            elif code not in (75, -signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM):
                return f"ended with {code}: {line}"
        return f"not finished after {ATTEMPTS} attempts"

    def outcome(self) -> dict[str, Any]:
        """Return the digests of the artifacts, the losses, and the versions in the registry."""
        from mlflow import MlflowClient

        files: dict[str, bytes] = {}
        if storage.is_remote(self.store):
            bucket, prefix = s3.bucket(self.environment["AWS_ENDPOINT_URL"], "soak"), self.store.split("/", 3)[3] + "/"
            files = {
                item.key[len(prefix) :]: item.get()["Body"].read() for item in bucket.objects.filter(Prefix=prefix)
            }
        else:
            files = {str(path.relative_to(self.store)): path.read_bytes() for path in Path(self.store).rglob("*.json*")}
        outcome: dict[str, Any] = {}
        for path, content in files.items():
            if re.fullmatch(r"(?!scores)\w+/\w{16}/manifest.json", path):
                entries = json.loads(content)["files"].items()
                outcome[path] = {name: entry["sha256"] for name, entry in entries if not name.endswith(NOT_REPRODUCED)}
            if re.fullmatch(r"scores/\w{16}/manifest.json", path):
                outcome[path] = json.loads(content)["facts"]
            if re.fullmatch(r"pretrained/\w{16}/encoder/metrics.jsonl", path):
                points = [json.loads(line) for line in content.splitlines()]
                outcome[path] = [[n, float(v).hex()] for point in points for n, v in point.items() if "loss" in n]
        uri = self.environment.get("MLFLOW_TRACKING_URI", f"sqlite:///{self.store}/mlflow.db")
        versions = MlflowClient(tracking_uri=uri).search_model_versions(f"name = '{self.name}'")
        return outcome | {"versions": [version.tags["digest"] for version in versions]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="seed of the first run")
    options = parser.parse_args()
    os.environ |= {"AWS_REGION": "us-east-1"}
    base, failures = Path(tempfile.mkdtemp(prefix="soak-")), 0
    config = yaml.safe_load(write_config(base).read_text())
    config["pretraining"]["optimization"] |= {"steps": 40, "warmup_steps": 5}
    config["pretraining"]["checkpoints"] = {"every": 4}
    with contextlib.ExitStack() as stack:
        servers = Servers(base, stack)
        began = time.monotonic()
        calm = Run(0, [], base, config, servers)
        failure, seconds = calm.finish(0), time.monotonic() - began
        if failure:
            raise RuntimeError(f"The undisturbed run failed: {failure}. Its log is {calm.directory}/log.")
        expected = calm.outcome()
        for seed in range(options.seed, options.seed + options.runs):
            faults = random.Random(f"faults of {seed}").sample(FAULTS, 1 + seed % 2)
            run = Run(seed, faults, base, config, servers)
            failure = run.finish(seconds)
            if not failure:
                outcome = run.outcome()
                names = sorted(name for name in {*outcome, *expected} if outcome.get(name) != expected.get(name))
                failure = f"differs in {names[:3]}" if names else ""
            print(json.dumps({"seed": seed, "faults": faults, "failure": failure}), flush=True)
            failures += bool(failure)
            if not failure:
                shutil.rmtree(run.directory)
    print(f"{options.runs - failures} of {options.runs} runs equal the undisturbed run. Logs of others are in {base}.")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
