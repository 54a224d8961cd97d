"""The `infoxlm` command. Its subcommands are in the modules of this package."""

import os

from pipelines.cli import runs, adapt, evaluate, models  # noqa: F401  # isort: skip  # the order of --help
from pipelines.cli import mine, merge, export, registry, store, cluster, settings  # noqa: F401  # isort: skip  # the order of --help
from pipelines.cli.app import app, interrupt_on_signals


def main() -> None:
    """Run the command line."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads of tokenizers would deadlock in forked processes
    interrupt_on_signals()
    app()
