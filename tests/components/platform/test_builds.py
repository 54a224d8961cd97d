"""Builds whose processes share only a store on S3: they continue on another machine, and in the pods of a job."""

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from components.adapters import lease
from components.adapters.kuberay import job as kuberay_job
from components.platform import artifact_files, artifacts, builds, job, launchers
from components.platform.builds import BuildSpec
from components.platform.training_runs import RemoteRun
from infoxlm_core import locks, manifests
from infoxlm_core.errors import (
    ConfigError,
    InputError,
    NoValidCheckpoint,
    Preempted,
    StorageUnavailable,
    TrainingDiverged,
)
from infoxlm_core.training import distributed, tracker
from tests.helpers import workers
from tests.servers.processes import until
from tests.toys.exports import save_encoder
from tests.toys.pretraining import tiny_config

URL = "s3://models/store"
KEY = "0123456789abcdef"
RUN = "runs/pretrained-abc"
STEPS = 30
CLUSTER = {"image": f"registry.example/infoxlm@sha256:{'1' * 64}"}


@pytest.fixture(autouse=True)
def first_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "first machine"))
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)


def make_spec(store: str, shards: Path, steps: int = STEPS, job: str = "") -> BuildSpec:
    """Return the description of a pre-training."""
    config = tiny_config(optimization={"steps": steps}, checkpoints={"every": 4}).model_dump(mode="json")
    inputs = {"shards_path": str(shards)}
    return BuildSpec("pretrain", store, "pretrained", KEY, config, 0, inputs, "pretrained-abc", job=job)


@pytest.fixture
def spec(tiny_shards) -> BuildSpec:
    return make_spec(URL, tiny_shards)


def submit_job(shards: Path, job: str, steps: int = 100_000) -> BuildSpec:
    """Write the description of a job into the store, and return it."""
    spec = make_spec(URL, shards, steps, job)
    artifacts.write(URL, f"work/{job}.json", json.dumps(asdict(spec)))
    return spec


@pytest.fixture(scope="module")
def undisturbed_losses(tiny_shards, tmp_path_factory) -> list:
    """Return the losses of the same training on one machine, in a directory."""
    return read_losses(launchers.run(make_spec(str(tmp_path_factory.mktemp("store")), tiny_shards)))


def read_losses(artifact: Path) -> list:
    """Return the losses of each step to the last bit."""
    return [
        (step, {name: value.hex() for name, value in values.items() if "loss" in name})
        for step, values in tracker.read(artifact / "encoder" / tracker.METRICS)
    ]


def list_checkpoints() -> list[str]:
    return RemoteRun(f"{URL}/{RUN}", "").names()


def request_stop_after(monkeypatch, stop_step: int) -> None:
    """Request a stop as soon as the checkpoint of a step is saved."""
    send = RemoteRun.send

    def send_and_request_stop(self: RemoteRun, directory: Path, *arguments) -> None:
        send(self, directory, *arguments)
        if directory.name == f"step={stop_step:010d}":
            artifacts.write(URL, f"{RUN}/stop", "")
            self._check_for_stop()

    monkeypatch.setattr(RemoteRun, "send", send_and_request_stop)


def train_until(stop_step: int, spec: BuildSpec, monkeypatch) -> None:
    """Train, and stop at the step after a checkpoint."""
    with monkeypatch.context() as patch:
        request_stop_after(patch, stop_step)
        with pytest.raises(Preempted, match="asked to stop after step"):
            launchers.run(spec)


def train_without_file_locks(rank: int, size: int, port: int, shards: Path, store: Path) -> None:
    """Train in one of several workers, on a file system without locks. Save the error of each worker."""

    def refuse_to_lock(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    locks.FileLock = refuse_to_lock  # type: ignore[assignment,misc]
    workers.join(rank, size, port)
    distributed.from_first(None)  # connects the workers, so that none would wait for one that has ended
    spec = make_spec(str(store), shards)
    with pytest.raises(InputError) as failure:
        builds.train(spec, store / RUN)
    (store / str(rank)).write_text(str(failure.value))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_all_workers_end_with_the_error_of_the_first_before_its_training(tiny_shards, tmp_path):
    workers.start(train_without_file_locks, 2, tiny_shards, tmp_path)  # only the first worker locks the artifact

    errors = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert errors[0] == errors[1]
    assert "this file system cannot lock files" in errors[0]


@pytest.mark.item("F11")
def test_training_that_stopped_on_one_machine_continues_exactly_on_another(
    bucket, spec, undisturbed_losses, tmp_path, monkeypatch, caplog
):
    train_until(12, spec, monkeypatch)
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "second machine"))
    caplog.set_level("INFO")

    artifact = launchers.run(replace(spec, job="j-second"))

    assert "resuming after step 13" in caplog.text
    assert artifact.is_relative_to(tmp_path / "second machine")
    assert read_losses(artifact) == undisturbed_losses
    assert len(undisturbed_losses) == STEPS
    assert artifact_files.read_manifest(f"{URL}/pretrained/{KEY}")["kind"] == "pretrained"
    assert artifacts.read(URL, f"{RUN}/stop") is None
    manifests.load_verified(artifacts.locate(f"{URL}/pretrained/{KEY}/encoder"), "encoder", "pretrain")


