"""The DAG of a suite: look at everything once, measure every point, end in one page beside the published numbers."""

from typing import Any

from kfp import dsl

from components.measure import measure
from components.plan_suite import plan_suite
from components.summarise import summarise
from pipelines.placing import LIMITS, give_gpus, place, size

AT_A_TIME = 2
"""Points, or batches of them, that are measured at the same time."""


@dsl.pipeline(
    name="infoxlm-suite",
    description="Encoders x tasks x grid x seeds, beside the paper's tables.",
    pipeline_config=LIMITS,
)
def suite(
    suite: dict[str, Any],
    store: str,
    image: str,
    overrides: dict[str, Any] = {},  # noqa: B006
    num_workers: int = 0,
) -> None:
    """Plan; fine-tune and measure each point; sum up, also what is left if one failed.

    Args:
        suite: a `SuiteConfig` in lists (`listed`): KFP's mappings forget their order, and the first model is special.
        store: directory, or s3://bucket/prefix, where artifacts are found by content and checkpoints are kept.
        overrides: single fields of the suite, such as {"tasks.xnli.seeds": [1, 2]}.
        num_workers: Ray workers of each fine-tuning, one per GPU of its pod; 0 trains inside the step.
        image: of all steps; on a cluster by digest.
    """
    summed = summarise(suite=suite, overrides=overrides, store=store).set_caching_options(False)
    with dsl.ExitHandler(summed):
        planned = plan_suite(suite=suite, overrides=overrides, store=store)
        planned.set_caching_options(False)
        with dsl.ParallelFor(items=planned.output, parallelism=AT_A_TIME) as batch:
            measured = measure(batch=batch, num_workers=num_workers, store=store)
        measured.set_caching_options(False)  # it finds its artifacts in the store, and tells the new MLflow run
    place(image, {"look at all data": planned, "tune and measure": measured, "sum up": summed})
    size(planned)
    give_gpus(measured)
