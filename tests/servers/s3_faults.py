"""A proxy in front of a real S3 server that injects the faults that a test plans.

    faults.inject("PUT", "manifest.json", "applied-500", times=1)
    …
    assert faults.injected == [("applied-500", "PUT", "models/a/manifest.json")]

Signatures stay valid, because the proxy forwards the Host header that the client has signed.
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
"""How a request fails:

500, 503, reset   the server does not receive the request
applied-…         the server executes the request, but the client gets an error, a reset, or no answer at all
truncated         the connection ends in the middle of the answer
flipped           one bit of the answer is wrong
"""

_ERROR = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>planned by a test</Message></Error>"
_CODES = {500: b"InternalError", 503: b"SlowDown"}
_CONNECTION_HEADERS = {
    "connection",
    "keep-alive",
    "transfer-encoding",
    "expect",
    "content-length",
}  # apply to a connection, so they are not forwarded


@dataclass
class _Fault:
    method: str
    pattern: re.Pattern[str]
    kind: Kind
    remaining: float  # number of further requests that fail


class Faults:
    """The planned and the injected faults of a proxy."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.url = ""
        self.injected: list[tuple[str, str, str]] = []
        """`(kind, method, "bucket/key?query")` of each injected fault in order."""
        self.requests: list[tuple[str, str]] = []
        """`(method, "bucket/key?query")` of each request."""
        self._planned: list[_Fault] = []
        self._lock = threading.Lock()

    def inject(self, method: str, key_pattern: str, kind: Kind, times: float = math.inf) -> None:
        """Plan a fault for the next `times` requests of a method whose `bucket/key?query` matches a pattern.

        Args:
            method: `PUT`, `GET`, …, or `*` for all methods.
            key_pattern: regular expression to search for. The parts of a multipart upload have `partNumber=` in their
                query.
        """
        if kind not in get_args(Kind):
            raise ValueError(f"no such fault: {kind}")
        with self._lock:
            self._planned.append(_Fault(method, re.compile(key_pattern), kind, times))

    def heal(self) -> None:
        """Cancel all planned faults."""
        with self._lock:
            self._planned.clear()

    def next(self, method: str, target: str) -> Kind | None:
        """Record a request. Return how it fails, by the first plan that matches, or None."""
        with self._lock:
            self.requests.append((method, target))
            for fault in self._planned:
                if fault.remaining and fault.method in ("*", method) and fault.pattern.search(target):
                    fault.remaining -= 1
                    self.injected.append((fault.kind, method, target))
                    return fault.kind
        return None


@contextmanager
def faulty(server: str) -> Iterator[Faults]:
    """Run a proxy on loopback in front of the S3 server at a URL."""
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
            self.connection.recv(1)  # wait until the client closes the connection
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
            if name.lower() not in _CONNECTION_HEADERS:
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
            if name.lower() not in _CONNECTION_HEADERS:
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
        """Close the connection with a reset."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.rfile.close()  # it refers to the socket too
        self.connection.close()
