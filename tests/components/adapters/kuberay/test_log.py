"""The log of a job is printed while the job runs, also after broken connections and with a new submitter."""

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
    """Return a connection to a log that sends these lines."""
    return lambda: iter(lines)


def read_printed_lines(capsys, count: int) -> list[str]:
    """Return the printed lines as soon as there are `count` of them."""
    lines: list[str] = []
    until(lambda: lines.extend(capsys.readouterr().out.splitlines()) or len(lines) >= count)
    return lines


def list_queries(kubernetes: KubernetesServer, resource: str) -> list[dict[str, str]]:
    """Return the query parameters of all calls for a resource."""
    calls = zip(kubernetes.queries, kubernetes.calls, strict=True)
    return [query for query, (_, _, called_resource) in calls if called_resource == resource]


def test_log_is_read_again_from_its_last_seconds_after_a_broken_connection(kubernetes, capsys):
    kubernetes.put_submitter("s1", JOB, connection("one", "two", "cut"), connection("two", "three"))

    log = follow(kubernetes)
    lines = read_printed_lines(capsys, 4)
    log.finish(0.1)

    assert lines == ["one", "two", "two", "three"]
    first_query, *later_queries = list_queries(kubernetes, "pods/log")
    assert "sinceSeconds" not in first_query
    assert all(10 <= int(query["sinceSeconds"]) < 60 for query in later_queries)
    assert first_query["follow"] == "True"
    assert {query["labelSelector"] for query in list_queries(kubernetes, "pods")} == {f"job-name={JOB}"}


def test_log_of_a_new_submitter_is_read_from_the_start(kubernetes, capsys):
    kubernetes.put_submitter("s1", JOB, connection("submitted", "step 1"))
    log = follow(kubernetes)
    lines = read_printed_lines(capsys, 2)

    kubernetes.put_submitter("s2", JOB, connection("step 1", "step 2"), created="30")
    lines += read_printed_lines(capsys, 2)
    log.finish(0.1)

    assert lines == ["submitted", "step 1", "step 1", "step 2"]


def test_last_lines_of_an_ended_job_are_printed_once_without_waiting_longer(kubernetes, capsys):
    def slow_connection() -> Iterator[str]:
        yield "one"
        time.sleep(0.3)
        yield "two"

    kubernetes.put_submitter("s1", JOB, slow_connection)
    kubernetes.end_submitter("s1")
    log = follow(kubernetes)

    start = time.monotonic()
    log.finish(100)

    assert capsys.readouterr().out.splitlines() == ["one", "two"]
    assert time.monotonic() - start < 50


def test_missing_right_to_read_logs_is_logged_once(kubernetes, caplog):
    kubernetes.put_submitter("s1", JOB, connection("one"))
    kubernetes.fail("get", 403, resource="pods/log")

    log = follow(kubernetes)
    until(lambda: "cannot be shown" in caplog.text)
    log.finish(5)

    assert caplog.text.count("Role infoxlm-runner") == 1


def test_log_of_a_starting_container_is_requested_again(kubernetes, capsys):
    kubernetes.put_submitter("s1", JOB, connection("one"))
    kubernetes.fail("get", 400, 500, resource="pods/log")

    log = follow(kubernetes)
    lines = read_printed_lines(capsys, 1)
    log.finish(0)

    assert lines == ["one"]
