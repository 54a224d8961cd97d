"""Component: promote a registered model to champion if it is significantly better."""

from typing import Any

from kfp import dsl

from components.platform.stage import stage


@stage
def promote(
    model: str,
    gate: dict[str, Any],
    store: str,
    metrics: dsl.Output[dsl.Metrics],
    to: str = "",
    by_hand: str = "",
    image: str = "",
) -> None:
    """Promote a registered model to champion if it beats the champion on the same test items, else raise NotPromoted.

    Args:
        model: models:/NAME@ALIAS or models:/NAME/VERSION.
        gate: required gain over the champion by metric. The confidence interval of the gain must lie above this value.
        store: directory of the local registry if MLFLOW_TRACKING_URI is not set.
        metrics: the version, and the gain of each gate metric with its confidence interval.
        to: name of a target model on the same server. The version is copied there and compared with its champion.
        by_hand: reason for promoting without the gate.
        image: container image of this step, for the promotion record.
    """
    import os

    from components.adapters.mlflow import promotion
    from components.platform import artifacts
    from components.platform.stage_run import stage_run

    with stage_run("promote", store, tracker="mlflow", ends_run_on_failure=True) as step:  # the registry is MLflow's
        os.environ["INFOXLM_IMAGE"] = image  # the record of a promotion names the image that decided
        step.report(promotion={"model": model, "gate": gate, "to": to, "by_hand": by_hand})
        with artifacts.exclusive(store, *promotion.LOCK):  # no other process may change the champion meanwhile
            promoted = promotion.promote_model(model, gate, step.local_store, target=to, manual_reason=by_hand)
        gains = {}
        for metric, measurement in promoted.verdict.figures.items():
            for field in ("gain", "lower", "upper"):  # the gain and its confidence bounds
                gains[f"{metric}/{field}"] = measurement[field]
        artifacts.log_metrics({"version": promoted.version} | gains, metrics)
        step.report(gains)
        step.summarise(f"models:/{promoted.name}@champion is version {promoted.version}: {promoted.verdict.reason}")
        step.run.end()  # this is the only step of its pipeline
