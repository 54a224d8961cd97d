"""Component: evaluate models on held-out text, and write scores, a report and a model card."""

from typing import Any

from kfp import dsl

from components.platform.stage import stage


@stage
def evaluate(
    config: dict[str, Any],
    store: str,
    corpus: dsl.Input[dsl.Dataset],
    encoder: dsl.Input[dsl.Model],
    classifier: dsl.Input[dsl.Model],
    scores: dsl.Output[dsl.Artifact],
    report: dsl.Output[dsl.HTML],
    model_card: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
    start: dsl.Input[dsl.Model] = None,
    classifier_of_start: dsl.Input[dsl.Model] = None,
    trial: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Evaluate an encoder and, if given, its start model.

    Args:
        config: an `EvaluationConfig` as a mapping.
        store: directory or s3://bucket/prefix of artifacts.
        corpus: output of prepare_corpus; its held-out text is the test set.
        encoder: the trained model.
        classifier: the classifier fine-tuned from `encoder`; empty without labelled text.
        scores: all scores, the report with tables and figures, and the model card.
        report: the report as HTML.
        model_card: the model card as Markdown.
        metrics: the main scores.
        start: the model before its first training step.
        classifier_of_start: the classifier fine-tuned from `start`; required with `start`.
        trial: variant and seed of an ablation's trial; this step ends the trial's run in the tracker.
    """
    import shutil
    from pathlib import Path

    from components.platform import artifacts, costs, evaluations
    from components.platform.stage_run import stage_run
    from infoxlm_core.config import EvaluationConfig
    from infoxlm_core.results import evidence
    from infoxlm_core.results.report import describe_run, remove_metadata, select_headlines
    from infoxlm_core.results.trials import Trial

    with stage_run("evaluate", store, trial) as step:
        evaluation_config = EvaluationConfig.parse(step.read(config), "evaluation")
        name = Trial.parse(trial).name if trial else "InfoXLM"
        models = [evaluations.read_model(name, encoder, classifier)]
        if start:
            models.append(evaluations.read_start(start, classifier_of_start))
        evaluation = evaluations.build_scores(step, evaluation_config, corpus, models)

        shutil.copyfile(evaluation / "report.html", report.path)
        model_card_text = (evaluation / "model_card.md").read_text(encoding="utf-8")
        # Kubeflow would display the card's YAML header, which only the Hugging Face hub reads.
        Path(model_card.path).write_text(remove_metadata(model_card_text), encoding="utf-8")
        metric_values = step.publish(scores, evaluation, metrics)

        step.report_cost(evaluation)
        cost_metrics = costs.add_up(step.run.read_metrics())  # earlier steps have logged their hours there
        step.report(metric_values | cost_metrics, evaluation=evaluation_config)
        if not trial:
            step.report(select_headlines(metric_values))
        step.run.log_artifacts(evaluation, "evaluation")
        corpus_location, _ = artifacts.read_pointer(corpus)
        datasets = step.report_corpus(corpus_location)  # report again, because Kubeflow's cache may skip prepare_corpus
        step.run.annotate(
            describe_run(evidence.read_scores(evaluation), metric_values | cost_metrics, datasets, "evaluation")
        )
        if trial:
            step.run.end()
