"""Component: token shards -> InfoXLM, on Ray workers or in this process."""

from kfp import dsl

from components.stage import stage


@stage
def pretrain(
    config: dict,
    num_workers: int,
    store: str,
    shards: dsl.Input[dsl.Dataset],
    encoder: dsl.Output[dsl.Model],
    start: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    trial: dict = {},  # noqa: B006
):
    """Pre-train InfoXLM (MLM + TLM + XLCO) on token shards.

    Args:
        config: a `PretrainingConfig` as a mapping.
        num_workers: Ray workers, one per GPU; 0 trains inside this process.
        store: directory where artifacts are found by content and checkpoints are kept.
        shards: output of tokenize_corpus.
        encoder: the trained model in Hugging Face format.
        start: the same model before its first step, the floor of every comparison.
        metrics: losses of the last step.
        trial: of an ablation: its variant and seed; the curves then go into a run of their own.
    """
    import functools
    from pathlib import Path

    from components import runtime
    from components.adapters import mlflow_runs, mlflow_tracker, model_source, ray_train
    from infoxlm_core import pretraining
    from infoxlm_core.config import PretrainingConfig

    with runtime.ending_clearly(store, "pretrain", trial):
        checked = PretrainingConfig.parse(config, "pretraining")
        source, digest = runtime.find(shards)
        run = runtime.run_id(store, trial)
        mlflow_runs.log_params(run, {"pretraining": checked.model_dump(mode="json")})
        local = checked
        if checked.model.start:
            found = str(model_source.fetch(checked.model.start, Path(store)))
            local = checked.model_copy(update={"model": checked.model.model_copy(update={"start": found})})
        name = runtime.key("pretrained", checked, digest, *runtime.given(local.model.start))
        made = runtime.make(
            store,
            "pretrained",
            name,
            lambda output: ray_train.run(
                pretraining.pretrain,
                num_workers,
                config=local,
                shards_path=source,
                output=output,
                run=Path(store) / "runs" / f"pretrained-{name}",
                track=functools.partial(mlflow_tracker.MlflowTracker, run_id=run),
            ),
        )
        mlflow_tracker.ship(made / "encoder" / "metrics.jsonl", run)
        runtime.publish(encoder, made / "encoder")
        runtime.publish(start, made / "start")
        runtime.facts(made, metrics)
