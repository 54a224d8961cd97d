"""The command `infoxlm gc`: delete unneeded items of a store."""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from infoxlm_core.errors import InputError
from infoxlm_core.progress import show_progress
from pipelines.cli.app import command, split_list


@command()
def gc(
    store: Annotated[str, typer.Argument(help="Directory or s3://bucket/prefix.")],
    older_than: Annotated[
        str, typer.Option(help="Age from which items may be deleted, in days (30d) or hours (12h).")
    ] = "30d",
    keep: Annotated[
        str,
        typer.Option(
            help="Aliases of the registered versions whose artifacts are kept, such as champion,candidate. Default: "
            "all registered versions."
        ),
    ] = "",
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the items. Without this option, the command only lists them.")
    ] = False,
) -> None:
    """List or delete unneeded items of a store: old artifacts, checkpoints, costs, and records of jobs and failures.

    The command keeps items that are younger than --older-than. It keeps the artifacts from which registered models were
    built, including corpus and shards. It also keeps all items to which a kept item refers, such as the shards of a
    training run that still saves checkpoints. It never deletes registered models, because they are in MLflow.

    Use an MLflow account that can read all models. The command does not keep the artifacts of models that the account
    cannot read. A later run creates deleted artifacts again. On Kubeflow, submit this run with `--no-cache`, because
    the cache may refer to the deleted artifacts.
    """
    minimum_age = _parse_age(older_than)
    from components.adapters.mlflow import connection, model_versions
    from components.platform import artifacts, garbage

    store = store.rstrip("/")
    local_store = artifacts.local_directory(store)
    aliases = split_list(keep)
    connection.connect_existing(local_store)
    protected_items = model_versions.find_source_artifacts(aliases)
    items = garbage.list_items(store)
    deletable = garbage.find_deletable(items, protected_items, minimum_age)
    for item in sorted(deletable, key=lambda item: item.size, reverse=True):
        days = (datetime.now(UTC) - item.modified).days
        typer.echo(f"{item.size / 1e6:12,.1f} MB  {days:5} days  {item.name}")
    # With the wrong MLflow server, no artifact would be protected, so show which server was asked.
    typer.echo(f"models: {connection.public_uri(local_store)}")
    size = sum(item.size for item in deletable) / 1e6
    total = f"{len(deletable)} of {len(items)} items in {store}, {size:,.1f} MB"
    if not delete:
        typer.echo(f"{total}, can be deleted: add --delete")
        return
    with show_progress("deleting", len(deletable), "items") as advance:
        for item in deletable:
            garbage.delete(store, item)
            advance(1)
    typer.echo(f"{total}, deleted")


def _parse_age(text: str) -> timedelta:
    """Parse an age in days or hours, such as 30d or 12h."""
    match = re.fullmatch(r"([1-9][0-9]{0,4})([dh])", text)
    if not match:
        raise InputError(f"--older-than {text} is not an age. Give days or hours, such as 30d or 12h.")
    number = int(match[1])
    return timedelta(days=number) if match[2] == "d" else timedelta(hours=number)
