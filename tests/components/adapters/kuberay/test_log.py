"""The log of a job is printed while it runs, whatever happens to connections and pods."""

import time
from collections.abc import Iterator

from components.adapters.kuberay.api import RayJobs
from components.adapters.kuberay.log import JobLog
from tests.servers.kubernetes_api import NAMESPACE, KubernetesServer
from tests.servers.processes import until

JOB = "j-pretrain-3f2a9c01de"


def follow(kubernetes: KubernetesServer) -> JobLog:
    return JobLog(RayJobs(kubernetes.api(), NAMESPACE), JOB)


def connection(*lines: str):
    """Return what one connection to a log brings."""
    return lambda: iter(lines)


def printed(capsys, count: int) -> list[str]:
    """Return what has been printed, as soon as it is so many lines."""
    lines: list[str] = []
    until(lambda: lines.extend(capsys.readouterr().out.splitlines()) or len(lines) >= count)
    return lines


def test_a_log_is_followed_from_its_last_seconds_after_a_cut_connection(kubernetes, capsys):
    kubernetes.put_submitter("s1", JOB, connection("one", "two", "cut"), connection("two", "three"))

    log = follow(kubernetes)
    lines = printed(capsys, 4)
    log.finish(0.1)

    assert lines == ["one", "two", "two", "three"]
    queries = [query for query, call in zip(kubernetes.queries, kubernetes.calls, strict=True) if call[2] == "pods/log"]
    assert "sinceSeconds" not in queries[0] and {query["follow"] for query in queries} == {"True"}
    assert all(10 <= int(query["sinceSeconds"]) < 60 for query in queries[1:])
    selectors = [query for query, call in zip(kubernetes.queries, kubernetes.calls, strict=True) if call[2] == "pods"]
    assert {query["labelSelector"] for query in selectors} == {f"job-name={JOB}"}


def test_a_new_submitter_is_followed_from_the_start_of_its_log(kubernetes, capsys):
    kubernetes.put_submitter("s1", JOB, connection("submitted", "step 1"))
    log = follow(kubernetes)
    lines = printed(capsys, 2)

    kubernetes.put_submitter("s2", JOB, connection("step 1", "step 2"), created="30")
    lines += printed(capsys, 2)
    log.finish(0.1)

    assert lines == ["submitted", "step 1", "step 1", "step 2"]


def test_the_last_lines_of_a_job_that_has_ended_are_waited_for_and_printed_once(kubernetes, capsys):
    def slow() -> Iterator[str]:
        yield "one"
        time.sleep(0.3)
        yield "two"

    kubernetes.put_submitter("s1", JOB, slow)
    kubernetes.end_submitter("s1")
    log = follow(kubernetes)

    began = time.monotonic()
    log.finish(100)

    assert capsys.readouterr().out.splitlines() == ["one", "two"]
    assert time.monotonic() - began < 50


def test_nothing_is_printed_after_the_end(kubernetes, capsys):
    kubernetes.put_submitter("s1", JOB, connection("one"), connection("too late"))
    log = follow(kubernetes)

    log.finish(0)
    log._thread.join(20)

    assert not log._thread.is_alive()
    assert "too late" not in capsys.readouterr().out


def test_a_step_without_the_right_to_read_logs_says_so_once_and_goes_on(kubernetes, caplog):
    kubernetes.put_submitter("s1", JOB, connection("one"))
    kubernetes.fail("get", 403, resource="pods/log")

    log = follow(kubernetes)
    until(lambda: "cannot be shown" in caplog.text)
    log.finish(5)

    assert "Role infoxlm-runner" in caplog.text


def test_a_container_that_is_still_starting_is_asked_again(kubernetes, capsys):
    kubernetes.put_submitter("s1", JOB, connection("one"))
    kubernetes.fail("get", 400, 500, resource="pods/log")

    log = follow(kubernetes)

    assert printed(capsys, 1) == ["one"]
    log.finish(0)
