"""Errors that users see, with their exit codes.

An error message is one line: the location of the problem (file, line, field), the value, and the remedy.
"""

import re

MAX_MESSAGE_LENGTH = 1500  # characters; a message may quote a value of any length
MAX_REASON_LENGTH = 300  # characters of a library's message inside one of our messages


class InfoXLMError(Exception):
    """Base class of all errors that are raised on purpose."""

    exit_code = 70

    def __str__(self) -> str:
        """Return the message as one line. Long messages keep their start (the location) and their end (the remedy)."""
        message = "\\n".join(super().__str__().splitlines())
        if len(message) <= MAX_MESSAGE_LENGTH:
            return message
        start = message[: MAX_MESSAGE_LENGTH - 500]
        end = message[-400:]  # with the ellipsis, still shorter than the limit
        return f"{start} […] {end}"


def from_name(name: str, message: str) -> InfoXLMError:
    """Rebuild an error that another process reported. An unknown class name becomes an `InfoXLMError`."""
    error_class = globals().get(name)
    if isinstance(error_class, type) and issubclass(error_class, InfoXLMError):
        return error_class(message)
    return InfoXLMError(message)


def one_line(error: BaseException) -> str:
    """Describe a library's error and its root cause in one line without passwords."""
    cause = last_cause(error)
    message = shorten(_describe(error))
    reason = shorten(_describe(cause))
    return message if reason in message else f"{message}, caused by {type(cause).__name__}: {reason}"


def last_cause(error: BaseException) -> BaseException:
    """Return the root cause of an error, or the error itself if it has no cause."""
    visited: list[BaseException] = []  # detects circular chains of causes
    cause: BaseException | None = error
    while cause is not None and cause not in visited:
        visited.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return visited[-1]


def _describe(error: BaseException) -> str:
    """Return an error's message, followed by the body of its HTTP response if it has one."""
    message = str(error) or type(error).__name__
    body = getattr(getattr(error, "response", None), "text", "")
    if isinstance(body, str) and body and body not in message:
        message = f"{message}: {body}"
    return without_password(message)


def shorten(text: str) -> str:
    """Join a text's lines, and cut out the middle if the result is longer than `MAX_REASON_LENGTH` characters.

    The end is kept, because libraries write the cause of a failure there.
    """
    line = " ".join(text.split())
    if len(line) <= MAX_REASON_LENGTH:
        return line
    ellipsis = " […] "
    start_length = MAX_REASON_LENGTH // 3
    end_length = 2 * MAX_REASON_LENGTH // 3 - len(ellipsis)
    return f"{line[:start_length]}{ellipsis}{line[-end_length:]}"


def without_password(text: str) -> str:
    """Remove user names and passwords from the URLs in a text."""
    return re.sub(r"//[^/@\s]*@", "//", text)


class InputError(InfoXLMError):
    """An input cannot be used."""

    exit_code = 2


class ConfigError(InputError):
    """A config has an unknown field, a wrong type or a value out of range."""


class ConfigMismatch(InputError):
    """A run cannot be resumed with other settings, data or code than it started with."""


class EncodingError(InputError):
    """A file is not UTF-8."""


class ParallelMismatch(InputError):
    """The two sides of parallel text are not translations of each other, line by line."""


class CorpusTooSmall(InputError):
    """There is less text than the run needs."""


class TokenizerMismatch(InputError):
    """Shards, vocabulary and model do not belong together."""


class OutOfMemory(InputError):
    """A worker needs more memory than its pod or its machine has."""


class NotPromoted(InputError):
    """The evaluation does not show that a model is good enough to become champion."""


class DataCorrupt(InfoXLMError):
    """A file that the pipeline wrote has changed."""

    exit_code = 3


class EvaluationLeak(InfoXLMError):
    """The training text contains a sentence reserved for evaluation."""

    exit_code = 3


class SignatureInvalid(InfoXLMError):
    """A model is not signed, is signed with another key, or has changed since."""

    exit_code = 3


class RankDesync(InfoXLMError):
    """The workers of a training run hold different weights or queues."""

    exit_code = 3


class NoValidCheckpoint(InfoXLMError):
    """A run has saved checkpoints, but none of them is valid."""

    exit_code = 4


class TrainingDiverged(InfoXLMError):
    """Too many steps in a row had a loss or gradient that is not finite or far above normal."""

    exit_code = 5


class Cancelled(InfoXLMError):
    """A user has cancelled the run."""

    exit_code = 6


class TryAgain(InfoXLMError):
    """A temporary failure: the same command continues the run."""

    exit_code = 75


class Preempted(TryAgain):
    """The process received a signal to stop, saved a checkpoint and stopped."""


class LeaseHeld(TryAgain):
    """Another process is training the same run."""


class Fenced(TryAgain):
    """Another process has taken over the run, so this process must not write any more."""


class WorkerLost(TryAgain):
    """A training worker died."""


class StorageFull(TryAgain):
    """The disk is full."""


class StorageUnavailable(TryAgain):
    """A server does not answer, or fails with a status that may be temporary."""


class ResourcesUnavailable(TryAgain):
    """The GPUs did not become available in time, or the job reached its time limit."""
