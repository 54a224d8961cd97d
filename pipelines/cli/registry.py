"""Commands on the registry: promote and rollback."""

from typing import Annotated

import typer

from infoxlm_core.config import RegistrationConfig
from infoxlm_core.errors import ConfigError
from pipelines.cli.app import Store, app, report_errors


@app.command()
def promote(
    model: Annotated[str, typer.Argument(help="models:/NAME@ALIAS or models:/NAME/VERSION, such as @candidate.")],
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME or NAME=MARGIN: the confidence interval of the gain must lie above MARGIN; below 0 it is the "
            "loss that is tolerated. Repeatable: all must. Default: retrieval/best=0."
        ),
    ] = None,
    to: Annotated[
        str,
        typer.Option(help="Copy the model first: NAME, or URI/NAME of another server; then compare with its champion."),
    ] = "",
    by_hand: Annotated[str, typer.Option(help="Why it becomes champion whatever the gate says.")] = "",
    store: Store = "runs",
) -> None:
    """Make a registered model champion if it is better than the present one on the same questions.

    Better: a paired bootstrap interval of the gain lies above the margin. Who, when, why, from which data and code is
    written to the version and its run before the alias moves. Where INFOXLM_VERIFYING_KEY is set, it must be signed.

    Credentials of the other server of --to are those of MLflow with TARGET_ in front: TARGET_MLFLOW_TRACKING_TOKEN.
    """
    with report_errors():
        gate = read_gate(metric) if metric else RegistrationConfig().gates
        from components.adapters.mlflow import connection, promotion
        from components.platform import artifacts

        here = artifacts.local(store)
        connection.connect_existing(here)  # before the lock makes a folder of a mistyped store
        with artifacts.exclusive(store, *promotion.LOCK):
            promoted = promotion.promote_model(model, gate, here, to, by_hand)
        typer.echo(f"models:/{promoted.name}@champion is version {promoted.version}: {promoted.verdict.reason}")


@app.command()
def rollback(
    name: Annotated[str, typer.Argument(help="Of the registered model.")],
    reason: Annotated[str, typer.Option(help="Why; it is written to both versions.")],
    store: Store = "runs",
) -> None:
    """Make the version champion again that the present one replaced. Called again it changes nothing."""
    with report_errors():
        from components.adapters.mlflow import connection, promotion
        from components.platform import artifacts

        client = connection.connect_existing(artifacts.local(store))
        with artifacts.exclusive(store, *promotion.LOCK):
            number = promotion.roll_back(client, name, reason)
        typer.echo(f"models:/{name}@champion is version {number}")


def read_gate(metrics: list[str]) -> dict[str, float]:
    """Parse options NAME or NAME=MARGIN into metric -> least gain.

    Raises:
        ConfigError: a margin is not a number between -1 and 1.
    """
    gate = {}
    for option in metrics:
        name, _, margin = option.partition("=")
        try:
            gate[name] = float(margin or 0)
        except ValueError:
            raise ConfigError(f"--metric {option}: {margin!r} is no number: write retrieval/best=0.005") from None
        if not -1 < gate[name] < 1:
            raise ConfigError(f"--metric {option}: scores are shares from 0 to 1, and so are margins")
    return RegistrationConfig.parse({"gate": gate}, "--metric").gate
