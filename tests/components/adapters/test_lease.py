"""A lease has one holder at a time, in a directory and on a real S3 server, whatever process dies or answer is lost."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest

from components.adapters import lease
from components.adapters.lease import Lease
from components.adapters.s3 import store
from infoxlm_core.errors import Fenced, LeaseHeld
from tests.servers.processes import until

URL = "s3://models/store/lease.json"


@pytest.fixture(autouse=True)
def fast_beats(monkeypatch):
    """Beats so fast that a dead holder is noticed in seconds, and a living one on a busy machine is not missed."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)
    monkeypatch.setattr(lease, "BEAT", 0.5)
    monkeypatch.setattr(lease, "PATIENCE", 5.0)
    monkeypatch.setattr(lease, "_POLL", 0.1)


@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.slow)])
def url(request, tmp_path) -> str:
    if request.param == "directory":
        return str(tmp_path / "lease.json")
    request.getfixturevalue("bucket")
    return URL


def assert_held(url: str) -> None:
    with pytest.raises(LeaseHeld, match="first holds the lease"), Lease(url, "second"):
        pytest.fail("it was taken")


def beat(url: str) -> int:
    return lease.read(url)[0]["beat"]


@pytest.mark.item("F13")
def test_two_do_not_hold_a_lease_at_once(url):
    with Lease(url, "first"):
        assert_held(url)
    with Lease(url, "second") as taken:
        assert taken.attempt == 2


@pytest.mark.item("F13", "F21")
@pytest.mark.slow
def test_a_killed_holder_is_replaced_and_one_that_wakes_up_is_fenced(bucket):
    script = textwrap.dedent("""
        import sys, time
        from components.adapters import lease
        from infoxlm_core.errors import Fenced
        lease.BEAT, lease._POLL = 0.1, 0.05
        with lease.Lease(sys.argv[1], "first") as held:
            print("held", flush=True)
            while not held.lost:
                time.sleep(0.05)
            try:
                held.renew()
            except Fenced as error:
                print("fenced", flush=True)
    """)
    first = subprocess.Popen([sys.executable, "-c", script, URL], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout.readline() == "held\n"
        first.send_signal(signal.SIGSTOP)

        with Lease(URL, "second") as taken:
            first.send_signal(signal.SIGCONT)
            assert first.stdout.readline() == "fenced\n"
            taken.renew()
    finally:
        first.kill()
        first.wait()


def test_two_attempts_of_one_holder_do_not_take_each_others_writing_for_their_own(url):
    first, second = Lease(url, "job"), Lease(url, "job")
    second.attempt = 1  # it has looked before the first wrote, and writes after it

    assert first._take() and not second._write()


def test_a_holder_that_starts_again_does_not_wait_for_itself(url):
    first = Lease(url, "job")
    first.__enter__()
    began = time.monotonic()

    with Lease(url, "job"):
        assert time.monotonic() - began < lease.PATIENCE  # which another would wait
        with pytest.raises(Fenced):
            first.renew()
    first.__exit__(None, None, None)


def test_an_error_of_meanwhile_does_not_cost_the_lease(url):
    failures = []

    def fail() -> None:
        failures.append(1)
        raise RuntimeError("not ours")

    with Lease(url, "first", meanwhile=fail) as held:
        until(lambda: len(failures) > 1 and beat(url) > 2)
        assert_held(url)
        held.renew()


@pytest.mark.item("F07")
def test_one_lost_answer_to_a_beat_does_not_cost_the_lease(bucket, faults, monkeypatch):
    monkeypatch.setitem(store.QUICK_LIMITS, "read_seconds", 0.4)
    with Lease(URL, "first") as held:
        faults.inject("PUT", "lease.json", "applied-silence", times=1)
        until(lambda: faults.injected)

        assert_held(URL)
        held.renew()


def test_a_holder_knows_its_own_beat_whose_answers_were_all_lost(bucket, faults):
    with Lease(URL, "first") as held:
        faults.inject("PUT", "lease.json", "applied-500", times=10)
        until(lambda: len(faults.injected) == 10)
        now = beat(URL)

        until(lambda: held.lost or beat(URL) > now)
        held.renew()


@pytest.mark.item("P7")
def test_a_save_waits_for_a_server_that_is_away_for_a_moment(bucket, faults, monkeypatch):
    monkeypatch.setattr(lease, "BEAT", 100.0)
    monkeypatch.setattr(lease, "PATIENCE", 60.0)  # a busy machine may need seconds for five tries
    with Lease(URL, "first") as held:
        faults.inject("PUT", "lease.json", "503", times=5)

        held.renew()

    assert len(faults.injected) == 5
