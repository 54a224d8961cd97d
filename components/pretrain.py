"""Component: token shards -> InfoXLM, on Ray workers or in this process."""

from typing import Any

from kfp import dsl

from components.platform.stage import launching_stage


@launching_stage
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
        task_config: the environment of the step, for the pods of the RayJob.
    """
    from components.platform import artifacts, sources, training_runs
    from components.platform.stage_run import stage_run
    from infoxlm_core.config import PretrainingConfig
    from infoxlm_core.training import fingerprint

    with stage_run("pretrain", store, trial) as step:
        checked = PretrainingConfig.parse(step.read(config), "pretraining")
        step.report(pretraining=checked)
        place, digest = artifacts.read_pointer(shards)
        begin = checked.model.start and str(sources.fetch_model(checked.model.start, step.here))
        begun = fingerprint.digest_inputs(begin)  # of no model or of one
        inputs = {"shards": digest} | ({"model.start": begun[0]} if begun else {})
        key = artifacts.key_of("pretrained", checked, *inputs.values())
        run = training_runs.choose_run(store, "pretrained", key, checked, inputs, trial)
        made = step.make(
            "pretrained",
            key,
            checked,
            num_workers=num_workers,
            cluster=cluster,
            task_config=task_config,
            inputs={"shards_path": place},
            checkpoints=run,
            follow=True,
        )
        step.run.log_curves(made / "encoder" / "metrics.jsonl")
        step.publish(encoder, made / "encoder")
        step.publish(start, made / "start")
        artifacts.log_facts(made, metrics)
        step.report_cost(made)
