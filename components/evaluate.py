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
    """Evaluate an encoder and, if given, the model before its training.

    Args:
        config: an `EvaluationConfig` as a mapping.
        store: directory or s3://bucket/prefix of artifacts.
        corpus: output of prepare_corpus; its held-out text is the test set.
        encoder: the trained model.
        classifier: classifier fine-tuned from `encoder`; without files if there is no labelled text.
        scores: all scores, the report with its tables and figures, and the model card.
        report: the HTML report.
        model_card: the model card.
        metrics: the main scores.
        start: the model before the first training step.
        classifier_of_start: classifier fine-tuned from `start`; give both or neither.
        trial: variant and seed of a trial of an ablation; this step ends its run in the tracker.
    """
    import shutil
    from pathlib import Path

    from components.platform import artifacts, costs, sources
    from components.platform.stage_run import stage_run
    from infoxlm_core import manifests
    from infoxlm_core.config import EvaluationConfig
    from infoxlm_core.results import evidence
    from infoxlm_core.results.report import describe_run, remove_metadata, select_headlines
    from infoxlm_core.results.trials import Trial

    with stage_run("evaluate", store, trial) as step:
        checked = EvaluationConfig.parse(step.read(config), "evaluation")
        corpus_location, corpus_digest = artifacts.read_pointer(corpus)
        model_name = Trial.parse(trial).name if trial else "InfoXLM"
        models = {model_name: (encoder, classifier)}
        if start:
            start_location, _ = artifacts.read_pointer(start)
            inputs_of_start = manifests.load(artifacts.locate(start_location, hashed=False))["inputs"]
            name_of_start = evidence.PUBLIC_START if "model.start" in inputs_of_start else evidence.UNTRAINED
            models[name_of_start] = (start, classifier_of_start)
        locations = {}
        digests = []
        for name, (encoder_of_model, classifier_of_model) in models.items():
            encoder_location, encoder_digest = artifacts.read_pointer(encoder_of_model)
            classifier_location, classifier_digest = artifacts.read_pointer(classifier_of_model)
            locations[name] = (encoder_location, classifier_location)
            digests += [encoder_digest, classifier_digest]
        local_config, config_without_path, guard_digest = sources.localise_guard(checked, step.local_store)
        key = artifacts.key_of("scores", config_without_path, corpus_digest, *models, *digests, *guard_digest)

        # The report of an adaptation shows the hours of all steps before this one.
        is_adapted = evidence.PUBLIC_START in models
        hours_before = costs.sum_up(step.run.read_metrics()) if is_adapted else {}

        def build(output: Path) -> dict[str, float]:
            from infoxlm_core.model import devices
            from infoxlm_core.model.huggingface import origin
            from infoxlm_core.stages.evaluation import evaluate

            encoders = {}
            classifiers = {}
            for role, (encoder_location, classifier_location) in locations.items():
                encoder_directory = artifacts.locate(encoder_location)
                is_adapted_encoder = is_adapted and role == model_name and not trial
                name = origin.name_adapted(encoder_directory) if is_adapted_encoder else role
                encoders[name] = encoder_directory
                classifier_directory = artifacts.locate(classifier_location)
                trained_steps = manifests.load(classifier_directory)["facts"]["steps"]
                if trained_steps:  # without labelled text, `finetune` trains nothing
                    classifiers[name] = classifier_directory
            device = costs.GPU if devices.count_gpus() else costs.CPU
            corpus_path = artifacts.locate(corpus_location)
            with costs.measured(store, "scores", key, 1, device):
                return evaluate(local_config, corpus_path, encoders, classifiers, output, hours_before)

        evaluation = artifacts.get_or_build(store, "scores", key, build)
        shutil.copyfile(evaluation / "report.html", report.path)
        card = (evaluation / "model_card.md").read_text(encoding="utf-8")
        Path(model_card.path).write_text(remove_metadata(card), encoding="utf-8")
        figures = step.publish(scores, evaluation, metrics)

        step.report_cost(evaluation)
        hours = costs.sum_up(step.run.read_metrics())
        step.report(figures | hours, evaluation=checked)
        if not trial:
            step.report(select_headlines(figures))
        step.run.log_artifacts(evaluation, "evaluation")
        datasets = step.report_corpus(corpus_location)  # again, because Kubeflow may have skipped prepare_corpus
        step.run.annotate(describe_run(evidence.read_scores(evaluation), figures | hours, datasets, "evaluation"))
        if trial:
            step.run.end()
