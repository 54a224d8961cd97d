"""The `infoxlm` command: run the pipeline, its ablations, compile and submit them, promote a model, embed, evaluate."""

import os

from pipelines.cli import cluster, evaluate, models, registry, runs  # noqa: F401  # their commands register themselves
from pipelines.cli.app import app


def main() -> None:
    """Entry point; quiet where libraries talk too much."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    app()
