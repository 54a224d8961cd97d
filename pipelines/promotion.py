"""The promotion pipeline. It has one step, so that Kubeflow's run history shows who promoted which model and why."""

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
        gate: mapping from metric to required gain. The confidence interval of the gain must lie above this value.
        to: name of a target model on the same server, to which the version is copied first.
        by_hand: reason for promoting without the gate.
        image: container image of the step; by digest on a cluster.
    """
    promoted = promote(model=model, gate=gate, store=store, to=to, by_hand=by_hand, image=image)
    configure_steps(image, {"promote if better": promoted})
    disable_cache(promoted)  # its result depends on the current champion
    give_registry_access(promoted)
    promoted.set_retry(0)  # a second attempt would have the same result
