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
    """A YAML file: of the user's, or one that comes with the package by its bare name, such as `demo`.

    Its existence is checked where it is read, so that all commands refuse a missing one alike.
    """
    path = Path(given)
    packaged = CONFIGS / f"{path}.yaml"
    try:
        return packaged if len(path.parts) == 1 and not path.exists() and packaged.is_file() else path
    except OSError:  # no name that a file may have, which whoever reads it says
        return path


def interrupt_on_signals() -> None:
    """Let every signal that asks to end do what Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` makes SIGHUP, of a closed terminal, mean nothing
            signal.signal(number, interrupt)


@contextmanager
def ending_clearly() -> Iterator[None]:
    """One line and a documented exit code instead of a traceback, for errors of ours."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("botocore").setLevel(logging.WARNING)
    try:
        yield
    except InfoXLMError as error:
        typer.echo(f"infoxlm: {type(error).__name__}: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(error.exit_code) from None
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        typer.echo("infoxlm: Preempted: interrupted: run the same command again to go on", err=True)
        raise typer.Exit(Preempted.exit_code) from None
    except BaseException as error:
        if not isinstance(error, Exception) and not outside.is_panic(error):
            raise
        said = outside.translate_error(error)
        if not said and isinstance(error, OSError):
            said = InputError(f"{error}: give another path")
        if said:
            typer.echo(f"infoxlm: {type(said).__name__}: {said}", err=True)
            raise typer.Exit(said.exit_code) from None
        logging.exception("internal error")
        typer.echo(f"infoxlm: {type(error).__name__}: {' '.join(str(error).split())}: please report this", err=True)
        raise typer.Exit(InfoXLMError.exit_code) from None
