"""Component: pre-train a model on token shards, on Ray workers or in this process."""

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
        num_workers: number of Ray workers, one per GPU; 0 trains in this process.
        store: directory or s3://bucket/prefix of artifacts and checkpoints.
        shards: output of tokenize_corpus.
        encoder: the trained model in Hugging Face format.
        start: the model before its first training step, the baseline of the evaluation.
        metrics: the losses of the last step.
        cluster: a `ClusterConfig` as a mapping, to train in a RayJob; if empty, training runs in this step.
        trial: variant and seed of an ablation's trial; the trial's run in the tracker receives the curves.
        task_config: the step's environment, passed to the pods of the RayJob.
    """
    import contextlib

    from components.platform import artifacts, sources, training_runs
    from components.platform.stage_run import stage_run
    from infoxlm_core.config import PretrainingConfig
    from infoxlm_core.training import fingerprint

    with stage_run("pretrain", store, trial) as step:
        pretraining_config = PretrainingConfig.parse(step.read(config), "pretraining")
        step.report(pretraining=pretraining_config)
        shards_location, shards_digest = artifacts.read_pointer(shards)
        input_digests = {"shards": shards_digest}
        if pretraining_config.model.start:
            start_model = sources.fetch_model(pretraining_config.model.start, step.local_store)
            [start_digest] = fingerprint.digest_inputs(str(start_model))  # one path, so one digest
            input_digests["model.start"] = start_digest
        key = artifacts.compute_key("pretrained", pretraining_config, *input_digests.values())
        run = training_runs.choose_run(store, "pretrained", key, pretraining_config, input_digests, trial)
        inputs = {"shards_path": shards_location}
        # Trials that differ only in later stages share the pre-training: the first trial trains, the others wait.
        with artifacts.exclusive(store, "pretrained", key) if trial else contextlib.nullcontext():
            directory = step.build(
                "pretrained", key, pretraining_config, num_workers, cluster, task_config, inputs, run, send_curves=True
            )
        step.run.log_curves(directory / "encoder" / "metrics.jsonl")
        step.publish(encoder, directory / "encoder")
        step.publish(start, directory / "start")
        facts = artifacts.log_facts(directory, metrics)
        if "steps" in facts:  # older versions did not record the steps
            step.report({"steps": facts["steps"]})
        step.report_cost(directory)
