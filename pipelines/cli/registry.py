"""Commands that change the model registry: promote and rollback."""

from typing import Annotated

import typer

from infoxlm_core.config import RegistrationConfig
from infoxlm_core.errors import ConfigError
from pipelines.cli.app import Store, command


@command()
def promote(
    model: Annotated[str, typer.Argument(help="models:/NAME@ALIAS or models:/NAME/VERSION, such as @candidate.")],
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME or NAME=MARGIN: the confidence interval of the gain must lie above MARGIN; a negative MARGIN "
            "tolerates a loss. Repeatable: all must pass. Default: retrieval/served=0."
        ),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            help="Copy the model to NAME, or to URI/NAME on another server, and compare it with the champion there."
        ),
    ] = "",
    by_hand: Annotated[
        str, typer.Option(help="Promote without a comparison, and record this text as the reason.")
    ] = "",
    store: Store = "runs",
) -> None:
    """Promote a registered model to champion if it is better than the current champion on the same test items.

    The model is better if the confidence interval of its gain, from a paired bootstrap, lies above the margin. The
    registered version and its run record who promoted the model, when and why. If INFOXLM_VERIFYING_KEY is set, the
    model must be signed.

    For a server in --to, set MLflow's variables with the prefix TARGET_, such as TARGET_MLFLOW_TRACKING_TOKEN.
    """
    gate = parse_gate(metric) if metric else RegistrationConfig().gates
    from components.adapters.mlflow import connection, promotion
    from components.platform import artifacts

    local_store = artifacts.local_directory(store)
    # Connect first, because taking the lock would create a store at a mistyped path.
    connection.connect_existing(local_store)
    with artifacts.exclusive(store, *promotion.LOCK):
        promoted = promotion.promote_model(model, gate, local_store, target=to, manual_reason=by_hand)
    typer.echo(f"models:/{promoted.name}@champion is version {promoted.version}: {promoted.verdict.reason}")


@command()
def rollback(
    name: Annotated[str, typer.Argument(help="Name of the registered model.")],
    reason: Annotated[str, typer.Option(help="Reason for the rollback. It is recorded in both versions.")],
    store: Store = "runs",
) -> None:
    """Make the previous champion the champion again. Repeating the command changes nothing."""
    from components.adapters.mlflow import connection, promotion
    from components.platform import artifacts

    # Connect first, because taking the lock would create a store at a mistyped path.
    client = connection.connect_existing(artifacts.local_directory(store))
    with artifacts.exclusive(store, *promotion.LOCK):
        version = promotion.roll_back(client, name, reason)
    typer.echo(f"models:/{name}@champion is version {version}")


def parse_gate(options: list[str]) -> dict[str, float]:
    """Parse the options --metric. Return a mapping from metric to required gain.

    Args:
        options: list of NAME or NAME=MARGIN; the default margin is 0.

    Raises:
        ConfigError: a margin is not a number between -1 and 1.
    """
    gate = {}
    for option in options:
        name, _, margin = option.partition("=")
        try:
            gate[name] = float(margin or 0)
        except ValueError:
            raise ConfigError(
                f"--metric {option}: {margin!r} is not a number. Write, for example, retrieval/served=0.005."
            ) from None
    return RegistrationConfig.parse({"gate": gate}, "--metric").gate  # raises ConfigError for a margin out of range
