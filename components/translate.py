"""Components of machine translation: train a translator, evaluate it, and compare initialisations."""

from typing import Any

from kfp import dsl

from components.platform.stage import launching_stage, stage


@launching_stage
def translate(
    config: dict[str, Any],
    num_workers: int,
    store: str,
    corpus: dsl.Input[dsl.Dataset],
    shards: dsl.Input[dsl.Dataset],
    encoder: dsl.Input[dsl.Model],
    translator: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    cluster: dict[str, Any] = {},  # noqa: B006
    trial: dict[str, Any] = {},  # noqa: B006
    task_config: dsl.TaskConfig = None,
) -> None:
    """Train a translator between two languages from a pre-trained XLM.

    Args:
        config: a `TranslationConfig` as a mapping.
        num_workers: number of Ray workers, one per GPU; 0 trains in this process.
        store: directory or s3://bucket/prefix of artifacts and checkpoints.
        corpus: output of prepare_corpus; its first held-out pairs are the validation set.
        shards: output of tokenize_corpus.
        encoder: output of pretrain with system xlm.
        translator: the translator with its tokenizer.
        metrics: BLEU of the last validation, and the losses of the last step.
        cluster: a `ClusterConfig` as a mapping, to train in a RayJob; if empty, training runs in this step.
        trial: variant and seed of an ablation's trial; the seed replaces the config's seed.
        task_config: the step's environment, passed to the pods of the RayJob.
    """
    from components.platform import artifacts
    from components.platform.stage_run import stage_run
    from infoxlm_core.systems.translation.config import TranslationConfig

    with stage_run("translate", store, trial) as step:
        settings = step.read(config)
        if trial:
            settings = settings | {"seed": trial["seed"]}
        translation_config = TranslationConfig.parse(settings, "translation")
        step.report(translation=translation_config)
        corpus_location, corpus_digest = artifacts.read_pointer(corpus)
        shards_location, shards_digest = artifacts.read_pointer(shards)
        encoder_location, encoder_digest = artifacts.read_pointer(encoder)
        inputs = {"corpus": corpus_location, "shards_path": shards_location, "encoder": encoder_location}
        key = artifacts.compute_key("translator", translation_config, corpus_digest, shards_digest, encoder_digest)
        run = f"translator-{key}"
        directory = step.build(
            "translator", key, translation_config, num_workers, cluster, task_config, inputs, checkpoint_directory=run
        )
        step.run.log_curves(directory / "translator" / "metrics.jsonl", prefix="translate/")
        step.publish(translator, directory / "translator")
        artifacts.log_facts(directory, metrics)
        step.report_cost(directory)


@stage
def evaluate_translation(
    config: dict[str, Any],
    store: str,
    corpus: dsl.Input[dsl.Dataset],
    translator: dsl.Input[dsl.Model],
    scores: dsl.Output[dsl.Artifact],
    report: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
    trial: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Compute a translator's BLEU in both directions on the held-out pairs after the validation set.

    Args:
        config: a `TranslationConfig` as a mapping.
        store: directory or s3://bucket/prefix of artifacts.
        corpus: output of prepare_corpus.
        translator: output of translate.
        scores: all translations with their scores, and the report.
        report: the report as HTML.
        metrics: BLEU for each direction.
        trial: variant and seed of an ablation's trial; this step ends the trial's run in the tracker.
    """
    import shutil

    from components.platform import artifacts
    from components.platform.stage_run import stage_run
    from infoxlm_core.results.trials import Trial
    from infoxlm_core.systems.translation.config import TranslationConfig

    with stage_run("evaluate_translation", store, trial) as step:
        translation_config = TranslationConfig.parse(step.read(config), "translation")
        corpus_location, corpus_digest = artifacts.read_pointer(corpus)
        translator_location, translator_digest = artifacts.read_pointer(translator)
        name = Trial.parse(trial).model if trial else "translator"  # in an ablation, the model is a variant
        key = artifacts.compute_key("translations", translation_config, corpus_digest, translator_digest, name)

        def build(output: Any) -> dict[str, float]:
            from infoxlm_core.systems.translation import report

            corpus_path = artifacts.locate(corpus_location)
            translator_path = artifacts.locate(translator_location)
            return report.evaluate(translator_path, corpus_path, translation_config.validation_pairs, name, output)

        evaluation = artifacts.get_or_build(store, "translations", key, build)
        shutil.copyfile(evaluation / "report.html", report.path)
        step.report(step.publish(scores, evaluation, metrics))
        step.run.log_artifacts(evaluation, "evaluation")
        if trial:
            step.run.end()


@stage
def compare_translations(
    trials: list[dict[str, Any]],
    store: str,
    comparison: dsl.Output[dsl.Artifact],
    report: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Compare the translators of this pipeline run's successful trials, beside the published results of XLM.

    Args:
        trials: the loop's items; the key "trial" contains the variant, the seed and a description of the change.
        store: directory or s3://bucket/prefix of artifacts.
        comparison: the report with tables and figures, and all numbers as JSON.
        report: the report as HTML.
        metrics: mean and standard deviation of each variant's BLEU.
    """
    import functools

    from components.platform import sweeps
    from components.platform.stage_run import stage_run
    from infoxlm_core.results.summaries.ablation import summarise_metrics
    from infoxlm_core.systems.translation import report as translation_report

    with stage_run("compare", store, ends_run_on_failure=True) as step:
        planned_trials = [trial["trial"] for trial in step.read(trials)]
        summary = summarise_metrics(step.run.name, sweeps.end_unfinished_and_read_metrics(step, planned_trials))
        scores_by_variant = sweeps.read_first_trial_of_each_variant(step, planned_trials, "evaluation/scores.json")
        write_page = functools.partial(translation_report.write_page, scores_by_variant=scores_by_variant)
        sweeps.publish(step, "comparison", summary, sweeps.Outputs(comparison, report, metrics), write_page)
