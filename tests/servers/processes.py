"""Start a server, wait until it answers, and leave nothing of it behind."""

import itertools
import os
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
    """Return a port that nobody uses at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return port_of(listener)


def port_of(listener: socket.socket) -> int:
    return listener.getsockname()[1]


def until(is_true: Callable[[], object], seconds: float = 20) -> None:
    """Wait until a condition holds; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@contextmanager
def serving(
    command: Sequence[str | Path], url: str, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen]:
    """Run a server and all its processes as long as the block lasts, from the moment it answers at `url`.

    Raises:
        RuntimeError: it does not answer; the end of its log.
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
    """Answer HTTP requests by a handler on loopback as long as the block lasts; yield the server's URL."""
    handler.log_message = lambda *_: None  # type: ignore[method-assign]
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that hang up are no news
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def wait_for(url: str, server: subprocess.Popen, log: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"no server at {url}: {log.read_text()[-2000:]}")


def kill(server: subprocess.Popen) -> None:
    """Kill a server with its worker processes (they are a process group of their own)."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


@contextmanager
def balanced(listener: socket.socket, *servers: int) -> Iterator[Counter[int]]:
    """Pass the connections of a listener on to servers in turn, past one that is gone, as a Service does.

    Yields the number of connections by the port of the server.
    """
    taken: Counter[int] = Counter()
    turns = itertools.cycle(servers)

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            for server in itertools.islice(turns, len(servers)):
                with suppress(OSError):
                    answering = socket.create_connection(("127.0.0.1", server))
                    taken[server] += 1
                    for ends in ((client, answering), (answering, client)):
                        threading.Thread(target=pass_on, args=ends, daemon=True).start()
                    break
            else:
                client.close()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield taken
    finally:
        listener.shutdown(socket.SHUT_RDWR)
