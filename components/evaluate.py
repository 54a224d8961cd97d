"""Component: models + held-out text -> scores, tables, figures, model card."""

from kfp import dsl

from components.stage import stage


@stage
def evaluate(
    config: dict,
    store: str,
    corpus: dsl.Input[dsl.Dataset],
    encoder: dsl.Input[dsl.Model],
    start: dsl.Input[dsl.Model],
    classifier: dsl.Input[dsl.Model],
    classifier_of_start: dsl.Input[dsl.Model],
    scores: dsl.Output[dsl.Artifact],
    report: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
):
    """Evaluate an encoder against the same model before its first step.

    Args:
        config: an `EvaluationConfig` as a mapping.
        store: directory where artifacts are found by content.
        corpus: output of prepare_corpus, with held-out text.
        encoder: the trained model.
        start: the untrained model.
        classifier: fine-tuned from `encoder`.
        classifier_of_start: fine-tuned from `start`.
        scores: where all scores, figures and the model card are.
        report: the HTML report.
        metrics: the main scores.
    """
    import shutil

    from components import runtime
    from components.adapters import mlflow_runs
    from infoxlm_core import evaluation
    from infoxlm_core.config import EvaluationConfig

    with runtime.ending_clearly(store, "evaluate"):
        checked = EvaluationConfig.parse(config, "evaluation")
        found = [runtime.find(artifact) for artifact in (corpus, encoder, start, classifier, classifier_of_start)]
        text, trained, untrained, tuned, tuned_start = (location for location, _ in found)
        name = runtime.key("scores", checked, *(digest for _, digest in found))
        made = runtime.make(
            store,
            "scores",
            name,
            lambda output: evaluation.evaluate(
                checked,
                text,
                {"InfoXLM": trained, "untrained": untrained},
                {"InfoXLM": tuned, "untrained": tuned_start},
                output,
            ),
        )
        runtime.publish(scores, made)
        shutil.copy(made / "report.html", report.path)
        flat = runtime.facts(made, metrics)
        run = runtime.run_id(store)
        mlflow_runs.log_params(run, {"evaluation": checked.model_dump(mode="json")})
        mlflow_runs.log_metrics(run, flat)
        mlflow_runs.log_artifacts(run, made, "evaluation")
