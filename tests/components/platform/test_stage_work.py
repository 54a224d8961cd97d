"""A training whose machines share nothing but S3: it goes on wherever somebody starts it again."""

import contextlib
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

from components.adapters import lease
from components.adapters.kuberay import job as kuberay_job
from components.platform import artifact_files, artifacts, job, launchers, stage_work
from components.platform.stage_work import Work
from components.platform.training_runs import RemoteRun
from infoxlm_core import manifests
from infoxlm_core.errors import (
    ConfigError,
    InputError,
    NoValidCheckpoint,
    Preempted,
    StorageUnavailable,
    TrainingDiverged,
)
from infoxlm_core.training import tracker
from tests.toys.exports import save_encoder
from tests.toys.pretraining import tiny_config

URL = "s3://models/store"
KEY = "0123456789abcdef"
STEPS = 30


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "first machine"))
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)


@pytest.fixture
def work(tiny_shards) -> Work:
    config = tiny_config(optimization={"steps": STEPS}, checkpoints={"every": 4})
    return Work(
        "pretrain", URL, "pretrained", KEY, config.model_dump(mode="json"), 0, {"shards_path": str(tiny_shards)},
        "pretrained-abc",
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tiny_shards, tmp_path_factory) -> list:
    """The curve of the same training on one machine, in a directory."""
    config = tiny_config(optimization={"steps": STEPS}, checkpoints={"every": 4})
    store = tmp_path_factory.mktemp("store")
    done = launchers.run(
        Work("pretrain", str(store), "pretrained", "abc", config.model_dump(mode="json"), 0,
             {"shards_path": str(tiny_shards)}, "pretrained-abc")
    )  # fmt: skip
    return curve(done)


def curve(made: Path) -> list:
    return [(step, {name: value.hex() for name, value in values.items() if "loss" in name})
            for step, values in tracker.read(made / "encoder" / tracker.METRICS)]  # fmt: skip


def stop_soon(monkeypatch, after: int) -> None:
    """Let somebody ask for a stop as soon as a number of checkpoints exist."""
    send = RemoteRun.send

    def send_and_ask(self: RemoteRun, directory: Path, *given) -> None:
        send(self, directory, *given)
        if int(directory.name.partition("=")[2]) == after:
            artifacts.write(URL, f"{self.url.removeprefix(URL + '/')}/stop", "")
            self._check_for_stop()

    monkeypatch.setattr(RemoteRun, "send", send_and_ask)


def preempted(work: Work, monkeypatch, after: int = 12) -> None:
    with monkeypatch.context() as patch:
        stop_soon(patch, after)
        with pytest.raises(Preempted, match="asked to stop after step"):
            launchers.run(work)


@pytest.mark.item("F11")
def test_a_run_stopped_on_one_machine_ends_on_another_as_if_nothing_had_happened(
    bucket, work, undisturbed, tmp_path, monkeypatch, caplog
):
    preempted(work, monkeypatch)
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "second machine"))
    caplog.set_level("INFO")

    made = launchers.run(replace(work, job="j-second"))

    assert "resuming after step 13" in caplog.text and str(tmp_path / "second machine") in str(made)
    assert curve(made) == undisturbed and len(undisturbed) == STEPS
    assert artifact_files.manifest(f"{URL}/pretrained/{KEY}")["kind"] == "pretrained"
    assert artifacts.read(URL, "runs/pretrained-abc/stop") is None
    manifests.read(artifacts.locate(f"{URL}/pretrained/{KEY}/encoder"), "encoder", "pretrain")


def test_a_training_from_s3_downloads_its_text_while_it_trains(bucket, work, undisturbed, tiny_shards):
    shards = f"{URL}/shards/{KEY}"
    artifact_files.push(tiny_shards, shards)

    made = launchers.run(replace(work, artifacts={"shards_path": shards}))

    assert curve(made) == undisturbed
    local_copy = artifacts.local_directory(URL) / "shards" / KEY
    assert not local_copy.exists() and artifacts.streaming_directory(local_copy).is_dir()


@pytest.mark.item("F05", "F06")
def test_a_damaged_checkpoint_gives_way_to_the_one_before_and_when_all_are_damaged_nothing_starts_over(
    bucket, work, undisturbed, tmp_path, monkeypatch, caplog
):
    preempted(work, monkeypatch)
    names = RemoteRun(f"{URL}/runs/pretrained-abc", "me").names()
    assert names == [f"step={step:010d}" for step in (8, 12, 13)]

    def damage(name: str) -> None:
        item = bucket.Object(f"store/runs/pretrained-abc/{name}/state.safetensors")
        content = bytearray(item.get()["Body"].read())
        content[-1] ^= 1
        item.put(Body=bytes(content))

    damage(names[2])
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "second machine"))
    preempted(work, monkeypatch, after=16)
    assert "CheckpointCorrupt step=13" in caplog.text

    for name in RemoteRun(f"{URL}/runs/pretrained-abc", "me").names():
        if name != names[2]:
            damage(name)
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "third machine"))
    with pytest.raises(NoValidCheckpoint, match="no checkpoint is valid"):
        launchers.run(work)


