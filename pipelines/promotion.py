"""The pipeline of a promotion. It has one step, so that Kubeflow's run history shows who promoted what and why."""

from typing import Any

from kfp import dsl

from components.promote import promote
from infoxlm_core.config import RegistrationConfig
from pipelines.steps import LIMITS, configure_steps, disable_cache, give_registry_access


@dsl.pipeline(
    name="infoxlm-promotion",
    description="Promote a registered model to champion if it is significantly better.",
    pipeline_config=LIMITS,
)
def promotion(
    model: str,
    store: str,
    image: str,
    gate: dict[str, Any] = RegistrationConfig().gates,  # noqa: B008
    to: str = "",
    by_hand: str = "",
) -> None:
    """Promote a model to champion if it is better. Otherwise fail and report the gains.

    Args:
        model: models:/NAME@ALIAS or models:/NAME/VERSION.
        store: directory or s3://bucket/prefix that receives the error message if the step fails.
        gate: smallest gain that each metric needs. The lower end of the gain's confidence interval must lie above it.
        to: another registered model of the same server, to which the version is copied first.
        by_hand: reason for promoting without the gate.
        image: container image of the step; on a cluster, name it by its digest.
    """
    promoted = promote(model=model, gate=gate, store=store, to=to, by_hand=by_hand, image=image)
    configure_steps(image, {"promote if better": promoted})
    disable_cache(promoted)
    give_registry_access(promoted)
    promoted.set_retry(0)  # a second attempt would be refused as well
