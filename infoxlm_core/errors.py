"""Every way in which a run may refuse or stop, with its exit code.

The message of an error is one line: where (file, line, field), what was found, what to do about it.
"""

import re

LONGEST = 1500
"""Characters of a message; it may quote what was found, which may be a megabyte."""


class InfoXLMError(Exception):
    """Base of all errors that we raise on purpose."""

    exit_code = 70

    def __str__(self) -> str:
        """The message, in one line whatever it quotes; of one that is too long, where it was is left at its begin, and
        the remedy at its end."""
        said = "\\n".join(super().__str__().splitlines())
        return said if len(said) <= LONGEST else f"{said[: LONGEST - 500]} […] {said[-400:]}"


def from_name(name: str, message: str) -> InfoXLMError:
    """The error that another process has written down: of that class if it is one of ours, else of the base class."""
    kind = globals().get(name)
    return (kind if isinstance(kind, type) and issubclass(kind, InfoXLMError) else InfoXLMError)(message)


def one_line(error: BaseException) -> str:
    """What an error of a library says, in one line that holds no password."""
    return " ".join(without_password(str(error)).split())[:200] or type(error).__name__


def without_password(text: str) -> str:
    """A text whose addresses name no user and password; a tracking URI may."""
    return re.sub(r"//[^/@\s]*@", "//", text)


class InputError(InfoXLMError):
    """Something that was given to us cannot be used."""

    exit_code = 2


class ConfigError(InputError):
    """A config has an unknown name, a wrong type or a value out of range."""


class ConfigMismatch(InputError):
    """A run cannot be resumed with other settings, data or code than it began with."""


class EncodingError(InputError):
    """A file is not UTF-8."""


class ParallelMismatch(InputError):
    """The two sides of parallel text do not have the same number of lines."""


class CorpusTooSmall(InputError):
    """There is less text than the run needs."""


class TokenizerMismatch(InputError):
    """Shards, vocabulary and model do not belong together."""


class NotPromoted(InputError):
    """A model is not shown to be good enough to become champion."""


class DataCorrupt(InfoXLMError):
    """A file of ours is not what we wrote."""

    exit_code = 3


class EvaluationLeak(InfoXLMError):
    """A sentence kept for evaluation is in the training text."""

    exit_code = 3


class SignatureInvalid(InfoXLMError):
    """A model is not signed, or not with the key that it must be, or not as it is now."""

    exit_code = 3


class RankDesync(InfoXLMError):
    """Workers of one training do not hold the same weights or queue."""

    exit_code = 3


class NoValidCheckpoint(InfoXLMError):
    """A run has saved before, but none of its checkpoints can be trusted."""

    exit_code = 4


class TrainingDiverged(InfoXLMError):
    """Too many steps in a row had a loss or gradient that is not finite."""

    exit_code = 5


class TryAgain(InfoXLMError):
    """Nothing is wrong with the input: the same command continues the run."""

    exit_code = 75


class Preempted(TryAgain):
    """The process was asked to stop, saved a checkpoint and stopped."""


class LeaseHeld(TryAgain):
    """Another process is training this very run."""


class Fenced(TryAgain):
    """Another process has taken this run over: what this one would still write must not be kept."""


class WorkerLost(TryAgain):
    """A training worker died."""


class StorageFull(TryAgain):
    """The disk is full."""


class StorageUnavailable(TryAgain):
    """Storage or the package index does not answer."""


class ResourcesUnavailable(TryAgain):
    """The GPUs did not come in time, or the time that a job may hold them is over."""
