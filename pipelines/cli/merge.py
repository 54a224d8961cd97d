"""The command `infoxlm merge`: interpolate between a model and its start model."""

from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.app import Store, command


@command()
def merge(
    start: Annotated[
        str,
        typer.Argument(help="Model from which the training started: a directory, s3://…, a hub name, or models:/NAME."),
    ],
    encoder: Annotated[str, typer.Argument(help="Trained model, in the same forms.")],
    weight: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Weight of the trained model. 0 writes START, and 1 writes ENCODER.")
    ],
    output: Annotated[Path, typer.Option(help="Directory to create, in Hugging Face format.")],
    store: Store = "runs",
) -> None:
    """Write the weighted average of a model and its start model: START + WEIGHT * (ENCODER - START).

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
