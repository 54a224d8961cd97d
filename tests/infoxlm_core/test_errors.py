"""Messages of libraries in ours: one line, with the last cause of a failure, and without passwords."""

import pytest
import requests

from infoxlm_core.errors import MAX_REASON_LENGTH, one_line, shorten


def raise_chained(explicit: bool) -> None:
    """Raise an error that another one caused, as libraries do with and without `from`."""
    try:
        raise ConnectionRefusedError(111, "Connection refused")
    except ConnectionRefusedError as error:
        if explicit:
            raise RuntimeError("cannot upload to http://ada:word@s3.example") from error
        raise RuntimeError("cannot upload to http://ada:word@s3.example")  # noqa: B904 - that is what is tested


@pytest.mark.parametrize("explicit", [True, False])
def test_message_contains_the_last_cause_but_no_password(explicit):
    with pytest.raises(RuntimeError) as raised:
        raise_chained(explicit)

    assert one_line(raised.value) == (
        "cannot upload to http://s3.example, caused by ConnectionRefusedError: [Errno 111] Connection refused"
    )


def test_repeated_or_suppressed_cause_is_left_out():
    contains_cause = RuntimeError("no answer: Connection refused")
    contains_cause.__cause__ = ConnectionRefusedError("Connection refused")
    suppresses_cause = RuntimeError("no such model")
    suppresses_cause.__context__ = KeyError("config")
    suppresses_cause.__suppress_context__ = True

    assert one_line(contains_cause) == "no answer: Connection refused"
    assert one_line(suppresses_cause) == "no such model"
    assert one_line(MemoryError()) == "MemoryError"


def test_long_message_keeps_its_start_and_end():
    text = shorten("API request failed\n" + "x " * 1000 + "\ncaused by: too many 500 error responses")

    assert text.startswith("API request failed x x")
    assert text.endswith("caused by: too many 500 error responses")
    assert " […] " in text and "\n" not in text
    assert len(text) <= MAX_REASON_LENGTH


def test_message_contains_status_and_body_of_an_http_response():
    response = requests.Response()
    response.status_code = 500
    response._content = b'{"message": "character with byte sequence 0xe2 has no equivalent"}'

    with pytest.raises(requests.HTTPError) as raised:
        response.raise_for_status()

    message = one_line(raised.value)
    assert message.startswith("500 Server Error") and "0xe2 has no equivalent" in message
