"""The DAG of a promotion: a single step, so that Kubeflow's history of runs shows who promoted what and why."""

from typing import Any

from kfp import dsl

from components.promote import promote
from infoxlm_core.config import RegistrationConfig
from pipelines.placing import LIMITS, place, trust


@dsl.pipeline(
    name="infoxlm-promotion",
    description="A registered model becomes champion if it is significantly better.",
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
    """Compare a model with the champion; move the alias if the model is better, else fail with the figures.

    Args:
        model: models:/NAME@ALIAS or models:/NAME/VERSION.
        store: directory, or s3://bucket/prefix, that gets the error message if the step fails.
        gate: metric -> least gain; the confidence interval of the gain must lie above it.
        to: another registered model of the same server, to which the version is copied.
        by_hand: reason for promoting without the gate.
        image: of the step; on a cluster by digest.
    """
    promoted = promote(model=model, gate=gate, store=store, to=to, by_hand=by_hand, image=image)
    promoted.set_caching_options(False)
    place(image, {"promote if it is better": promoted})
    trust(promoted)
    promoted.set_retry(0)  # a second attempt would be refused as well
