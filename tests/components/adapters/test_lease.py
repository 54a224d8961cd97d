"""A lease has one holder at a time, whichever process dies and whichever answer of the storage is lost."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest

from components.adapters import lease
from components.adapters.lease import Lease
from infoxlm_core.errors import Fenced, LeaseHeld
from tests.servers.processes import until

S3_URL = "s3://models/store/lease.json"


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    """Notice a dead holder within seconds, but still tolerate a busy machine."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)
    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 0.5)
    monkeypatch.setattr(lease, "EXPIRY_SECONDS", 5.0)
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.1)


@pytest.fixture
def url(tmp_path) -> str:
    return str(tmp_path / "lease.json")


def assert_held_by_first(url: str) -> None:
    with pytest.raises(LeaseHeld, match="first holds the lease"), Lease(url, "second"):
        pytest.fail("two processes hold the lease")


def read_beat(url: str) -> int:
    state, _ = lease.read(url)
    return state["beat"]


@pytest.mark.item("F13")
def test_only_one_process_holds_a_lease(url):
    with Lease(url, "first"):
        assert_held_by_first(url)
    with Lease(url, "second") as second:
        assert second.attempt == 2


@pytest.mark.item("F13", "F21")
def test_stopped_holder_is_replaced_and_fenced_when_it_continues(url):
    script = textwrap.dedent("""
        import sys, time
        from components.adapters import lease
        from infoxlm_core.errors import Fenced
        lease.HEARTBEAT_SECONDS, lease._POLL_SECONDS = 0.1, 0.05
        with lease.Lease(sys.argv[1], "first") as held:
            print("held", flush=True)
            while not held.lost:
                time.sleep(0.05)
            try:
                held.renew()
            except Fenced as error:
                print("fenced", flush=True)
    """)
    first = subprocess.Popen([sys.executable, "-c", script, url], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout.readline() == "held\n"
        first.send_signal(signal.SIGSTOP)

        with Lease(url, "second") as second:
            first.send_signal(signal.SIGCONT)
            assert first.stdout.readline() == "fenced\n"
            second.renew()
    finally:
        first.kill()
        first.wait()


def test_two_attempts_with_the_same_name_are_distinguished(url):
    first = Lease(url, "job")
    second = Lease(url, "job")
    second.attempt = 1  # as if it had read the lease before the first attempt wrote it

    assert first._take()
    assert not second._write()


def test_restarted_holder_takes_its_lease_at_once_and_fences_the_old_process(url):
    first = Lease(url, "job")
    first.__enter__()
    start = time.monotonic()

    with Lease(url, "job"):
        assert time.monotonic() - start < lease.EXPIRY_SECONDS
        with pytest.raises(Fenced):
            first.renew()
    first.__exit__(None, None, None)


def test_error_of_the_periodic_check_does_not_lose_the_lease(url):
    call_count = 0

    def fail() -> None:
        nonlocal call_count
        call_count += 1
        raise RuntimeError

    with Lease(url, "first", periodic_check=fail) as first:
        until(lambda: call_count > 1 and read_beat(url) > 2)
        assert_held_by_first(url)
        first.renew()


def test_holder_keeps_its_lease_if_all_answers_to_its_beats_are_lost(bucket, faults):
    with Lease(S3_URL, "first") as first:
        faults.inject("PUT", "lease.json", "applied-500", times=10)
        until(lambda: len(faults.injected) == 10)
        last_beat = read_beat(S3_URL)

        until(lambda: first.lost or read_beat(S3_URL) > last_beat)
        first.renew()


@pytest.mark.item("P7")
def test_renewal_waits_until_the_storage_answers_again(bucket, faults, monkeypatch):
    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 100.0)
    monkeypatch.setattr(lease, "EXPIRY_SECONDS", 60.0)  # a busy machine may need seconds for five attempts
    with Lease(S3_URL, "first") as first:
        faults.inject("PUT", "lease.json", "503", times=5)

        first.renew()

    assert len(faults.injected) == 5
