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
) -> None:
    """Fine-tune an encoder on a task, if it needs that, and measure it.

    Args:
        point: of `plan_suite`: which model, task, place in the grid and seed, with all settings.
        store: directory, or s3://bucket/prefix, where artifacts are found by content and checkpoints are kept.
        num_workers: Ray workers of a fine-tuning, one per GPU; 0 trains inside this process.
        scores: scores.json and the predictions.
        metrics: the main scores.
    """
    from pathlib import Path

    from components.platform import artifacts, keys, launchers, runtime, sources, tracking, work
    from infoxlm_core import manifests
    from infoxlm_core.results import trials
    from infoxlm_core.tasks import task_of

    named = point["point"]
    with runtime.ending_clearly(store, "measure", named):
        settings = trials.read_settings(point["settings"])
        run = tracking.open_run(store, named)
        said = {"model": named["model"], "source": point["source"], "task": named["task"]}
        run.log_params(said | {"settings": settings.model_dump(mode="json")})
        local = sources.localise(settings, artifacts.local(store))
        model = sources.fetch_model(point["source"], artifacts.local(store))
        learned_from: dict[str, Any] = {}
        task = task_of(local)
        if task.trained:
            part, data = task.training_part(local)
            inputs = [*keys.digest_inputs(str(model)), keys.digest_inputs_by_role(data)]
            if task.depends_on_workers(part, model):
                inputs.append(f"workers={max(1, num_workers)}")
            name = keys.artifact_key("tuned", task.without_data(part), *inputs)
            wanted = work.Work(
                stage="finetune",
                store=store,
                kind="tuned",
                name=name,
                run=f"tuned-{name}",
                config=settings.model_dump(mode="json"),
                artifacts={},
                sources={"encoder": point["source"]},
                num_workers=num_workers,
                tracker_run=run.id,
            )
            with artifacts.exclusive(store, "tuned", name):  # another point may need the same model
                model = artifacts.locate(artifacts.url_of(launchers.run(wanted)))  # every byte compared: it is read now
                work.delete_checkpoints(wanted)  # gigabytes of checkpoints that nobody needs any more
            run.log_curves(model / "metrics.jsonl")
            learned_from = manifests.load(model)["facts"] | {"tuned": f"tuned/{name}"}
        inputs = [*keys.digest_inputs(str(model)), keys.digest_inputs_by_role(task.data(local))]

        def build(output: Path) -> None:
            trials.measure(local, model, learned_from, output)

        key = keys.artifact_key("points", task.without_data(local), *inputs)
        made = artifacts.get_or_build(store, "points", key, build)
        flat = task.name_metrics(trials.read_scores(made / trials.SCORES), settings, named["task"])
        for metric, value in flat.items():
            metrics.log_metric(metric.replace("/", "_"), value)
        artifacts.publish(scores, made)
        run.log_metrics(flat)
        run.log_artifacts(made / trials.SCORES)
        run.end()
