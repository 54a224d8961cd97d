"""The suite pipeline: it measures encoders on tasks, and reports the scores beside published results."""

from typing import Any

from kfp import dsl

from components.suite import measure, plan_suite, summarise
from pipelines.steps import (
    LIMITS,
    PARALLEL_TRIALS,
    configure_steps,
    disable_cache,
    give_gpus,
    request_default_resources,
)


@dsl.pipeline(
    name="infoxlm-suite",
    description="Fine-tune and evaluate encoders on tasks with several seeds, beside published results.",
    pipeline_config=LIMITS,
)
def suite(
    suite: dict[str, Any],
    store: str,
    image: str,
    overrides: dict[str, Any] = {},  # noqa: B006
    num_workers: int = 0,
) -> None:
    """Plan the trials, fine-tune and measure each model, and summarise the successful trials.

    Args:
        suite: a `SuiteConfig` as lists (see `listed`), because KFP does not keep the order of mappings. The order
            matters: all models are compared with the first model.
        store: directory or s3://bucket/prefix of artifacts and checkpoints.
        overrides: single settings of the suite, such as {"tasks.xnli.seeds": [1, 2]}. An override of a task does not
            change tasks that are `like` this task.
        num_workers: number of workers per fine-tuning, one per GPU of the step's pod; 0 trains in the step.
        image: container image of all steps; by digest on a cluster.
    """
    summary = summarise(suite=suite, overrides=overrides, store=store)
    with dsl.ExitHandler(summary):
        plan = plan_suite(suite=suite, overrides=overrides, store=store)
        with dsl.ParallelFor(items=plan.output, parallelism=PARALLEL_TRIALS) as batch:
            measurement = measure(batch=batch, num_workers=num_workers, store=store)
    configure_steps(image, {"plan the trials": plan, "measure trials": measurement, "summarise the trials": summary})
    disable_cache(plan, measurement, summary)  # a cached step would not log to the new MLflow run
    request_default_resources(plan)
    give_gpus(measurement)
