"""Directories on a real S3 server: whole or not there, whatever fails on the way."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from components.adapters import lease, storage
from components.adapters.lease import Lease
from components.platform import artifact_files, artifacts
from components.platform.training_runs import RemoteRun
from infoxlm_core import manifests
from infoxlm_core.errors import DataCorrupt, Fenced, InputError, LeaseHeld, StorageUnavailable
from tests.servers import literal_s3, s3

URL = "s3://models/store"
KEY = "0123456789abcdef"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache of this test's, and no pauses between tries."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def directory(tmp_path) -> Path:
    """An artifact of two files, one so large that it travels in parts, with another artifact inside."""
    made = tmp_path / "made"
    (made / "inner").mkdir(parents=True)
    (made / "small").write_text("content")
    (made / "inner" / "large").write_bytes(bytes(range(256)) * 40_000)  # 10 MB
    manifests.write(made / "inner", "encoder", {"steps": 1})
    manifests.write(made, "corpus", {"lines": 3})
    return made


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def keys(bucket) -> list[str]:
    return sorted(item.key for item in bucket.objects.all())


def manifest_puts(faults) -> int:
    return sum(method == "PUT" and target.endswith("store/a/manifest.json") for method, target in faults.requests)


def test_a_directory_comes_back_as_it_was_sent(bucket, directory, tmp_path):
    artifact_files.push(directory, f"{URL}/a")
    artifact_files.pull(f"{URL}/a", tmp_path / "back")

    assert tree(tmp_path / "back") == tree(directory)
    assert artifact_files.manifest(f"{URL}/a")["facts"] == {"lines": 3}


def test_what_has_no_manifest_does_not_exist(bucket, directory, tmp_path):
    bucket.upload_file(str(directory / "small"), "store/a/small")

    assert artifact_files.manifest(f"{URL}/a") is None
    with pytest.raises(InputError, match=r"s3://models/store/a holds no manifest.json"):
        artifact_files.pull(f"{URL}/a", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.item("F07")
@pytest.mark.parametrize("kind", ["500", "503", "reset"])
@pytest.mark.parametrize(("method", "key"), [("PUT", "small"), ("PUT", "partNumber=2"), ("HEAD", "small"),
                                             ("POST", "uploadId"), ("GET", "small")])  # fmt: skip
def test_faults_that_pass_cost_nothing_but_time(bucket, faults, directory, tmp_path, method, key, kind):
    faults.inject(method, key, kind, times=6)

    artifact_files.push(directory, f"{URL}/a")
    artifact_files.pull(f"{URL}/a", tmp_path / "back")

    assert tree(tmp_path / "back") == tree(directory) and len(faults.injected) == 6


@pytest.mark.item("F07")
def test_a_download_that_is_cut_short_is_begun_again(bucket, faults, directory, tmp_path):
    artifact_files.push(directory, f"{URL}/a")
    faults.inject("GET", "inner/large", "truncated", times=3)

    artifact_files.pull(f"{URL}/a", tmp_path / "back")

    assert tree(tmp_path / "back") == tree(directory) and len(faults.injected) == 3


@pytest.mark.item("F09")
def test_a_manifest_whose_answer_was_lost_is_our_own(bucket, faults, directory):
    faults.inject("PUT", "a/manifest.json", "applied-500", times=1)

    artifact_files.push(directory, f"{URL}/a")

    assert artifact_files.manifest(f"{URL}/a")["kind"] == "corpus"
    assert len(faults.injected) == 1 and manifest_puts(faults) == 2  # the second met its own first


@pytest.mark.item("F08")
def test_a_part_that_never_arrives_leaves_no_directory_and_no_pending_upload(bucket, faults, directory):
    faults.inject("PUT", "partNumber=1", "503")

    with pytest.raises(StorageUnavailable, match="run again"):
        artifact_files.push(directory, f"{URL}/a")
    faults.heal()

    assert artifact_files.manifest(f"{URL}/a") is None
    storage.open(f"{URL}/a").sweep()
    assert not list(bucket.multipart_uploads.all())
    artifact_files.push(directory, f"{URL}/a")
    assert artifact_files.manifest_exists(f"{URL}/a")


def test_what_has_arrived_is_not_sent_again(bucket, faults, directory):
    faults.inject("PUT", "small", "503")
    with pytest.raises(StorageUnavailable):
        artifact_files.push(directory, f"{URL}/a")
    faults.heal()
    faults.requests.clear()

    artifact_files.push(directory, f"{URL}/a")

    assert not [target for method, target in faults.requests if method == "PUT" and "inner/large" in target]


@pytest.mark.item("F07")
def test_a_bit_that_flips_on_the_way_is_found_and_nothing_stays(bucket, faults, directory, tmp_path):
    artifact_files.push(directory, f"{URL}/a")
    faults.inject("GET", "inner/large", "flipped")

    with pytest.raises((DataCorrupt, StorageUnavailable)):
        artifact_files.pull(f"{URL}/a", tmp_path / "back")

    assert not (tmp_path / "back").exists() and faults.injected


@pytest.fixture
def literal(directory, monkeypatch) -> Iterator[dict[str, bytes]]:
    """Objects of a server that keeps `a//b`; among them the artifact, at `URL/a`."""
    (directory / "inner/large").write_bytes(b"small enough to come in one piece")
    manifests.write(directory / "inner", "encoder", {"steps": 1})
    manifests.write(directory, "corpus", {"lines": 3})
    objects = {f"store/a/{name}": content for name, content in tree(directory).items()}
    with literal_s3.serving(objects) as url:
        for name, value in s3.environment(url).items():
            monkeypatch.setenv(name, value)
        yield objects


@pytest.mark.item("S10")
def test_what_a_manifest_does_not_name_is_not_fetched_wherever_its_key_leads(literal, directory, tmp_path):
    literal[f"store/a/{tmp_path}/outside/manifest.json"] = b"{}"
    literal["store/a/unnamed/manifest.json"] = literal["store/a/my-manifest.json"] = b"{}"

    artifact_files.pull(f"{URL}/a", tmp_path / "back")

    assert tree(tmp_path / "back") == tree(directory) and not (tmp_path / "outside").exists()


@pytest.mark.item("S10")
@pytest.mark.parametrize("lead", ["{}/outside", "../../outside", "x//outside"])
def test_a_manifest_that_names_a_place_outside_is_refused_before_anything_is_written(literal, tmp_path, lead):
    described = json.loads(literal["store/a/manifest.json"])
    name = lead.format(tmp_path)
    described["files"][name] = {"size": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    described["digest"] = manifests.digest({part: described[part] for part in ("kind", "files", "facts")})
    literal |= {"store/a/manifest.json": json.dumps(described).encode(), f"store/a/{name}": b"x"}

    for fetch in (artifact_files.pull, lambda url, to: RemoteRun(URL, "job").fetch("a", to)):
        with pytest.raises(InputError, match=r"store/a/.*outside: a name that leads out of its folder"):
            fetch(f"{URL}/a", tmp_path / "back")

    assert {path.name for path in tmp_path.iterdir()} == {"made"}


@pytest.mark.parametrize("place", ["../../outside", "/outside"])
def test_a_location_that_leads_out_of_its_artifact_is_refused(bucket, place):
    artifacts.get_or_build(URL, "corpus", KEY, lambda output: (output / "file").write_text("content") and {})

    with pytest.raises(InputError, match="a name that leads out of its folder"):
        artifacts.locate(f"{URL}/corpus/{KEY}/{place}")


def test_a_dropped_directory_is_gone_with_its_manifest(bucket, directory):
    artifact_files.push(directory, f"{URL}/a")
    artifact_files.drop(f"{URL}/a")

    assert keys(bucket) == []


@pytest.mark.item("F08")
def test_uploads_that_a_killed_process_left_are_swept(bucket):
    client = bucket.meta.client
    client.create_multipart_upload(Bucket="models", Key="store/a/large")
    client.create_multipart_upload(Bucket="models", Key="elsewhere/large")

    assert storage.open(f"{URL}/a").sweep(older=timedelta(days=1)) == 0
    assert storage.open(f"{URL}/a").sweep() == 1
    assert [upload.object_key for upload in bucket.multipart_uploads.all()] == ["elsewhere/large"]
    storage.open("s3://models/elsewhere").sweep()


def test_who_may_not_write_is_told_so_and_not_to_try_again(bucket, directory, monkeypatch):
    for name, value in s3.environment(os.environ["AWS_ENDPOINT_URL"], "reader").items():
        monkeypatch.setenv(name, value)

    with pytest.raises(InputError, match=r"s3://models/store/a: S3 refuses .*: check name and rights"):
        artifact_files.push(directory, f"{URL}/a")


# ---------------------------------------------------------------- the store


def test_each_store_has_a_copy_of_its_own():
    assert len({artifacts.local(f"s3://models/{name}") for name in ("x/a", "x-a", "x_a")}) == 3


def test_a_copy_that_does_not_say_of_which_store_is_told_again():
    (artifacts.local("s3://models/x") / "COPY_OF").write_bytes(b"\xff")

    assert artifacts.url_of(artifacts.local("s3://models/x") / "corpus/abc") == "s3://models/x/corpus/abc"


def test_an_artifact_made_on_one_machine_is_found_on_another(bucket, tmp_path, monkeypatch):
    made = artifacts.get_or_build(
        URL, "corpus", KEY, lambda output: (output / "file").write_text("content") and {"lines": 1}
    )
    place = artifacts.url_of(made)
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "other machine"))

    again = artifacts.get_or_build(URL, "corpus", KEY, lambda output: pytest.fail("made twice"))

    assert place == f"{URL}/corpus/{KEY}" and again != made and tree(again) == tree(made)
    assert artifacts.locate(place) == again and artifacts.locate(f"{place}/file").read_text() == "content"


@pytest.mark.item("P5")
@pytest.mark.parametrize("unnoticed", [False, True])
@pytest.mark.parametrize("file", ["file", manifests.NAME])
def test_a_damaged_copy_of_an_artifact_is_fetched_again(bucket, file, unnoticed):
    made = artifacts.get_or_build(URL, "pretrained", KEY, lambda output: (output / "file").write_text("content") and {})
    whole = tree(made)
    (made / file).write_bytes(b"x" * len(whole[file]))
    if unnoticed:
        artifact_files.record_verified(made, artifact_files.file_state(made))

    assert tree(artifacts.locate(f"{URL}/pretrained/{KEY}")) == whole


def test_what_was_made_but_did_not_arrive_is_sent_and_not_made_again(bucket, faults):
    faults.inject("PUT", "corpus/abc", "503")
    made = []

    def build(output: Path) -> dict:
        made.append(output)
        (output / "file").write_text("content")
        return {}

    with pytest.raises(StorageUnavailable):
        artifacts.get_or_build(URL, "corpus", "abc", build)
    assert artifacts.lookup(URL, "corpus", "abc") is None
    faults.heal()

    artifacts.get_or_build(URL, "corpus", "abc", build)

    assert len(made) == 1 and artifacts.lookup(URL, "corpus", "abc")


def test_of_two_that_made_the_same_the_first_to_arrive_counts(bucket, tmp_path, monkeypatch):
    def build(content: str):
        def write(output: Path) -> dict:
            if content == "second":  # while it is at work, another machine is done
                monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "other machine"))
                artifacts.get_or_build(URL, "corpus", "abc", build("first"))
                monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "cache"))
            (output / "file").write_text(content)
            return {}

        return write

    found = artifacts.get_or_build(URL, "corpus", "abc", build("second"))

    assert (found / "file").read_text() == "first"


# ---------------------------------------------------------------- leases


@pytest.fixture
def quick(monkeypatch):
    """A heart that beats fast: a dead one is noticed in seconds, and a living one on a busy machine is not missed."""
    monkeypatch.setattr(lease, "BEAT", 0.5)
    monkeypatch.setattr(lease, "PATIENCE", 5.0)
    monkeypatch.setattr(lease, "_POLL", 0.1)


@pytest.mark.item("F13")
def test_two_do_not_hold_a_lease_at_once(bucket, quick):
    with Lease(f"{URL}/lease.json", "first"):
        with pytest.raises(LeaseHeld, match="first is at work"), Lease(f"{URL}/lease.json", "second"):
            pytest.fail("it was taken")
        with pytest.raises(LeaseHeld):
            lease.check(f"{URL}/lease.json", "second")
        lease.check(f"{URL}/lease.json", "first")
    with Lease(f"{URL}/lease.json", "second") as taken:
        assert taken.attempt == 2


@pytest.mark.item("F13")
def test_of_many_who_ask_at_once_one_gets_it(bucket, quick):
    got, refused, done = [], [], threading.Event()

    def ask(name: str) -> None:
        try:
            with Lease(f"{URL}/lease.json", name):
                got.append(name)
                done.wait(20)
        except LeaseHeld:
            refused.append(name)

    threads = [threading.Thread(target=ask, args=(f"process {number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while len(refused) < 7 and time.monotonic() < deadline:
        time.sleep(0.05)
    done.set()
    for thread in threads:
        thread.join()

    assert len(got) == 1 and len(refused) == 7


@pytest.mark.item("F13", "F21")
@pytest.mark.slow
def test_a_killed_holder_is_replaced_and_one_that_wakes_up_is_fenced(bucket, quick, tmp_path):
    script = textwrap.dedent("""
        import sys, time
        from components.adapters import lease
        lease.BEAT, lease._POLL = 0.1, 0.05
        from infoxlm_core.errors import Fenced
        with lease.Lease(sys.argv[1], "first") as held:
            print("held", flush=True)
            while not held.lost:
                time.sleep(0.05)
            try:
                held.renew()
            except Fenced as error:
                print("fenced", flush=True)
    """)
    first = subprocess.Popen([sys.executable, "-c", script, f"{URL}/lease.json"], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout.readline() == "held\n"
        first.send_signal(signal.SIGSTOP)

        with Lease(f"{URL}/lease.json", "second", wait=0) as taken:
            first.send_signal(signal.SIGCONT)
            assert first.stdout.readline() == "fenced\n"
            taken.renew()
    finally:
        first.kill()
        first.wait()


def test_two_attempts_of_one_holder_do_not_take_each_others_writing_for_their_own(bucket):
    first, second = Lease(f"{URL}/lease.json", "job"), Lease(f"{URL}/lease.json", "job")
    second.attempt = 1  # it has looked before the first wrote, and writes after it

    assert first._take() and not second._write()


def test_a_holder_that_starts_again_does_not_wait_for_itself(bucket):
    held = Lease(f"{URL}/lease.json", "job")
    held.__enter__()
    began = time.monotonic()

    with Lease(f"{URL}/lease.json", "job"):
        assert time.monotonic() - began < lease.PATIENCE  # which another would wait
        with pytest.raises(Fenced):
            held.renew()
    held.__exit__(None, None, None)


def wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def beat(url: str) -> int:
    return lease.read(url)[0]["beat"]


def test_an_error_of_what_is_done_meanwhile_does_not_cost_the_lease(bucket, quick):
    failed = []

    def fail() -> None:
        failed.append(1)
        raise RuntimeError("not ours")

    with Lease(f"{URL}/lease.json", "first", meanwhile=fail) as held:
        wait_for(lambda: len(failed) > 1 and beat(held.url) > 2)
        with pytest.raises(LeaseHeld, match="first is at work"), Lease(held.url, "second"):
            pytest.fail("it was taken")
        held.renew()


@pytest.mark.item("F07")
def test_one_lost_answer_to_a_beat_does_not_cost_the_lease(bucket, faults, quick, monkeypatch):
    monkeypatch.setattr("components.adapters.s3.store._QUICK", 0.4)
    with Lease(f"{URL}/lease.json", "first") as held:
        faults.inject("PUT", "lease.json", "applied-silence", times=1)
        wait_for(lambda: faults.injected)

        with pytest.raises(LeaseHeld, match="first is at work"), Lease(held.url, "second"):
            pytest.fail("it was taken")
        held.renew()


def test_a_holder_knows_its_own_beat_whose_answers_were_all_lost(bucket, faults, quick):
    with Lease(f"{URL}/lease.json", "first") as held:
        faults.inject("PUT", "lease.json", "applied-500", times=10)
        wait_for(lambda: len(faults.injected) == 10)
        now = beat(held.url)

        wait_for(lambda: held.lost or beat(held.url) > now)
        held.renew()


@pytest.mark.item("P7")
def test_a_save_waits_for_a_server_that_is_away_for_a_moment(bucket, faults, quick, monkeypatch):
    monkeypatch.setattr(lease, "BEAT", 100.0)
    monkeypatch.setattr(lease, "PATIENCE", 60.0)  # a busy machine may need seconds for five tries
    with Lease(f"{URL}/lease.json", "first") as held:
        faults.inject("PUT", "lease.json", "503", times=5)

        held.renew()

    assert len(faults.injected) == 5


# ---------------------------------------------------------------- checkpoints


def checkpoint(folder: Path, step: int, content: str = "weights") -> Path:
    directory = folder / f"step={step:010d}"
    directory.mkdir(parents=True)
    (directory / "state.safetensors").write_text(f"{content} {step}")
    manifests.write(directory, "checkpoint", {"step": step})
    return directory


@pytest.mark.item("F04")
def test_the_newest_checkpoints_stay_and_a_torn_one_is_swept(bucket, quick, tmp_path):
    run = RemoteRun(f"{URL}/runs/r", "job")
    bucket.put_object(Key="store/runs/r/step=0000000009/state.safetensors", Body=b"torn")

    with run.held():
        for step in (1, 2, 3):
            run.send(checkpoint(tmp_path, step), keep=2)

    assert run.names() == ["step=0000000002", "step=0000000003"] and run.has_saved()
    assert not [key for key in keys(bucket) if "step=0000000009" in key]


@pytest.mark.item("F26")
def test_checkpoints_known_to_be_bad_go_and_do_not_count_among_those_that_stay(bucket, quick, tmp_path):
    run = RemoteRun(f"{URL}/runs/r", "job")
    with run.held():
        for step in (2, 4, 6):
            run.send(checkpoint(tmp_path, step), keep=3)

        run.send(checkpoint(tmp_path, 3), keep=2, bad={"step=0000000004", "step=0000000006"})

    assert run.names() == ["step=0000000002", "step=0000000003"]


@pytest.mark.item("F13")
def test_a_checkpoint_of_a_fenced_worker_never_exists(bucket, quick, tmp_path):
    old, new = RemoteRun(f"{URL}/runs/r", "job"), RemoteRun(f"{URL}/runs/r", "job")
    with old.held(), new.held():
        new.send(checkpoint(tmp_path / "new", 2), keep=3)

        with pytest.raises(Fenced):
            old.send(checkpoint(tmp_path / "old", 3), keep=3)
        with pytest.raises(Fenced):  # nor does it take away what is another's now, if it goes back
            old.drop("step=0000000002")

        assert new.names() == ["step=0000000002"]


def test_a_request_to_stop_is_seen_within_moments(bucket, quick):
    run = RemoteRun(f"{URL}/runs/r", "job")
    with run.held():
        assert not run.asked_to_stop()
        artifacts.write(URL, "runs/r/stop", "")
        deadline = time.monotonic() + 10
        while not run.asked_to_stop() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert run.asked_to_stop()
        run.forget_request()
        assert not run.asked_to_stop()


def test_a_request_that_is_no_text_stops_nobody_and_costs_nothing(bucket, quick):
    run = RemoteRun(f"{URL}/runs/r", "job")
    with run.held():
        bucket.put_object(Key="store/runs/r/stop", Body=b"\xff")
        now = beat(f"{run.url}/lease.json")
        wait_for(lambda: beat(f"{run.url}/lease.json") > now + 3)

        run._check_for_stop()
        assert not run.asked_to_stop()


def test_a_request_to_another_pipelines_job_stops_nobody_else(bucket, quick):
    run = RemoteRun(f"{URL}/runs/r", "job")
    with run.held():
        artifacts.write(URL, "runs/r/stop", "another's job")
        run._check_for_stop()
        assert not run.asked_to_stop()
        artifacts.write(URL, "runs/r/stop", "job")
        run._check_for_stop()
        assert run.asked_to_stop()
