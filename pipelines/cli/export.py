"""The command `infoxlm export`: write an encoder in formats of other libraries."""

from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.app import Store, command, split_list


@command()
def export(
    model: Annotated[
        str,
        typer.Argument(help="Directory in Hugging Face format, models:/NAME@ALIAS, models:/NAME/VERSION or ORG/NAME."),
    ],
    output: Annotated[Path, typer.Option(help="Directory to create.")],
    to: Annotated[
        str, typer.Option(help="Comma-separated formats: sentence-transformers, onnx, onnx-int8.")
    ] = "sentence-transformers",
    languages: Annotated[
        str,
        typer.Option(
            help="Languages to measure. Without --text, vocabulary pieces in scripts of other languages are removed."
        ),
    ] = "",
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text file with one sentence per line. Vocabulary pieces that do not occur in it are removed. "
            "Repeatable."
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Directory of aligned sentences on which the retrieval loss is measured.")
    ] = None,
    pivot: Annotated[str, typer.Option(help="Language with which all other languages of --data are aligned.")] = "en",
    store: Store = "runs",
) -> None:
    """Export an encoder for sentence-transformers, text-embeddings-inference and ONNX Runtime.

    The command writes a directory that contains only the layers needed for the sentence vector. Its README.md describes
    how to load each format, and compares the formats in size, speed and retrieval loss.
    """
    from components.platform import artifacts, sources
    from infoxlm_core.stages import export as stage

    settings = stage.ExportSettings(split_list(to), split_list(languages), tuple(text or ()), data, pivot)
    stage.check_settings(settings, output)  # before the model is downloaded
    source = sources.fetch_model(model, artifacts.local_directory(store))
    measurements = stage.export(source, model, settings, output)
    original = measurements[0]  # the model before the export
    for measured in measurements:
        loss = ""
        if measured.retrieval is not None and original.retrieval is not None:
            loss = f", retrieval {measured.retrieval:.2%} ({measured.retrieval - original.retrieval:+.2%})"
        typer.echo(
            f"{measured.format:22} {measured.megabytes:8.1f} MB, {measured.sentences_per_second:.0f} sentences/s, "
            f"lowest cosine {measured.cosine:.6f}{loss}"
        )
    typer.echo(f"wrote {output}: see {output / 'README.md'}")
