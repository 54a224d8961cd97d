"""Start servers, wait until they answer, and stop all their processes."""

import itertools
import os
import random
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def free_port() -> int:
    """Return a port of loopback that is free, and whose port 10,000 above is free for SeaweedFS' gRPC.

    Each call in a process returns another port. Linux gives neither port to an outgoing connection by itself, because
    both are below 32,768. Such a connection would otherwise take the port before the server listens on it. By default,
    workers of Ray listen on ports below 20,000.
    """
    return next(port for port in _ports if _is_free(port) and _is_free(port + 10_000))


def _shuffled_ports() -> Iterator[int]:
    """Yield the ports that belong to this worker of pytest-xdist, in random order."""
    worker_number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = range(20_000, 22_768)[worker_number % 8 :: 8]
    yield from random.sample(ports, len(ports))


_ports = _shuffled_ports()


def _is_free(port: int) -> bool:
    with socket.socket() as listener, suppress(OSError):
        listener.bind(("127.0.0.1", port))
        return True
    return False


def port_of(listener: socket.socket) -> int:
    return listener.getsockname()[1]


def until(is_true: Callable[[], object], seconds: float = 300) -> None:
    """Wait until a condition is true. Fail the test if it is still false after `seconds`."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, f"the condition is still false after {seconds} s"
        time.sleep(0.02)


@contextmanager
def serving(
    command: Sequence[str | Path], url: str, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen]:
    """Run a server for the duration of the block, which begins when the server answers at `url`.

    Raises:
        RuntimeError: the server does not answer. The message has the end of its log.
    """
    with log.open("ab") as output:
        server = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_for(url, server, log)
        yield server
    finally:
        kill(server)


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Run an HTTP server with this handler on loopback for the duration of the block. Yield its URL."""
    handler.log_message = lambda *_: None  # type: ignore[method-assign]
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # do not print that a client has closed its connection
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def wait_for(url: str, server: subprocess.Popen, log: Path, seconds: float = 300) -> None:
    """Wait until a server answers at `url`. Raise RuntimeError if its process ends or the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"no server answers at {url}: {log.read_text()[-2000:]}")


def kill(server: subprocess.Popen) -> None:
    """Kill a server and its worker processes, which form a process group."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


@contextmanager
def balanced(listener: socket.socket, *servers: int) -> Iterator[Counter[int]]:
    """Forward the connections of a listener to the servers in turn, and skip stopped servers, as a Service does.

    Args:
        listener: accepts the connections.
        servers: ports of the servers.

    Yields:
        number of connections by port of the server.
    """
    connections_by_port: Counter[int] = Counter()
    next_ports = itertools.cycle(servers)

    def forward(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for connection in (source, target):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            for port in itertools.islice(next_ports, len(servers)):
                with suppress(OSError):
                    server = socket.create_connection(("127.0.0.1", port))
                    connections_by_port[port] += 1
                    for ends in ((client, server), (server, client)):
                        threading.Thread(target=forward, args=ends, daemon=True).start()
                    break
            else:
                client.close()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield connections_by_port
    finally:
        listener.shutdown(socket.SHUT_RDWR)
