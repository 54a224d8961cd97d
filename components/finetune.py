"""Component: encoder + examples of a task -> a classifier, or a reader, on Ray workers or in this process."""

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
    """Fine-tune an encoder on a task in some languages.

    Args:
        config: settings of a task, as a mapping; `task` names it, classification if it is left out.
        num_workers: Ray workers, one per GPU; 0 trains inside this process.
        store: directory, or s3://bucket/prefix, where artifacts are found by content and checkpoints are kept.
        encoder: a model in Hugging Face format.
        corpus: output of prepare_corpus, whose labelled set is used if the config names no data.
        classifier: the fine-tuned model; one that classifies has its test set with it.
        metrics: loss and accuracy of the last step.
        cluster: a `ClusterConfig` as a mapping: train in a RayJob of its own; empty: in this step.
        trial: of an ablation: its variant, and its seed instead of the config's.
        task_config: the environment of the step, for the pods of the RayJob.
    """
    from components.platform import artifacts, sources
    from components.platform.stage_run import stage_run
    from infoxlm_core import manifests, tasks

    with stage_run("finetune", store, trial) as step:
        checked = tasks.parse(step.read(config) | ({"seed": trial["seed"]} if trial else {}), "finetuning")
        base, base_digest = artifacts.read_pointer(encoder)
        text, text_digest = artifacts.read_pointer(corpus)
        learned = sources.digest_training_data(checked, step.here)
        key = artifacts.key_of("classifier", checked, base_digest, text_digest, *learned)
        given = {"encoder": base, "corpus": text}
        made = step.make(
            "classifier",
            key,
            checked,
            num_workers=num_workers,
            cluster=cluster,
            task_config=task_config,
            inputs=given,
            checkpoints=f"classifier-{key}",
        )
        step.publish(classifier, made, metrics)
        trained = manifests.load(artifacts.locate(base, hashed=False))["facts"]["steps"] > 0
        step.run.log_curves(made / "metrics.jsonl", prefix="finetune/" if trained else "finetune_of_start/")
        step.report(finetuning=checked)
        step.report_cost(made, "finetune" if trained else "finetune_of_start")
