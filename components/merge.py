"""Component: merge an encoder with its start model."""

from typing import Any

from kfp import dsl

from components.platform.stage import stage


@stage
def merge(
    config: dict[str, Any],
    store: str,
    corpus: dsl.Input[dsl.Dataset],
    encoder: dsl.Input[dsl.Model],
    start: dsl.Input[dsl.Model],
    merged: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Average an encoder with its start model. Use the largest encoder weight that the guard set accepts.

    Args:
        config: an `EvaluationConfig` as a mapping; `merge` lists the candidate weights.
        store: directory or s3://bucket/prefix of artifacts.
        corpus: output of prepare_corpus; every weight is measured on its held-out text.
        encoder: the trained model.
        start: the model before its first training step.
        merged: the merged encoder, or `encoder` itself if `merge` is empty.
        metrics: the chosen weight and its accuracies.
    """
    from pathlib import Path

    from components.platform import artifacts, costs, sources
    from components.platform.stage_run import stage_run
    from infoxlm_core.config import EvaluationConfig

    # Open the tracker's run only if there are weights to choose from.
    with stage_run("merge", store, reports_to_tracker=False) as step:
        evaluation_config = EvaluationConfig.parse(step.read(config), "evaluation")
        encoder_location, encoder_digest = artifacts.read_pointer(encoder)
        if not evaluation_config.merge:  # later steps then use the trained model itself
            artifacts.publish_pointer(merged, encoder_location, encoder_digest)
            return
        start_location, start_digest = artifacts.read_pointer(start)
        corpus_location, corpus_digest = artifacts.read_pointer(corpus)
        local_config = sources.fetch_guard_set(evaluation_config, step.local_store)
        key = sources.compute_key_with_guard("merged", local_config, corpus_digest, encoder_digest, start_digest)

        def build(output: Path) -> dict[str, Any]:
            from infoxlm_core.stages import merging

            corpus_path = artifacts.locate(corpus_location)
            encoder_path = artifacts.locate(encoder_location)
            start_path = artifacts.locate(start_location)
            with costs.record_process_duration(store, "merged", key):
                return merging.merge_best(local_config, corpus_path, encoder_path, start_path, output)

        directory = artifacts.get_or_build(store, "merged", key, build)
        step.publish(merged, directory / "encoder")
        artifacts.log_facts(directory, metrics)
        step.report_cost(directory)
