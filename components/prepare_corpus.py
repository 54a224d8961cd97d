"""Component: clean, deduplicate and decontaminate raw text."""

from typing import Any

from kfp import dsl

from components.platform.stage import launching_stage


@launching_stage
def prepare_corpus(
    config: dict[str, Any],
    store: str,
    corpus: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    num_workers: int = 0,
    cluster: dict[str, Any] = {},  # noqa: B006
    task_config: dsl.TaskConfig = None,
) -> None:
    """Clean and deduplicate corpora, and reserve the held-out text.

    Args:
        config: a `PreparationConfig` as a mapping.
        store: directory or s3://bucket/prefix of artifacts.
        corpus: the prepared corpora.
        metrics: number of sentences and translation pairs.
        num_workers: number of Ray workers (pods on a cluster); 0 prepares in this process.
        cluster: a `ClusterConfig` as a mapping, for workers in a RayJob; if empty, workers run in this step.
        task_config: the step's environment, passed to the pods of the RayJob.
    """
    from components.platform import artifacts, sources
    from components.platform.stage_run import stage_run
    from infoxlm_core.config import PreparationConfig
    from infoxlm_core.stages import preparation
    from infoxlm_core.training import fingerprint

    with stage_run("prepare_corpus", store) as step:
        preparation_config = sources.expand_patterns(PreparationConfig.parse(step.read(config), "preparation"))
        # Local files are identified by their content, and files in a storage by their versions, without a download.
        input_digests = preparation.digest_sources(preparation_config)
        input_digests += sources.digest_stored_sources(preparation_config.paths)
        if preparation_config.cleaning.similarity:
            similarity_encoder = sources.fetch_model(preparation_config.cleaning.similarity.encoder, step.local_store)
            input_digests += fingerprint.digest_inputs(str(similarity_encoder))
        key = artifacts.compute_key("corpus", preparation_config, *input_digests)
        directory = step.build("corpus", key, preparation_config, num_workers, cluster, task_config)
        counts = step.publish(corpus, directory, metrics)
        # `report_corpus` logs the corpora as datasets.
        step.report(counts, preparation=preparation_config.model_dump(mode="json", exclude={"corpora"}))
        step.report_cost(directory)
        step.run.log_artifacts(directory / "report.json", "preparation")
        step.report_corpus(artifacts.find_uri(directory))
