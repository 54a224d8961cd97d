"""The DAG of a suite: look at everything once, measure every point, end in one page beside the published numbers."""

from kfp import dsl

from components.measure import measure
from components.plan_suite import plan_suite
from components.summarise import summarise

AT_A_TIME = 2
"""Points that are measured at the same time."""


@dsl.pipeline(name="infoxlm-suite", description="Encoders x tasks x grid x seeds, beside the paper's tables.")
def suite(suite: dict, store: str, num_workers: int = 0):
    """Plan; fine-tune and measure each point; sum up, also what is left if one failed.

    Args:
        suite: a `SuiteConfig` in lists (`listed`): KFP's mappings forget their order, and the first model is special.
        store: directory where artifacts are found by content and checkpoints are kept.
        num_workers: Ray workers of each fine-tuning, one per GPU; 0 trains inside the step.
    """
    with dsl.ExitHandler(summarise(suite=suite, store=store).set_caching_options(False)):
        planned = plan_suite(suite=suite, store=store).set_caching_options(False)
        with dsl.ParallelFor(items=planned.output, parallelism=AT_A_TIME) as point:
            measured = measure(point=point, store=store, num_workers=num_workers)
        measured.set_caching_options(False)  # it finds its artifacts in the store, and tells the new MLflow run
