"""Code shared by all `infoxlm` commands: the application, common options, and error reporting with exit codes.

Commands check their settings before they import torch, kfp or MLflow, because each import takes a second or more.
"""

import functools
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from infoxlm_core import user_files
from infoxlm_core.errors import InfoXLMError, InputError, Preempted

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # `report_errors` reports all errors
    help=(
        "Train, evaluate, register and serve InfoXLM, a cross-lingual text encoder.\n\n"
        "Start with `infoxlm run demo`. Open the report whose path the command prints. Then compare two sentences:\n\n"
        '`infoxlm embed models:/infoxlm@champion "Save changes" "Enregistrer les modifications"`\n\n'
        "Exit codes: 0 success · 2 invalid input or setting · 3 damaged data · 4 no valid checkpoint · "
        "5 training diverged · 6 run cancelled · 70 internal error · "
        "75 temporary failure; run the same command again to resume."
    ),
)


class _ReportingCommand(TyperCommand):
    """A command that reports an error in one line and exits with the error's code."""

    def invoke(self, ctx: Any) -> Any:
        with report_errors():
            return super().invoke(ctx)


command = functools.partial(app.command, cls=_ReportingCommand)
"""Decorator that makes a function an `infoxlm` command."""
Store = Annotated[
    str,
    typer.Option(
        help="Directory or s3://bucket/prefix for artifacts and checkpoints. It also contains the MLflow database, "
        "unless MLFLOW_TRACKING_URI names a server."
    ),
]
_PACKAGED_CONFIGS = Path(__file__).parents[1] / "configs"
_CHECKOUT_CONFIGS = Path(__file__).parents[2] / "configs"
CONFIGS = _PACKAGED_CONFIGS if _PACKAGED_CONFIGS.is_dir() else _CHECKOUT_CONFIGS
"""Directory of the packaged YAML files: `pipelines/configs` in a wheel, `configs` in a checkout."""


def find_config(argument: str | Path) -> Path:
    """Return the path of a YAML file, or of a packaged file for a bare name such as `demo`.

    A directory of the same name, such as the store of an earlier run, does not hide the packaged file. The path may be
    missing or invalid. The command reports such an error when it reads the file.
    """
    path = Path(argument)
    packaged_file = CONFIGS / f"{path}.yaml"
    is_bare_name = len(path.parts) == 1
    with suppress(OSError):  # the file system rejects the name, for example because it is too long
        if is_bare_name and not path.is_file() and packaged_file.is_file():
            return packaged_file
    return path


RunFile = Annotated[
    Path,
    typer.Argument(
        help="YAML file of the run, or the name of a packaged file: demo, base, large or base15.",
        parser=find_config,
        metavar="FILE",
    ),
]
Variants = Annotated[
    Path,
    typer.Option(
        help="YAML file that maps the name of each variant to its overrides of `pretraining`.",
        parser=find_config,
        metavar="FILE",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a setting, such as pretraining.optimization.steps=100. Repeatable."),
]


def split_list(text: str) -> list[str]:
    """Split a comma-separated list, and drop empty elements."""
    elements = [element.strip() for element in text.split(",")]
    return [element for element in elements if element]


def interrupt_on_signals() -> None:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt, like Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # under `nohup`, keep ignoring SIGHUP
            signal.signal(number, interrupt)


@contextmanager
def report_errors() -> Iterator[None]:
    """Configure logging. Print an exception in the block as one line, and exit with its code.

    Unexpected exceptions are logged with a traceback.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("botocore").setLevel(logging.WARNING)  # at INFO, it logs where it found the S3 keys
    try:
        yield
    except typer.Exit:  # the command has chosen its exit code
        raise
    except KeyboardInterrupt:  # also raised by SIGTERM, so the exit code asks schedulers to run the command again
        _exit_with_error(Preempted("The command was interrupted. Run it again to continue."))
    except BaseException as error:
        # A panic in a Rust library, such as tokenizers, is a BaseException, but not an Exception.
        if not isinstance(error, Exception) and not user_files.is_panic(error):
            raise
        _exit_with_error(_to_infoxlm_error(error))


def _exit_with_error(error: InfoXLMError) -> NoReturn:
    """Print an error as one line, and exit with its code."""
    message = " ".join(str(error).split())
    typer.echo(f"infoxlm: {type(error).__name__}: {message}", err=True)
    raise typer.Exit(error.exit_code) from None


def _to_infoxlm_error(error: BaseException) -> InfoXLMError:
    """Convert any exception to an `InfoXLMError`. Log the traceback of an unexpected exception."""
    if isinstance(error, InfoXLMError):
        return error
    translated = user_files.translate_error(error)
    if translated:
        return translated
    if isinstance(error, OSError):  # its message contains the path
        return InputError(f"{error}. Give another path.")
    logging.error("internal error", exc_info=error)
    return InfoXLMError(f"{type(error).__name__}: {error}. Please report this error.")
