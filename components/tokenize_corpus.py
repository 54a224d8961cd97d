"""Component: prepared corpora -> SentencePiece model and token shards."""

from typing import Any

from kfp import dsl

from components.platform.stage import data_stage


@data_stage
def tokenize_corpus(
    config: dict[str, Any],
    store: str,
    corpus: dsl.Input[dsl.Dataset],
    shards: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    num_workers: int = 0,
    cluster: dict[str, Any] = {},  # noqa: B006
    task_config: dsl.TaskConfig = None,
) -> None:
    """Train (or take) a SentencePiece model and encode the corpora.

    Args:
        config: a `TokenizationConfig` as a mapping.
        store: directory, or s3://bucket/prefix, where artifacts are found by content.
        corpus: output of prepare_corpus.
        shards: where tokenizer and token shards are.
        metrics: sequences, tokens, vocabulary size.
        num_workers: Ray Data workers, of a cluster pods; 0 tokenizes inside this process.
        cluster: a `ClusterConfig` as a mapping: the workers are those of a RayJob; empty: of this step.
        task_config: the step's cores and memory, which are those of a RayJob's workers too.
    """
    from components.platform import artifacts, keys, launchers, runtime, sources, tracking, work
    from infoxlm_core.config import TokenizationConfig

    with runtime.ending_clearly(store, "tokenize_corpus"):
        checked = TokenizationConfig.parse(config, "tokenization")
        source, digest = artifacts.read_pointer(corpus)
        given: tuple[str, ...] = ()
        if checked.model:
            from infoxlm_core.model import tokenizers  # takes seconds

            given = (str(sources.fetch_model(checked.model, artifacts.local(store), only=tokenizers.MODEL)),)
        name = keys.artifact_key("shards", checked, digest, *keys.digest_inputs(given))
        wanted = work.Work("tokenize_corpus", store, "shards", name, config, num_workers, {"corpus": source})
        made = launchers.run(wanted, cluster, task_config)
        artifacts.publish(shards, made)
        counts = artifacts.log_facts(made, metrics)
        run = tracking.open_run(store)
        run.log_params({"tokenization": checked.model_dump(mode="json")})
        run.log_metrics(counts)
