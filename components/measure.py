"""Component: one point of a suite -> scores; what must be trained for it is trained, on Ray workers or here."""

from typing import Any

from kfp import dsl

from components.platform.stage import stage


@stage
def measure(
    point: dict[str, Any],
    store: str,
    num_workers: int,
    scores: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    local_code: str = "",
) -> None:
    """Fine-tune an encoder on a task, if it needs that, and measure it.

    Args:
        point: of `plan_suite`: which model, task, place in the grid and seed, with all settings.
        store: directory, or s3://bucket/prefix, where artifacts are found by content and checkpoints are kept.
        num_workers: Ray workers of a fine-tuning, one per GPU; 0 trains inside this process.
        scores: scores.json and the predictions.
        metrics: the main scores.
        local_code: digest of an `infoxlm_core` in the store that is used instead of the image's; empty: the image's.
    """
    from components.platform import overlay

    overlay.use(store, local_code)

    from pathlib import Path

    from components.platform import artifacts, keys, sources, trainings
    from components.platform.stage_run import stage_run
    from infoxlm_core.results import trials
    from infoxlm_core.tasks import task_of

    named, source = point["point"], point["source"]
    with stage_run("measure", store, named) as step:
        settings = trials.read_settings(point["settings"])
        step.report(model=named["model"], source=source, task=named["task"], settings=settings)
        local = sources.localise(settings, step.here)
        task = task_of(local)
        model, learned_from = trainings.tune(settings, local, source, num_workers, store, step.run)
        inputs = [*keys.digest_inputs(str(model)), keys.digest_inputs_by_role(task.data(local))]
        key = keys.artifact_key("points", task.without_data(local), *inputs)

        def build(output: Path) -> None:
            trials.measure(local, model, learned_from, output)

        made = artifacts.get_or_build(store, "points", key, build)
        step.publish(scores, made)
        figures = task.name_metrics(trials.read_scores(made / trials.SCORES), settings, named["task"])
        artifacts.show(figures, metrics)
        step.report(figures)
        step.run.log_artifacts(made / trials.SCORES)
        step.run.end()
