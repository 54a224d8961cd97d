"""Command: translate."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from infoxlm_core.errors import InputError
from pipelines.cli.app import Store, command
from pipelines.cli.models import check_sentences, read_lines


@command()
def translate(
    model: Annotated[
        str, typer.Argument(help="Directory of a translator, models:/NAME@ALIAS or models:/NAME/VERSION.")
    ],
    sentences: Annotated[
        list[str] | None, typer.Argument(help="Sentences. Default: the lines of standard input.")
    ] = None,
    to: Annotated[
        str, typer.Option(help="Language of the translations. It must be one of the two languages of the model.")
    ] = ...,  # type: ignore[assignment]
    file: Annotated[Path | None, typer.Option(help="Translate the lines of this file.")] = None,
    store: Store = "runs",
) -> None:
    """Translate sentences with a translator that `infoxlm run` trained, one per line.

    infoxlm translate models:/translator@champion --to fr "Save changes"
    """
    from components.adapters.mlflow import model_registry
    from components.platform import artifacts
    from infoxlm_core.systems.translation.decoding import TextTranslator

    if file and sentences:
        raise InputError("give sentences or --file, not both")
    if file:
        with file.open("rb") as stream:
            texts = read_lines(stream, str(file))
    else:
        texts = sentences or read_lines(sys.stdin.buffer)
    check_sentences(texts)
    directory = model_registry.load_encoder(model, artifacts.local_directory(store))
    for translation in TextTranslator.load(directory).translate(texts, to):
        typer.echo(translation)
