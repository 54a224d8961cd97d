"""An S3 server that fails on demand: a proxy before a real one, which passes everything on but what a test plans.

    faults.inject("PUT", "manifest.json", "applied-500", times=1)
    …
    assert faults.injected == [("applied-500", "PUT", "models/a/manifest.json")]

Signatures stay valid, since the Host header that the client signed is passed on as it came.
"""

import http.client
import math
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Literal, get_args
from urllib.parse import unquote, urlsplit

from tests.servers.processes import answering

Kind = Literal["500", "503", "reset", "applied-500", "applied-reset", "applied-silence", "truncated", "flipped"]
"""`500`, `503` and `reset` are never passed on; `applied-…` are, and the answer is lost, with `applied-silence` as
long as the client waits for it; of `truncated` the connection
ends in the middle of the body; `flipped` has one bit of the body wrong."""

_ERROR = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>planned by a test</Message></Error>"
_CODES = {500: b"InternalError", 503: b"SlowDown"}
_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "content-length"}  # of a connection, not a message


@dataclass
class _Fault:
    method: str
    pattern: re.Pattern[str]
    kind: Kind
    left: float


class Faults:
    """What is planned, and what has happened: `(kind, method, "bucket/key?query")` of each injected fault in order."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.url = ""
        self.injected: list[tuple[str, str, str]] = []
        self.requests: list[tuple[str, str]] = []
        """`(method, "bucket/key?query")` of everything that arrived."""
        self._planned: list[_Fault] = []
        self._lock = threading.Lock()

    def inject(self, method: str, key_pattern: str, kind: Kind, times: float = math.inf) -> None:
        """Plan a fault for the next `times` requests of a method whose `bucket/key?query` the pattern is found in.

        Args:
            method: `PUT`, `GET`, …; `*` for all.
            key_pattern: a regular expression; parts of a multipart upload have `partNumber=` in their query.
        """
        if kind not in get_args(Kind):
            raise ValueError(f"no such fault: {kind}")
        with self._lock:
            self._planned.append(_Fault(method, re.compile(key_pattern), kind, times))

    def heal(self) -> None:
        """Forget what is planned."""
        with self._lock:
            self._planned.clear()

    def next(self, method: str, target: str) -> Kind | None:
        """Count a request and say how it shall fail, if at all: the plan that was made first comes first."""
        with self._lock:
            self.requests.append((method, target))
            for fault in self._planned:
                if fault.left and fault.method in ("*", method) and fault.pattern.search(target):
                    fault.left -= 1
                    self.injected.append((fault.kind, method, target))
                    return fault.kind
        return None


@contextmanager
def faulty(server: str) -> Iterator[Faults]:
    """Run a proxy on loopback before the S3 server at a URL."""
    faults = Faults(server)

    class Handler(_Handler):
        plan = faults

    with answering(Handler) as faults.url:
        yield faults


class _Handler(BaseHTTPRequestHandler):
    plan: Faults
    protocol_version = "HTTP/1.1"  # connections stay open, `Expect: 100-continue` is answered

    def handle_any(self) -> None:
        body = self._body()
        kind = self.plan.next(self.command, unquote(self.path.lstrip("/")))
        if kind in ("500", "503"):
            self._fail(int(kind))
            return
        if kind == "reset":
            self._reset()
            return
        response, content = self._forward(body)
        if kind == "applied-500":
            self._fail(500)
        elif kind == "applied-reset":
            self._reset()
        elif kind == "applied-silence":
            self.connection.recv(1)  # until the client hangs up
            self.close_connection = True
        else:
            if kind == "flipped" and content:
                middle = len(content) // 2
                content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
            self._answer(response, content, cut=kind == "truncated")

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(parts)

    def _forward(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection(urlsplit(self.plan.server).netloc, timeout=60)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in _HOP:
                connection.putheader(name, value)
        if "Content-Length" in self.headers or body:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response, content

    def _answer(self, response: http.client.HTTPResponse, content: bytes, cut: bool) -> None:
        self.send_response_only(response.status, response.reason)
        for name, value in response.headers.items():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        length = response.headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.wfile.flush()
            self.close_connection = True

    def _fail(self, status: int) -> None:
        content = b"" if self.command == "HEAD" else _ERROR % _CODES[status]
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _reset(self) -> None:
        """Close with a reset instead of a goodbye."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.rfile.close()  # it holds the socket too
        self.connection.close()
