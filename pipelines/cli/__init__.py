"""The `infoxlm` command: run the pipeline, its ablations, compile them, embed sentences, evaluate any encoder."""

import os

from pipelines.cli import evaluate, models, runs  # noqa: F401  # their commands register themselves
from pipelines.cli.app import app


def main() -> None:
    """Entry point; quiet where libraries talk too much."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    app()
