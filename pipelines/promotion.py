"""The DAG of a promotion: one step, so that who promoted what, and why, stands where all other runs stand."""

from typing import Any

from kfp import dsl

from components.promote import promote
from infoxlm_core.config import RegistrationConfig
from pipelines.placing import LIMITS, place, trust


@dsl.pipeline(
    name="infoxlm-promotion",
    description="A registered model becomes champion if it is better for sure.",
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
    """Compare a model with the champion; move the alias, or fail with the figures.

    Args:
        model: models:/NAME@ALIAS or models:/NAME/VERSION.
        store: directory, or s3://bucket/prefix, where a step says why it failed.
        gate: metric -> least gain; the confidence interval of the gain must lie above it.
        to: another registered model of the same server that it is copied to.
        by_hand: why the gate is not asked.
        image: of the step; on a cluster by digest.
    """
    promoted = promote(model=model, gate=gate, store=store, to=to, by_hand=by_hand, image=image)
    promoted.set_display_name("promote if it is better")
    place(image, promoted.set_caching_options(False))
    trust(promoted)
    promoted.set_retry(0)  # a refusal stays a refusal
