"""A job's log arrives once and whole, whatever happens to connections and pods."""

import time
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.adapters.kuberay import log as ray_job_log
from components.adapters.kuberay.api import RayJobs
from components.adapters.kuberay.log import JobLog, _PodLog
from tests.servers.kubernetes_api import NAMESPACE, KubernetesServer, running_kubernetes, until

JOB = "j-pretrain-3f2a9c01de"


@pytest.fixture
def kubernetes(monkeypatch) -> Iterator[KubernetesServer]:
    monkeypatch.setattr(ray_job_log, "_PAUSE", 0.05)
    with running_kubernetes() as server:
        yield server


def says(*lines: str):
    """One connection to a log."""
    return lambda: iter(lines)


def stamped(second: int, text: str) -> str:
    return f"2026-01-01T00:00:{second:02}.000000000Z {text}"


def printed(capsys, count: int) -> list[str]:
    """What has been printed, as soon as it is so many lines."""
    lines: list[str] = []
    until(lambda: lines.extend(capsys.readouterr().out.splitlines()) or len(lines) >= count)
    return lines


def test_a_log_goes_on_after_a_cut_connection_without_lost_or_doubled_lines(kubernetes, capsys):
    a, b, c, d = (stamped(second, text) for second, text in [(1, "one"), (2, "two"), (2, "two again"), (3, "drei")])
    kubernetes.put_submitter("s1", JOB, says(a, b, "cut"), says(a, b, c, "cut"), says(b, c), says(b, c, d))

    log = JobLog(RayJobs(kubernetes.api(), NAMESPACE), JOB)
    lines = printed(capsys, 4)
    log.finish(0.1)

    assert lines == ["one", "two", "two again", "drei"]
    queries = [query for query, call in zip(kubernetes.queries, kubernetes.calls, strict=True) if call[2] == "pods/log"]
    assert {query["timestamps"] + query["follow"] for query in queries} == {"truetrue"}
    assert "sinceSeconds" not in queries[0]
    assert all(int(query["sinceSeconds"]) >= 30 for query in queries[1:])


def test_the_pod_is_found_by_the_name_of_its_job(kubernetes):
    RayJobs(kubernetes.api(), NAMESPACE).submitters(JOB)

    assert kubernetes.queries[-1]["labelSelector"] == f"job-name={JOB}"


def test_a_new_submitter_repeats_the_log_from_its_start_and_only_what_is_new_is_printed(kubernetes, capsys):
    first = says(stamped(1, "submitted"), stamped(2, "step 1"), stamped(3, "step 2"), stamped(4, "step 2"))
    second = says(*(stamped(9, text) for text in ("step 1", "step 2", "step 2", "step 2", "step 3")))
    kubernetes.put_submitter("s1", JOB, first)
    log = JobLog(RayJobs(kubernetes.api(), NAMESPACE), JOB)
    lines = printed(capsys, 4)

    kubernetes.put_submitter("s2", JOB, second, created="30")
    lines += printed(capsys, 2)
    log.finish(0.1)

    assert lines == ["submitted", "step 1", "step 2", "step 2", "step 2", "step 3"]


def test_the_last_lines_of_a_job_that_has_ended_are_waited_for_and_no_longer(kubernetes, capsys):
    def slow() -> Iterator[str]:
        yield stamped(1, "one")
        time.sleep(0.3)
        yield stamped(2, "two")

    kubernetes.put_submitter("s1", JOB, slow)
    kubernetes.end_submitter("s1")
    log = JobLog(RayJobs(kubernetes.api(), NAMESPACE), JOB)

    began = time.monotonic()
    log.finish(100)

    assert capsys.readouterr().out.splitlines() == ["one", "two"]
    assert time.monotonic() - began < 50


def test_nothing_is_printed_after_the_end(kubernetes, capsys):
    kubernetes.put_submitter("s1", JOB, says(stamped(1, "one")), says(stamped(1, "one"), stamped(2, "too late")))
    log = JobLog(RayJobs(kubernetes.api(), NAMESPACE), JOB)

    log.finish(0)
    log._thread.join(20)

    assert not log._thread.is_alive()
    assert "too late" not in capsys.readouterr().out


def test_a_step_without_the_right_to_read_logs_says_so_once_and_goes_on(kubernetes, caplog):
    kubernetes.put_submitter("s1", JOB, says(stamped(1, "one")))
    kubernetes.fail("get", 403, resource="pods/log")

    log = JobLog(RayJobs(kubernetes.api(), NAMESPACE), JOB)
    until(lambda: "cannot be shown" in caplog.text)
    log.finish(5)

    assert "Role infoxlm-runner" in caplog.text


def test_a_container_that_is_only_starting_is_asked_again(kubernetes, capsys):
    kubernetes.put_submitter("s1", JOB, says(stamped(1, "one")))
    kubernetes.fail("get", 400, 500, resource="pods/log")

    log = JobLog(RayJobs(kubernetes.api(), NAMESPACE), JOB)

    assert printed(capsys, 1) == ["one"]
    log.finish(0)


@given(
    gaps=st.lists(st.integers(0, 1), min_size=1, max_size=12),
    cuts=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=6),
)
def test_every_line_is_new_exactly_once_wherever_connections_begin_and_break(gaps, cuts):
    seconds = [sum(gaps[: number + 1]) for number in range(len(gaps))]  # some lines bear the same time stamp
    lines = [stamped(second, f"line {number}") for number, second in enumerate(seconds)]
    log, got = _PodLog(Counter()), []

    for back, length in [*cuts, (12, 24)]:
        begin = max(len(got) - back, 0)
        begin = (
            seconds.index(seconds[begin]) if begin < len(lines) else len(lines) - 1
        )  # whole seconds, as the API does
        log.reconnect()
        got += [text for line in lines[begin : begin + length] if (text := log.new(line)) is not None]

    assert got == [f"line {number}" for number in range(len(lines))]


def test_time_stamps_are_compared_as_times():
    log = _PodLog(Counter())
    assert log.new("2026-01-01T08:00:01.100000000+08:00 a") == "a"  # a node with a time zone of its own

    log.reconnect()

    assert log.new("2026-01-01T00:00:01.09Z z") is None
    assert log.new("2026-01-01T00:00:01.1Z a") is None
    assert log.new("2026-01-01T00:00:01.100000001Z b") == "b"
    assert log.new("no stamp") == "no stamp"
