"""Serve sentence vectors over HTTP with KServe's protocol V1.

    POST /v1/models/infoxlm:predict    {"instances": ["Save the file"]}  ->  {"predictions": [[0.12, -0.03, …]]}
    GET  /v1/models/infoxlm            {"name": "infoxlm", "ready": true}
    GET  /                             {"status": "alive"}

The server computes one request at a time with all cores; run more pods to serve more requests. Up to rounding, a
vector does not depend on the other sentences of its request. Put a proxy with TLS and login in front of the server.
"""

import json
import logging
import signal
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from torch import Tensor

from infoxlm_core.errors import InputError

logger = logging.getLogger(__name__)

Embed = Callable[[Sequence[str]], Tensor]
MOST_BYTES, MOST_SENTENCES = 4 * 2**20, 1024
"""Limits of one request."""


class Refused(Exception):
    """The request cannot be answered; the client gets this status and message."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: "Server"
    timeout = 60  # seconds without data until the connection is closed

    def do_GET(self) -> None:
        pages: dict[str, dict[str, Any]] = {"/": {"status": "alive"}}
        pages[self.server.path] = {"name": self.server.name, "ready": True}
        page = pages.get(self.path)
        self._answer(HTTPStatus.OK if page else HTTPStatus.NOT_FOUND, page or self._unknown())

    def do_POST(self) -> None:
        try:
            self._answer(HTTPStatus.OK, {"predictions": self.server.embed(self._sentences()).tolist()})
        except Refused as refused:
            self._answer(refused.status, {"error": str(refused)})
        except Exception:
            logger.exception("a request failed")
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "internal error: see the log of the server"})

    def _sentences(self) -> list[str]:
        if self.path != f"{self.server.path}:predict":
            raise Refused(HTTPStatus.NOT_FOUND, self._unknown()["error"])
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "Content-Length is missing")
        if int(length) > MOST_BYTES:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{length} bytes: send at most {MOST_BYTES}")
        try:
            sentences = json.loads(self.rfile.read(int(length)))["instances"]
            if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
                raise TypeError("instances is not a list of strings")
            "".join(sentences).encode()  # raises UnicodeEncodeError for an unpaired surrogate
        except (ValueError, KeyError, TypeError, RecursionError) as error:  # RecursionError: deeply nested JSON
            remedy = 'send {"instances": ["a sentence", …]}'
            raise Refused(HTTPStatus.BAD_REQUEST, f"{type(error).__name__}: {error}: {remedy}") from None
        if not 0 < len(sentences) <= MOST_SENTENCES:
            raise Refused(HTTPStatus.BAD_REQUEST, f"{len(sentences)} sentences: send 1 to {MOST_SENTENCES}")
        return sentences

    def _unknown(self) -> dict[str, str]:
        return {"error": f"unknown path {self.path[:100]}: use {self.server.path} or {self.server.path}:predict"}

    def _answer(self, status: HTTPStatus, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *values: Any) -> None:
        if self.command != "GET":  # probes would fill the log
            logger.info("%s %r", self.address_string(), format % values)


class Server(ThreadingHTTPServer):
    """Answers each request in a thread, and computes one request at a time."""

    daemon_threads = False  # answer the waiting requests before stopping

    def __init__(self, address: tuple[str, int], name: str, embed: Embed) -> None:
        self.name, self.path, self._embed, self._lock = name, f"/v1/models/{name}", embed, threading.Lock()
        super().__init__(address, Handler)

    def embed(self, sentences: Sequence[str]) -> Tensor:
        with self._lock:
            return self._embed(sentences)


def serve(embed: Embed, name: str, host: str, port: int) -> None:
    """Serve until SIGTERM or Ctrl-C, then answer the waiting requests and stop.

    Raises:
        InputError: the port is in use or not allowed, or the address is empty, which would mean all addresses.
    """
    if not host:
        raise InputError("--host is empty: give an address of this machine, or 0.0.0.0 for all of them")
    try:
        server = Server((host, port), name, embed)
    except OSError as error:
        raise InputError(f"cannot listen at {host}:{port} ({error}): give another --port or --host") from None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    with server:
        logger.info("serving http://%s:%d%s:predict", host, server.server_port, server.path)
        server.serve_forever(poll_interval=0.1)
    logger.info("stopped after answering all requests")
