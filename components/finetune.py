"""Component: fine-tune an encoder on a task, on Ray workers or in this process."""

from typing import Any

from kfp import dsl

from components.platform.stage import launching_stage


@launching_stage
def finetune(
    config: dict[str, Any],
    num_workers: int,
    store: str,
    encoder: dsl.Input[dsl.Model],
    corpus: dsl.Input[dsl.Dataset],
    classifier: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    cluster: dict[str, Any] = {},  # noqa: B006
    trial: dict[str, Any] = {},  # noqa: B006
    task_config: dsl.TaskConfig = None,
) -> None:
    """Fine-tune an encoder on a task.

    Args:
        config: task settings as a mapping; the key `task` names the task, by default classification.
        num_workers: number of Ray workers, one per GPU; 0 trains in this process.
        store: directory or s3://bucket/prefix of artifacts and checkpoints.
        encoder: the model to fine-tune, in Hugging Face format.
        corpus: output of prepare_corpus; its labelled examples are used if the config names no data.
        classifier: the fine-tuned model; a classifier includes its test set. Empty without labelled text.
        metrics: loss and accuracy of the last step.
        cluster: a `ClusterConfig` as a mapping, to train in a RayJob; if empty, training runs in this step.
        trial: variant and seed of an ablation's trial; the seed replaces the config's seed.
        task_config: the step's environment, passed to the pods of the RayJob.
    """
    import logging

    from components.platform import artifact_files, artifacts, sources
    from components.platform.stage_run import stage_run
    from infoxlm_core import tasks

    with stage_run("finetune", store, trial) as step:
        settings = step.read(config)
        if trial:
            settings = settings | {"seed": trial["seed"]}
        task_settings = tasks.parse(settings, "finetuning")
        encoder_location, encoder_digest = artifacts.read_pointer(encoder)
        corpus_location, corpus_digest = artifacts.read_pointer(corpus)
        data_digests = sources.digest_training_data(task_settings, step.local_store)
        key = artifacts.compute_key("classifier", task_settings, encoder_digest, corpus_digest, *data_digests)
        corpus_manifest = artifact_files.read_manifest(corpus_location)
        corpus_files = corpus_manifest["files"] if corpus_manifest else {}
        if not tasks.task_of(task_settings).has_training_text(task_settings, corpus_files):
            logging.info("nothing to fine-tune on: the config names no data, and the corpus has fewer than two labels")
            # KFP has no optional outputs, so publish an empty artifact. `evaluate` ignores a classifier without steps.
            directory = artifacts.get_or_build(store, "classifier", key, lambda _: {"steps": 0, "examples": 0})
            step.publish(classifier, directory, metrics)
            return
        inputs = {"encoder": encoder_location, "corpus": corpus_location}
        run = f"classifier-{key}"
        directory = step.build(
            "classifier", key, task_settings, num_workers, cluster, task_config, inputs, checkpoint_directory=run
        )
        step.publish(classifier, directory, metrics)
        # The start model is fine-tuned in the same pipeline run, so its curves and hours need a different name.
        encoder_facts = artifacts.read_manifest(encoder_location)["facts"]
        is_trained = encoder_facts["steps"] > 0
        step_name = "finetune" if is_trained else "finetune_of_start"
        step.run.log_curves(directory / "metrics.jsonl", prefix=f"{step_name}/")
        step.report(finetuning=task_settings)
        step.report_cost(directory, step_name)
