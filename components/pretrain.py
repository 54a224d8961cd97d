"""Component: token shards -> InfoXLM, on Ray workers or in this process."""

from typing import Any

from kfp import dsl

from components.platform.stage import training_stage


@training_stage
def pretrain(
    config: dict[str, Any],
    num_workers: int,
    store: str,
    shards: dsl.Input[dsl.Dataset],
    encoder: dsl.Output[dsl.Model],
    start: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    cluster: dict[str, Any] = {},  # noqa: B006
    trial: dict[str, Any] = {},  # noqa: B006
    task_config: dsl.TaskConfig = None,
) -> None:
    """Pre-train InfoXLM (MLM + TLM + XLCO) on token shards.

    Args:
        config: a `PretrainingConfig` as a mapping.
        num_workers: Ray workers, one per GPU; 0 trains inside this process.
        store: directory, or s3://bucket/prefix, where artifacts are found by content and checkpoints are kept.
        shards: output of tokenize_corpus.
        encoder: the trained model in Hugging Face format.
        start: the same model before its first step, the floor of every comparison.
        metrics: losses of the last step.
        cluster: a `ClusterConfig` as a mapping: train in a RayJob of its own; empty: in this step.
        trial: of an ablation: its variant and seed; the curves then go into a run of their own.
        task_config: the step's GPUs, node selector and tolerations, which are those of the RayJob's workers.
    """
    from components.platform import artifacts, keys, launchers, runtime, sources, tracking, trainings, work
    from infoxlm_core.config import PretrainingConfig

    with runtime.ending_clearly(store, "pretrain", trial):
        checked = PretrainingConfig.parse(config, "pretraining")
        location, digest = artifacts.read_pointer(shards)
        run = tracking.open_run(store, trial)
        run.log_params({"pretraining": checked.model_dump(mode="json")})
        start_from = checked.model.start and str(sources.fetch_model(checked.model.start, artifacts.local(store)))
        start_digests = keys.digest_inputs(start_from)
        name = keys.artifact_key("pretrained", checked, digest, *start_digests)
        inputs = {"shards": digest} | ({"model.start": start_digests[0]} if start_digests else {})
        wanted = work.Work(
            stage="pretrain",
            store=store,
            kind="pretrained",
            name=name,
            run=trainings.choose_run(store, "pretrained", name, checked, inputs, trial),
            config=config,
            artifacts={"shards_path": location},
            num_workers=num_workers,
            tracker_run=run.id,
        )
        made = launchers.run(wanted, cluster, task_config)
        run.log_curves(made / "encoder" / "metrics.jsonl")
        artifacts.publish(encoder, made / "encoder")
        artifacts.publish(start, made / "start")
        artifacts.log_facts(made, metrics)
