"""The command on a store: gc."""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from infoxlm_core.errors import InputError
from infoxlm_core.progress import progress
from pipelines.cli.app import app, report_errors, split_list


@app.command()
def gc(
    store: Annotated[str, typer.Argument(help="Directory or s3://bucket/prefix.")],
    older_than: Annotated[str, typer.Option(help="Age of what may go, in days (30d) or hours (12h).")] = "30d",
    keep: Annotated[
        str,
        typer.Option(
            help="Aliases of registered versions, such as champion,candidate: what these were made of stays. Default: "
            "what any registered version was made of."
        ),
    ] = "",
    delete: Annotated[bool, typer.Option("--delete", help="Delete it; without this it is only shown.")] = False,
) -> None:
    """Show, or delete, what nobody needs any more: old artifacts, checkpoints, costs, and notes on jobs and failures.

    These items stay: items younger than --older-than; the artifacts from which registered models were made, corpus and
    shards included; and all that one of these names by its digest, such as the shards of a training that still saves
    checkpoints. The registered models themselves are in MLflow and stay. MLflow shows an account only the models that
    the account may read: use an account that reads all. A later run makes deleted artifacts again; on Kubeflow, whose
    cache may still name them, submit it with `--no-cache`.
    """
    with report_errors():
        age = _age(older_than)
        from components.adapters.mlflow import connection, model_versions
        from components.platform import artifacts, garbage

        store = store.rstrip("/")
        here = artifacts.local(store)
        aliases = split_list(keep)
        connection.connect_existing(here)
        needed = model_versions.made_of(aliases)
        items = garbage.survey(store)
        superfluous = garbage.superfluous(items, needed, age)
        for item in sorted(superfluous, key=lambda item: item.size, reverse=True):
            days = (datetime.now(UTC) - item.modified).days
            typer.echo(f"{item.size / 1e6:12,.1f} MB  {days:5} days  {item.name}")
        typer.echo(f"models: {connection.public_uri(here)}")
        size = sum(item.size for item in superfluous) / 1e6
        total = f"{len(superfluous)} of {len(items)} items in {store}, {size:,.1f} MB"
        if not delete:
            typer.echo(f"{total}, may go: --delete deletes them")
            return
        with progress("deleting", len(superfluous), "items") as advance:
            for item in superfluous:
                garbage.delete(store, item)
                advance(1)
        typer.echo(f"{total}, deleted")


def _age(text: str) -> timedelta:
    match = re.fullmatch(r"([1-9][0-9]{0,4})([dh])", text)
    if not match:
        raise InputError(f"--older-than {text}: give days or hours, such as 30d or 12h")
    number = int(match[1])
    return timedelta(days=number) if match[2] == "d" else timedelta(hours=number)