def test_training_streams_shards_from_s3(bucket, spec, undisturbed_losses, tiny_shards):
    shards = f"{URL}/shards/{KEY}"
    artifact_files.upload(tiny_shards, shards)

    artifact = launchers.run(replace(spec, artifacts={"shards_path": shards}))

    assert read_losses(artifact) == undisturbed_losses
    local_copy = artifacts.local_directory(URL) / "shards" / KEY
    assert not local_copy.exists()
    assert artifacts.streaming_directory(local_copy).is_dir()


@pytest.mark.item("F05", "F06")
def test_damaged_checkpoint_is_skipped_for_an_older_one_and_none_valid_ends_the_run(
    bucket, spec, tmp_path, monkeypatch, caplog
):
    def damage(name: str) -> None:
        item = bucket.Object(f"store/{RUN}/{name}/state.safetensors")
        content = bytearray(item.get()["Body"].read())
        content[-1] ^= 1
        item.put(Body=bytes(content))

    train_until(12, spec, monkeypatch)
    newest = "step=0000000013"
    assert list_checkpoints() == ["step=0000000008", "step=0000000012", newest]
    damage(newest)
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "second machine"))
    train_until(16, spec, monkeypatch)
    assert "CheckpointCorrupt step=13" in caplog.text

    for name in set(list_checkpoints()) - {newest}:
        damage(name)
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "third machine"))
    with pytest.raises(NoValidCheckpoint, match="no checkpoint is valid"):
        launchers.run(spec)


@pytest.mark.item("F08")
def test_third_failed_upload_in_a_row_ends_the_run(bucket, faults, spec, caplog):
    faults.inject("PUT", f"{RUN}/step=", "503")

    with pytest.raises(StorageUnavailable):
        launchers.run(spec)

    attempts = [f"was not uploaded (attempt {number} of 3)" in caplog.text for number in (1, 2, 3)]
    assert attempts == [True, True, True]
    assert "saved checkpoint" not in caplog.text
    faults.heal()
    assert list_checkpoints() == []


@pytest.mark.item("F08")
def test_failed_upload_of_the_last_checkpoint_fails_the_run(bucket, faults, spec, monkeypatch):
    request_stop_after(monkeypatch, 4)
    faults.inject("PUT", "step=0000000005", "503")  # the checkpoint that the request demands

    with pytest.raises(StorageUnavailable):
        launchers.run(spec)


@pytest.mark.item("F19")
def test_stopped_pod_waits_until_the_training_has_saved(bucket, tiny_shards, monkeypatch):
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.05)
    spec = submit_job(tiny_shards, "j-pretrain-1")
    job.request_stop(spec, 60)  # returns at once, because nothing is trained yet
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(launchers.run, spec)
        while not list_checkpoints():
            assert not training.done(), training.result()
            time.sleep(0.1)

        job.request_stop(spec, 60)

        assert lease.read(f"{URL}/{RUN}/lease.json")[0]["holder"] == ""
        with pytest.raises(Preempted):
            training.result()


@pytest.mark.slow
def test_driver_forwards_a_stop_request_to_workers_on_other_disks(bucket, tiny_shards, tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(job, "_STOP_POLL_SECONDS", 0.05)
    spec = submit_job(tiny_shards, "j-pretrain-3")
    disk = tmp_path / "disk of the driver"
    monkeypatch.setattr(job.artifacts, "local_directory", lambda store: disk)
    threading.Thread(target=job._forward_stop_request, args=(spec,), daemon=True).start()
    with RemoteRun(f"{URL}/{RUN}", "j-pretrain-3").held():
        time.sleep(0.5)
        assert artifacts.read(URL, f"{RUN}/stop") is None

        (disk / RUN).mkdir(parents=True)
        (disk / RUN / "stop").touch()

        until(lambda: artifacts.read(URL, f"{RUN}/stop") is not None)


@pytest.mark.slow
def test_job_without_heartbeats_saves_and_ends_itself(bucket, tiny_shards):
    submit_job(tiny_shards, "j-pretrain-2")
    location = f"{URL}/work/j-pretrain-2.json"
    artifacts.write(URL, launchers.heartbeat_path("j-pretrain-2"), "the step 1")
    script = "import sys; from components.adapters import lease; from components.platform import job; "
    script += "lease._POLL_SECONDS = 0.2; job.HEARTBEAT_TIMEOUT_SECONDS = 5.0; job.main(sys.argv[1])"

    environment = os.environ | {"RUN_ID": ""}
    command = [sys.executable, "-c", script, location]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)

    assert result.returncode == 75
    assert "no step has followed j-pretrain-2" in result.stdout + result.stderr
    assert list_checkpoints()


