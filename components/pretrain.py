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
    """
    import functools
    from pathlib import Path

    from components import runtime
    from components.adapters import mlflow_runs, mlflow_tracker, ray_train
    from infoxlm_core import pretraining
    from infoxlm_core.config import PretrainingConfig

    with runtime.ending_clearly(store, "pretrain"):
        checked = PretrainingConfig.parse(config, "pretraining")
        source, digest = runtime.find(shards)
        run = runtime.run_id(store)
        mlflow_runs.log_params(run, {"pretraining": checked.model_dump(mode="json")})
        name = runtime.key("pretrained", checked, digest, *runtime.given(checked.model.start))
        made = runtime.make(
            store,
            "pretrained",
            name,
            lambda output: ray_train.run(
                pretraining.pretrain,
                num_workers,
                config=checked,
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
