"""Serve sentence vectors over HTTP with KServe's protocol V1.

    POST /v1/models/infoxlm:predict    {"instances": ["Save the file"]}  ->  {"predictions": [[0.12, -0.03, …]]}
    GET  /v1/models/infoxlm            {"name": "infoxlm", "ready": true}
    GET  /                             {"status": "alive"}

The server computes one request at a time with all cores. Run more pods to serve more requests. Up to rounding, a
sentence's vector does not depend on the other sentences in the request. Put a proxy with TLS and login in front of the
server.
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

EmbedFunction = Callable[[Sequence[str]], Tensor]
"""A function that returns one vector per sentence, (sentences, dimensions)."""
MAX_BYTES = 4 * 2**20
"""Size limit of a request body."""
MAX_SENTENCES = 1024
"""Maximum number of sentences in a request. While their vectors are computed, all other sentences wait."""


class RequestError(Exception):
    """An invalid request. The client receives the status and message."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: "Server"
    timeout = 60  # seconds without data after which the connection is closed

    def do_GET(self) -> None:
        """Answer a probe of the server or model."""
        pages: dict[str, dict[str, Any]] = {"/": {"status": "alive"}}
        pages[self.server.path] = {"name": self.server.name, "ready": True}
        if self.path in pages:
            self._send_json(HTTPStatus.OK, pages[self.path])
        else:
            self._send_json(HTTPStatus.NOT_FOUND, {"error": self._describe_unknown_path()})

    def do_POST(self) -> None:
        """Answer a prediction request with the sentences' vectors or with an error, as JSON."""
        try:
            sentences = self._read_sentences()
            vectors = self.server.embed(sentences)
            self._send_json(HTTPStatus.OK, {"predictions": vectors.tolist()})
        except RequestError as error:
            self._send_json(error.status, {"error": str(error)})
        except Exception:  # without an answer, the client would only see a closed connection
            logger.exception("a request failed")
            self._send_json(
                HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "The server has failed. Its log has the reason."}
            )

    def _read_sentences(self) -> list[str]:
        """Read the sentences of a prediction request.

        Raises:
            RequestError: the path is unknown, or the body is too large or not a list of sentences.
        """
        if self.path != f"{self.server.path}:predict":
            raise RequestError(HTTPStatus.NOT_FOUND, self._describe_unknown_path())
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise RequestError(HTTPStatus.LENGTH_REQUIRED, "The header Content-Length is missing.")
        if int(length) > MAX_BYTES:
            raise RequestError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body has {length} bytes. Send at most {MAX_BYTES}."
            )
        try:
            sentences = _parse_sentences(self.rfile.read(int(length)))
        except (ValueError, KeyError, TypeError, RecursionError) as error:  # deeply nested JSON raises RecursionError
            problem = f"The body is invalid ({type(error).__name__}: {error})."
            remedy = 'Send {"instances": ["a sentence", …]}.'
            raise RequestError(HTTPStatus.BAD_REQUEST, f"{problem} {remedy}") from None
        if not 0 < len(sentences) <= MAX_SENTENCES:
            raise RequestError(
                HTTPStatus.BAD_REQUEST, f"The body has {len(sentences)} sentences. Send 1 to {MAX_SENTENCES}."
            )
        return sentences

    def _describe_unknown_path(self) -> str:
        """Return the error message for an unknown path."""
        return f"There is no path {self.path[:100]}. Use {self.server.path} or {self.server.path}:predict."

    def _send_json(self, status: HTTPStatus, body: dict[str, Any]) -> None:
        """Send a response with a JSON body."""
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *values: Any) -> None:
        """Log a request. Omit probes, which would fill the log."""
        if self.command != "GET":
            logger.info("%s %r", self.address_string(), format % values)


class Server(ThreadingHTTPServer):
    """Answers each request in its own thread, but computes vectors for one request at a time."""

    daemon_threads = False  # the process waits for its threads, so that it answers all requests before it ends

    def __init__(self, address: tuple[str, int], name: str, embed: EmbedFunction) -> None:
        self.name = name
        self.path = f"/v1/models/{name}"
        self._embed = embed
        self._lock = threading.Lock()
        super().__init__(address, Handler)

    def embed(self, sentences: Sequence[str]) -> Tensor:
        """Wait until no other request is being computed. Return the sentences' vectors."""
        with self._lock:
            return self._embed(sentences)


def _parse_sentences(body: bytes) -> list[str]:
    """Return the sentences in a request body.

    Raises:
        ValueError, KeyError, TypeError, RecursionError: the body is not JSON or contains no list of valid sentences.
    """
    sentences = json.loads(body)["instances"]
    if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
        raise TypeError("instances is not a list of strings")
    "".join(sentences).encode()  # raises UnicodeEncodeError for an unpaired surrogate
    return sentences


def serve_embeddings(embed: EmbedFunction, name: str, host: str, port: int) -> None:
    """Answer HTTP requests for sentence vectors until SIGTERM or Ctrl-C. Then answer the requests that are waiting.

    Args:
        embed: function that computes the vectors of sentences.
        name: name of the model in the URL.
        host: address of this machine.
        port: port number; 0 selects any free port.

    Raises:
        InputError: the port is in use or not allowed, or the address is empty.
    """
    if not host:  # an empty address would mean all addresses
        raise InputError("--host is empty. Give an address of this machine, or 0.0.0.0 for all of them.")
    try:
        server = Server((host, port), name, embed)
    except OSError as error:
        raise InputError(
            f"The server cannot listen at {host}:{port} ({error}). Give another --port or --host."
        ) from None

    def shut_down(*_: object) -> None:
        # Use a separate thread, because `shutdown` waits for `serve_forever`, which this signal has interrupted.
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, shut_down)
    signal.signal(signal.SIGINT, shut_down)
    with server:
        logger.info("serving http://%s:%d%s:predict", host, server.server_port, server.path)
        server.serve_forever(poll_interval=0.1)  # seconds until `shutdown` takes effect; the default is 0.5
    logger.info("stopped after answering all requests")
