"""The `infoxlm` command: run the pipeline, its ablations, compile and submit them, promote, embed, evaluate, sweep."""

import os

from pipelines.cli import runs, evaluate, models, registry, store, cluster, settings  # noqa: F401  # isort: skip  # the order of --help
from pipelines.cli.app import app, interrupt_on_signals


def main() -> None:
    """Entry point; quiet where libraries talk too much."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    interrupt_on_signals()
    app()
