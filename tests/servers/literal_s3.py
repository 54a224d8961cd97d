"""An S3 server that keeps double slashes in keys, such as `a//b`, as AWS does. SeaweedFS removes them."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.servers.processes import answering


@contextmanager
def serving(objects: dict[str, bytes]) -> Iterator[str]:
    """Serve objects by their keys, for reading only and under any bucket name. Yield the URL of the server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            key = unquote(url.path[1:].partition("/")[2])
            if key:
                self._answer(200 if key in objects else 404, objects.get(key, b""))
                return
            prefix = parse_qs(url.query)["prefix"][0]
            listed = "".join(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(content)}</Size><ETag>e</ETag>"
                "<LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
                for key, content in sorted(objects.items())
                if key.startswith(prefix)
            )
            self._answer(200, f"<ListBucketResult>{listed}</ListBucketResult>".encode())

        do_HEAD = do_GET

        def _answer(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

    with answering(Handler) as url:
        yield url