@pytest.mark.item("F08")
def test_saves_that_do_not_arrive_are_borne_twice_and_then_end_the_run(bucket, faults, work, caplog):
    faults.inject("PUT", "runs/pretrained-abc/step=", "503")

    with pytest.raises(StorageUnavailable):
        launchers.run(work)

    assert [f"was not uploaded (attempt {n} of 3)" in caplog.text for n in (1, 2, 3)] == [True] * 3
    assert "saved checkpoint" not in caplog.text
    faults.heal()
    assert RemoteRun(f"{URL}/runs/pretrained-abc", "me").names() == []


@pytest.mark.item("F08")
def test_a_checkpoint_that_nothing_follows_must_arrive(bucket, faults, work, monkeypatch):
    stop_soon(monkeypatch, after=4)
    faults.inject("PUT", "step=0000000005", "503")  # the save that the request asks for

    with pytest.raises(StorageUnavailable):
        launchers.run(work)


@pytest.mark.item("F19")
def test_a_pod_that_must_go_lets_the_training_save_first(bucket, work, monkeypatch):
    monkeypatch.setattr(lease, "_POLL", 0.05)
    named = replace(
        work, job="j-pretrain-1", config=tiny_config(optimization={"steps": 100_000}).model_dump(mode="json")
    )
    artifacts.write(URL, "work/j-pretrain-1.json", json.dumps(asdict(named)))
    place = f"{URL}/work/j-pretrain-1.json"
    job.request_stop(place, 60)  # nobody trains: nothing to wait for
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(launchers.run, named)
        while not RemoteRun(f"{URL}/runs/pretrained-abc", "").names():
            assert not training.done(), training.result()
            time.sleep(0.1)

        job.request_stop(place, 60)

        assert lease.read(f"{URL}/runs/pretrained-abc/lease.json")[0]["holder"] == ""
        with pytest.raises(Preempted):
            training.result(timeout=30)


@pytest.mark.slow
def test_a_driver_that_is_told_to_stop_tells_workers_that_do_not_share_its_disk(bucket, work, tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "_POLL", 0.05)
    named = replace(work, job="j-pretrain-3", config=tiny_config(optimization={"steps": 10}).model_dump(mode="json"))
    driver = tmp_path / "disk of the head/runs/pretrained-abc"
    monkeypatch.setattr(job.artifacts, "local_directory", lambda store: driver.parents[1])
    monkeypatch.setattr(job, "_STOP_POLL_SECONDS", 0.05)
    artifacts.write(URL, "work/j-pretrain-3.json", json.dumps(asdict(named)))
    threading.Thread(target=job._forward_stop_request, args=(named,), daemon=True).start()
    with RemoteRun(f"{URL}/runs/pretrained-abc", "j-pretrain-3").held():
        time.sleep(0.5)
        assert artifacts.read(URL, "runs/pretrained-abc/stop") is None

        driver.mkdir(parents=True)
        (driver / "stop").touch()

        deadline = time.monotonic() + 20
        while artifacts.read(URL, "runs/pretrained-abc/stop") is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (driver / "stop").unlink()  # the thread looks on


@pytest.mark.slow
def test_a_job_that_nobody_follows_saves_and_ends_itself(bucket, work, tmp_path):
    named = replace(
        work, job="j-pretrain-2", config=tiny_config(optimization={"steps": 100_000}).model_dump(mode="json")
    )
    artifacts.write(URL, "work/j-pretrain-2.json", json.dumps(asdict(named)))
    artifacts.write(URL, launchers.heartbeat_path("j-pretrain-2"), "the step 1")
    script = "import sys; from components.adapters import lease; from components.platform import job; "
    script += "lease._POLL = 0.2; job.HEARTBEAT_TIMEOUT_SECONDS = 5.0; job.main(sys.argv[1])"

    done = subprocess.run([sys.executable, "-c", script, f"{URL}/work/j-pretrain-2.json"], timeout=120,
                          capture_output=True, text=True, env=os.environ | {"RUN_ID": ""})  # fmt: skip

    assert done.returncode == 75 and "no step has followed j-pretrain-2" in done.stdout + done.stderr
    assert RemoteRun(f"{URL}/runs/pretrained-abc", "").names()


def test_while_a_step_follows_its_job_the_job_sees_a_sign_each_time(bucket, monkeypatch):
    monkeypatch.setattr(launchers, "_HEARTBEAT_SECONDS", 0.05)
    seen = set()
    with launchers._heartbeat(URL, "j-1"):
        deadline = time.monotonic() + 20
        while len(seen) < 4 and time.monotonic() < deadline:
            seen.add(artifacts.read(URL, launchers.heartbeat_path("j-1")))

    assert len(seen) >= 4


def test_a_training_on_a_cluster_needs_a_store_that_its_machines_share(work, tmp_path):
    with pytest.raises(ConfigError, match="give s3://bucket/prefix"):
        launchers.run(replace(work, store=str(tmp_path)), CLUSTER)


CLUSTER = {"image": f"registry.example/infoxlm@sha256:{'1' * 64}"}


