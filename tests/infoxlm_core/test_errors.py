"""Messages of libraries in ours: one line, with the last cause of a failure, and without passwords."""

import http.server
import threading

import pytest
import requests

from infoxlm_core.errors import MAX_REASON_LENGTH, one_line, shorten


def raise_in_a_chain(explicit: bool) -> None:
    """Raise an error that another one caused, as libraries do with and without `from`."""
    try:
        raise ConnectionRefusedError(111, "Connection refused")
    except ConnectionRefusedError as error:
        if explicit:
            raise RuntimeError("cannot upload to http://ada:word@s3.example") from error
        raise RuntimeError("cannot upload to http://ada:word@s3.example")  # noqa: B904 - that is what is tested


@pytest.mark.parametrize("explicit", [True, False])
def test_the_last_cause_of_a_chain_is_part_of_the_message_and_a_password_is_not(explicit):
    with pytest.raises(RuntimeError) as raised:
        raise_in_a_chain(explicit)

    assert one_line(raised.value) == (
        "cannot upload to http://s3.example, caused by ConnectionRefusedError: [Errno 111] Connection refused"
    )


def test_a_cause_that_the_message_contains_or_that_was_suppressed_is_not_repeated():
    contained, suppressed = RuntimeError("no answer: Connection refused"), RuntimeError("no such model")
    contained.__cause__ = ConnectionRefusedError("Connection refused")
    suppressed.__context__, suppressed.__suppress_context__ = KeyError("config"), True

    assert one_line(contained) == "no answer: Connection refused"
    assert one_line(suppressed) == "no such model"
    assert one_line(MemoryError()) == "MemoryError"


def test_a_long_message_keeps_its_start_and_its_end():
    text = shorten("API request failed\n" + "x " * 1000 + "\ncaused by: too many 500 error responses")

    assert text.startswith("API request failed x x") and text.endswith("caused by: too many 500 error responses")
    assert " […] " in text and "\n" not in text and len(text) <= MAX_REASON_LENGTH


def test_the_status_and_the_body_of_an_http_answer_are_part_of_the_message():
    class Fails(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(500)
            self.end_headers()
            self.wfile.write(b'{"message": "character with byte sequence 0xe2 has no equivalent"}')

        def log_message(self, *_): ...

    with http.server.HTTPServer(("127.0.0.1", 0), Fails) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(requests.HTTPError) as raised:
            requests.get(f"http://127.0.0.1:{server.server_port}", timeout=10).raise_for_status()

    message = one_line(raised.value)
    assert message.startswith("500 Server Error") and "0xe2 has no equivalent" in message
