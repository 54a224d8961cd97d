"""Component: models + held-out text -> scores, tables, figures, model card."""

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
    """Evaluate an encoder, against the same model before its first step if that is given.

    Args:
        config: an `EvaluationConfig` as a mapping.
        store: directory where artifacts are found by content.
        corpus: output of prepare_corpus, with held-out text.
        encoder: the trained model.
        classifier: fine-tuned from `encoder`.
        scores: where all scores, figures and the model card are.
        report: the HTML report.
        model_card: what the model is, for its users.
        metrics: the main scores.
        start: the untrained model, a floor to compare with.
        classifier_of_start: fine-tuned from `start`; both or neither.
        trial: of an ablation: its variant and seed, whose run ends here.
    """
    import re
    import shutil
    import tempfile
    from pathlib import Path

    from components.platform import artifacts, costs
    from components.platform.stage_run import stage_run
    from infoxlm_core.config import EvaluationConfig
    from infoxlm_core.results import cost, evidence
    from infoxlm_core.results.report import describe_run
    from infoxlm_core.results.trials import HEADLINES, Trial

    with stage_run("evaluate", store, trial) as step:
        checked = EvaluationConfig.parse(step.read(config), "evaluation")
        model = Trial.parse(trial).name if trial else "InfoXLM"
        text, digest = artifacts.read_pointer(corpus)
        pairs = {model: (encoder, classifier)} | ({"untrained": (start, classifier_of_start)} if start else {})
        found = {name: [artifacts.read_pointer(one) for one in pair] for name, pair in pairs.items()}
        key = artifacts.key_of("scores", checked, digest, *found, *(d for pair in found.values() for _, d in pair))

        def build(output: Path) -> dict[str, float]:
            from infoxlm_core.model import devices
            from infoxlm_core.stages import evaluation

            encoders, classifiers = (
                {name: artifacts.locate(pair[part][0]) for name, pair in found.items()} for part in (0, 1)
            )
            with costs.measured(store, "scores", key, 1, costs.GPU if devices.count_gpus() else costs.CPU):
                return evaluation.evaluate(checked, artifacts.locate(text), encoders, classifiers, output)

        made = artifacts.get_or_build(store, "scores", key, build)
        step.report_cost(made)
        spent = costs.of_run(store, trial)
        step.report({f"cost/{device.lower()}_hours/all": hours for device, hours in cost.sum_up(spent).items()})
        page = cost.add_to_page((made / "report.html").read_text(encoding="utf-8"), spent)
        card = (made / "model_card.md").read_text(encoding="utf-8")
        Path(report.path).write_text(page, encoding="utf-8")
        Path(model_card.path).write_text(re.sub(r"\A---\n.*?\n---\n", "", card, flags=re.DOTALL), encoding="utf-8")
        figures = step.publish(scores, made, metrics)
        step.report(figures, evaluation=checked)
        if not trial:  # the few main figures get a group of their own among all curves
            step.report({f"headline/{name.replace('/', '_')}": figures[name] for name in HEADLINES if name in figures})
        with tempfile.TemporaryDirectory() as folder:  # the artifact, with the costs of this run in its report
            shown = shutil.copytree(made, Path(folder, "evaluation"))
            (shown / "report.html").write_text(page, encoding="utf-8")
            step.run.log_artifacts(shown, "evaluation")
        datasets = step.report_corpus(text)  # again: Kubeflow may have skipped the step that prepared it
        step.run.annotate(describe_run(evidence.read_scores(made), figures, datasets, "evaluation"))
        if trial:
            step.run.end()
