"""What all commands of `infoxlm` share: the application, its clear endings, the option `--store`."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from infoxlm_core import outside
from infoxlm_core.errors import InfoXLMError, InputError, Preempted

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help=(
        "From text in many languages to an evaluated, registered cross-lingual encoder (InfoXLM).\n\n"
        "Start with `infoxlm run demo`, then look at the report it names, then try\n"
        '`infoxlm embed models:/infoxlm@champion "Save changes" "Enregistrer les modifications"`.\n\n'
        "Exit codes: 0 done · 2 input or config refused · 3 our own data is damaged · 4 no valid checkpoint ·\n"
        "5 training diverged · 70 internal error · 75 try again, the run goes on where it was."
    ),
)
Store = Annotated[
    str,
    typer.Option(
        help="Directory for artifacts, checkpoints and, without MLFLOW_TRACKING_URI, MLflow's database; or "
        "s3://bucket/prefix."
    ),
]
_PACKAGED, _CHECKOUT = (Path(__file__).parents[level] / "configs" for level in (1, 2))
CONFIGS = _PACKAGED if _PACKAGED.is_dir() else _CHECKOUT
"""The YAML files that come with the package: `pipelines/configs` of a wheel, `configs` of a checkout."""


def config_file(given: str | Path) -> Path:
    """Return the path of a YAML file: the user's, or one of the package by its bare name, such as `demo`.

    The path may not exist: whoever reads the file reports that, for all commands alike.
    """
    path = Path(given)
    packaged = CONFIGS / f"{path}.yaml"
    try:
        return packaged if len(path.parts) == 1 and not path.exists() and packaged.is_file() else path
    except OSError:  # no file can have such a name, which the reader of the file reports
        return path


RunFile = Annotated[
    Path,
    typer.Argument(help="YAML file of the run, or demo, base, large, base15.", parser=config_file, metavar="FILE"),
]
Variants = Annotated[
    Path,
    typer.Option(help="YAML file: name -> overrides of the section pretraining.", parser=config_file, metavar="FILE"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a value: pretraining.optimization.steps=100. Repeatable."),
]


def split_list(text: str) -> list[str]:
    """Return the names in a text that are separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def interrupt_on_signals() -> None:
    """Let SIGTERM and SIGHUP do what Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # under `nohup`, a closed terminal ends nothing
            signal.signal(number, interrupt)


@contextmanager
def report_errors() -> Iterator[None]:
    """Turn an exception into one line and its exit code; print the traceback only of an unexpected one."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("botocore").setLevel(logging.WARNING)
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        failure: InfoXLMError = Preempted("interrupted: run the same command again to continue")
    except BaseException as error:
        if not isinstance(error, Exception) and not outside.is_panic(error):
            raise
        failure = _as_ours(error)
    else:
        return
    typer.echo(f"infoxlm: {type(failure).__name__}: {' '.join(str(failure).split())}", err=True)
    raise typer.Exit(failure.exit_code)


def _as_ours(error: BaseException) -> InfoXLMError:
    """Return an error of this project for any error; log the traceback of an unexpected one."""
    if isinstance(error, InfoXLMError):
        return error
    if translated := outside.translate_error(error):
        return translated
    if isinstance(error, OSError):
        return InputError(f"{error}: give another path")
    logging.error("internal error", exc_info=error)
    return InfoXLMError(f"{type(error).__name__}: {error}: please report this")
