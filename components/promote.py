"""Component: a registered model -> champion, if it is shown to be better than the present one."""

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
    """Compare a registered model with the champion on the same questions; move the alias if it is better.

    The step fails with NotPromoted if it is not.

    Args:
        model: models:/NAME@ALIAS or models:/NAME/VERSION.
        gate: metric -> least gain; the confidence interval of the gain must lie above it.
        store: directory of the local registry, if MLFLOW_TRACKING_URI names no server.
        to: another registered model of the same server that it is copied to, and compared with the champion of.
        by_hand: why the gate is not asked.
        image: of this step, for the record.
        metrics: version, and for each metric of the gate the gain with its interval.
    """
    import os

    from components.adapters.mlflow import promotion
    from components.platform import artifacts
    from components.platform.stage_run import stage_run

    with stage_run("promote", store, tracker="mlflow", last=True) as step:  # the registry is MLflow's
        os.environ["INFOXLM_IMAGE"] = image
        step.report(promotion={"model": model, "gate": gate, "to": to, "by_hand": by_hand})
        with artifacts.exclusive(store, *promotion.LOCK):
            promoted = promotion.promote_model(model, gate, step.here, to, by_hand)
        figures: dict[str, float] = {}
        for metric, figure in promoted.verdict.figures.items():
            figures |= {f"{metric}/{name}": figure[name] for name in ("gain", "lower", "upper")}
        artifacts.show({"version": promoted.version} | figures, metrics)
        step.report(figures)
        step.run.end()  # its pipeline has no other step