@pytest.mark.item("A3")
@pytest.mark.slow
def test_a_step_hands_its_work_to_a_job_and_finds_the_result_in_the_store(
    bucket, work, undisturbed, tmp_path, monkeypatch
):
    seen = {}

    def run(name, place, cluster, num_workers, task, ask_to_stop, read_outcome):
        """What the RayJob does, as a process of its own that shares nothing but S3 with the step."""
        elsewhere = os.environ | {"INFOXLM_CACHE": str(tmp_path / "head of the cluster"), "RUN_ID": ""}
        command = [sys.executable, "-m", "components.platform.job", place]
        done = subprocess.run(command, env=elsewhere, capture_output=True)
        output = done.stdout.decode() + done.stderr.decode()
        seen.update(code=done.returncode, outcome=read_outcome(), name=name, output=output)

    monkeypatch.setattr(kuberay_job, "run", run)
    monkeypatch.setenv("RUN_ID", "run-7")

    made = launchers.run(replace(work, num_workers=1), CLUSTER)

    assert seen["code"] == 0 and seen["outcome"] is None, seen["output"]
    assert seen["name"].startswith("j-pretrain-") and artifacts.read(URL, f"work/{seen['name']}.json")
    assert curve(made) == undisturbed and str(tmp_path / "first machine") in str(made)
    saves = [line for line in seen["output"].splitlines() if "step=0000000008" in line]
    assert len(saves) == 1 and "saved checkpoint" in saves[0]
    assert "(RayTrainWorker pid=" in saves[0] and "\x1b" not in seen["output"]
    assert "credentials" not in seen["output"]


def test_a_job_that_fails_leaves_its_reason_and_a_run_that_is_submitted_again_forgets_it(bucket, work, monkeypatch):
    outcomes, names = [], set()

    def fail(work: Work, *_) -> None:
        raise TrainingDiverged(f"{work.name}: 3 steps in a row")

    def run(name, place, cluster, num_workers, task, ask_to_stop, read_outcome):
        names.add(name)
        outcomes.append((read_outcome() or {}).get("class"))
        with pytest.raises(SystemExit) as ended_with:
            job.main(place)
        ask_to_stop()
        raise InputError(f"{ended_with.value.code} {read_outcome()}")

    monkeypatch.setitem(launchers.LAUNCHERS, "ray", fail)
    monkeypatch.setattr(kuberay_job, "run", run)
    for pipeline_run in ("run-1", "run-1", "run-2"):
        monkeypatch.setenv("RUN_ID", pipeline_run)
        with pytest.raises(InputError, match=rf"5 .*'class': 'TrainingDiverged', 'message': '{KEY}: 3 steps in a row'"):
            launchers.run(replace(work, num_workers=2), CLUSTER)

    assert outcomes == [None, "TrainingDiverged", None]
    assert len(names) == 1 and artifacts.read(URL, "runs/pretrained-abc/stop").startswith(b"j-pretrain-")


@pytest.mark.parametrize(("num_workers", "where"), [(0, "here"), (2, "in a job")])
def test_text_is_prepared_in_the_step_or_when_asked_to_in_a_job_of_its_own(bucket, monkeypatch, num_workers, where):
    done = []

    def prepare(work: Work, spread: object, output: Path) -> dict:
        done.append("here")
        (output / "report.json").write_text("{}")
        return {}

    def run(name, place, *_, **__):
        done.append("in a job")
        monkeypatch.setitem(stage_work.TEXT_STAGES, "prepare_corpus", lambda work, spread, output: {})
        job.main(place)

    monkeypatch.setitem(stage_work.TEXT_STAGES, "prepare_corpus", prepare)
    monkeypatch.setitem(launchers.LAUNCHERS, "ray", launchers.process)
    monkeypatch.setattr(kuberay_job, "run", run)

    made = launchers.run(Work("prepare_corpus", URL, "corpus", "abc", {}, num_workers, {}), CLUSTER)

    assert done == [where] and artifact_files.manifest(f"{URL}/corpus/abc")["kind"] == "corpus" and made.is_dir()


def test_workers_in_another_folder_find_the_files_of_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    save_encoder(tmp_path / "encoder", "e5")
    (tmp_path / "en-de.tsv").write_text("".join(f"Open window {n}\tBitte öffnen Sie Fenster {n}\n" for n in "ABC"))
    source = {"name": "web", "format": "tsv", "path": "en-de.tsv", "languages": ("en", "de")}
    similarity = {"encoder": "encoder", "minimum": -1}
    config = {"languages": ("en", "de"), "corpora": [source], "cleaning": {"similarity": similarity}}
    work = Work("prepare_corpus", "store", "corpus", KEY, config, 0, {})

    def run_elsewhere(task, numbers):
        for number in numbers:
            with contextlib.chdir(tmp_path / "elsewhere"):
                result = task(number)
            yield result

    facts = stage_work.TEXT_STAGES["prepare_corpus"](work, run_elsewhere, tmp_path / "out")

    assert facts["sentences"] > 0
    assert list((tmp_path / "elsewhere").iterdir()) == []