def test_step_writes_a_new_heartbeat_each_time(bucket, monkeypatch):
    monkeypatch.setattr(launchers, "_HEARTBEAT_SECONDS", 0.05)
    heartbeats = set()

    def has_seen_four() -> bool:
        heartbeats.add(artifacts.read(URL, launchers.heartbeat_path("j-1")))
        return len(heartbeats) >= 4

    with launchers._heartbeats(URL, "j-1"):
        until(has_seen_four)


def test_training_on_a_cluster_needs_a_shared_store(spec, tmp_path):
    with pytest.raises(ConfigError, match="give s3://bucket/prefix"):
        launchers.run(replace(spec, store=str(tmp_path)), CLUSTER)


@pytest.mark.item("A3")
@pytest.mark.slow
def test_step_sends_its_work_to_a_job_and_reads_the_result_from_the_store(
    bucket, spec, undisturbed_losses, tmp_path, monkeypatch
):
    observed = {}

    def run_job(name, location, cluster, num_workers, step_environment, ask_to_stop, read_outcome):
        """Run the driver of the RayJob in a process that shares only S3 with the step."""
        environment = os.environ | {"INFOXLM_CACHE": str(tmp_path / "head of the cluster"), "RUN_ID": ""}
        command = [sys.executable, "-m", "components.platform.job", location]
        result = subprocess.run(command, env=environment, capture_output=True)
        output = result.stdout.decode() + result.stderr.decode()
        observed.update(code=result.returncode, outcome=read_outcome(), name=name, output=output)

    monkeypatch.setattr(kuberay_job, "run", run_job)
    monkeypatch.setenv("RUN_ID", "run-7")

    artifact = launchers.run(replace(spec, num_workers=1), CLUSTER)

    output = observed["output"]
    assert observed["code"] == 0, output
    assert observed["outcome"] is None
    assert observed["name"].startswith("j-pretrain-")
    assert artifacts.read(URL, f"work/{observed['name']}.json")
    assert read_losses(artifact) == undisturbed_losses
    assert artifact.is_relative_to(tmp_path / "first machine")
    [line] = [line for line in output.splitlines() if "step=0000000008" in line]
    assert "saved checkpoint" in line
    assert "(RayTrainWorker pid=" in line
    assert "\x1b" not in output
    assert "credentials" not in output


def test_failed_job_leaves_its_error_until_the_next_pipeline_run(bucket, spec, monkeypatch):
    earlier_errors, job_names = [], set()

    def fail(spec: BuildSpec, *_) -> None:
        raise TrainingDiverged(f"{spec.name}: 3 steps in a row")

    def run_job(name, location, cluster, num_workers, step_environment, ask_to_stop, read_outcome):
        job_names.add(name)
        earlier_errors.append((read_outcome() or {}).get("class"))
        with pytest.raises(SystemExit) as exit_info:
            job.main(location)
        ask_to_stop()
        raise InputError(f"{exit_info.value.code} {read_outcome()}")

    monkeypatch.setitem(launchers.LAUNCHERS, "ray", fail)
    monkeypatch.setattr(kuberay_job, "run", run_job)
    for run_id in ("run-1", "run-1", "run-2"):
        monkeypatch.setenv("RUN_ID", run_id)
        with pytest.raises(InputError, match=rf"5 .*'class': 'TrainingDiverged', 'message': '{KEY}: 3 steps in a row'"):
            launchers.run(replace(spec, num_workers=2), CLUSTER)

    assert earlier_errors == [None, "TrainingDiverged", None]
    assert len(job_names) == 1
    assert artifacts.read(URL, f"{RUN}/stop").startswith(b"j-pretrain-")


def test_workers_in_another_folder_read_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    save_encoder(tmp_path / "encoder", "e5")
    (tmp_path / "en-de.tsv").write_text("".join(f"Open window {n}\tBitte öffnen Sie Fenster {n}\n" for n in "ABC"))
    corpus = {"name": "web", "format": "tsv", "path": "en-de.tsv", "languages": ("en", "de")}
    similarity = {"encoder": "encoder", "minimum": -1}
    config = {"languages": ("en", "de"), "corpora": [corpus], "cleaning": {"similarity": similarity}}
    spec = BuildSpec("prepare_corpus", "store", "corpus", KEY, config, 0, {})

    def run_elsewhere(task, numbers):
        for number in numbers:
            with contextlib.chdir(tmp_path / "elsewhere"):
                result = task(number)
            yield result

    facts = builds.TEXT_STAGES["prepare_corpus"](spec, run_elsewhere, tmp_path / "out")

    assert facts["sentences"] > 0
    assert list((tmp_path / "elsewhere").iterdir()) == []
