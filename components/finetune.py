"""Component: encoder + examples of a task -> a classifier, or a reader, on Ray workers or in this process."""

from kfp import dsl

from components.stage import stage


@stage
def finetune(
    config: dict,
    num_workers: int,
    store: str,
    encoder: dsl.Input[dsl.Model],
    corpus: dsl.Input[dsl.Dataset],
    classifier: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    trial: dict = {},  # noqa: B006
):
    """Fine-tune an encoder on a task in some languages.

    Args:
        config: a `FinetuningConfig`, or with task question_answering an `AnsweringConfig`, as a mapping.
        num_workers: Ray workers, one per GPU; 0 trains inside this process.
        store: directory where artifacts are found by content and checkpoints are kept.
        encoder: a model in Hugging Face format.
        corpus: output of prepare_corpus, whose labelled set is used if the config names no data.
        classifier: the fine-tuned model; one that classifies has its test set with it.
        metrics: loss and accuracy of the last step.
        trial: of an ablation: its variant, and its seed instead of the config's.
    """
    from pathlib import Path

    from components import runtime
    from components.adapters import mlflow_runs, mlflow_tracker, ray_train
    from infoxlm_core import finetuning, manifests
    from infoxlm_core.config import AnsweringConfig, FinetuningConfig

    with runtime.ending_clearly(store, "finetune", trial):
        kind = AnsweringConfig if config.get("task") == "question_answering" else FinetuningConfig
        checked = kind.parse(config | ({"seed": trial["seed"]} if trial else {}), "finetuning")
        data = checked.data if isinstance(checked, FinetuningConfig) else (*checked.train, *checked.dev)
        base, base_digest = runtime.find(encoder)
        text, text_digest = runtime.find(corpus)
        name = runtime.key("classifier", checked, base_digest, text_digest, *runtime.given(data))
        made = runtime.make(
            store,
            "classifier",
            name,
            lambda output: ray_train.run(
                finetuning.finetune,
                num_workers,
                config=checked,
                encoder=base,
                corpus=text,
                output=output,
                run=Path(store) / "runs" / f"classifier-{name}",
            ),
        )
        runtime.publish(classifier, made)
        runtime.facts(made, metrics)
        trained = manifests.load(base)["facts"]["steps"] > 0
        run = runtime.run_id(store, trial)
        mlflow_tracker.ship(made / "metrics.jsonl", run, prefix="finetune/" if trained else "finetune_of_start/")
        mlflow_runs.log_params(run, {"finetuning": checked.model_dump(mode="json")})
