"""The command `infoxlm merge`, which interpolates between a model and the start of its training."""

from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.app import Store, command


@command()
def merge(
    start: Annotated[
        str,
        typer.Argument(
            help="The model that the training started from: a directory, s3://…, a name on the hub, or models:/NAME."
        ),
    ],
    encoder: Annotated[str, typer.Argument(help="The trained model, in one of the same forms.")],
    weight: Annotated[float, typer.Option(min=0.0, max=1.0, help="0: the start · 1: the trained model.")],
    output: Annotated[Path, typer.Option(help="Directory to create, in Hugging Face format.")],
    store: Store = "runs",
) -> None:
    """Write the model START + WEIGHT * (ENCODER - START), which keeps part of what the start knew.

    Both models must have the same type, tokenizer and shapes. The directory is a complete model: config, tokenizer,
    reference vectors and a manifest with the weight.
    """
    from components.platform import artifacts, sources
    from infoxlm_core.stages import merging

    local_store = artifacts.local_directory(store)
    start_directory = sources.fetch_model(start, local_store)
    encoder_directory = sources.fetch_model(encoder, local_store)
    merging.merge(start_directory, encoder_directory, weight, output)
    typer.echo(f"wrote {output}: {start} + {weight:g} * ({encoder} - {start})")
