"""Component: train or load a tokenizer, and encode corpora as token shards."""

from typing import Any

from kfp import dsl

from components.platform.stage import launching_stage


@launching_stage
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
    """Encode the corpora with a new SentencePiece model, or with the tokenizer named in the config.

    Args:
        config: a `TokenizationConfig` as a mapping.
        store: directory or s3://bucket/prefix of artifacts.
        corpus: output of prepare_corpus.
        shards: the tokenizer and the token shards.
        metrics: number of sequences and tokens, and the vocabulary size.
        num_workers: number of Ray workers (pods on a cluster); 0 tokenizes in this process.
        cluster: a `ClusterConfig` as a mapping, for workers in a RayJob; if empty, workers run in this step.
        task_config: the step's environment, passed to the pods of the RayJob.
    """
    from components.platform import artifacts, sources
    from components.platform.stage_run import stage_run
    from infoxlm_core.config import TokenizationConfig

    with stage_run("tokenize_corpus", store) as step:
        tokenization_config = TokenizationConfig.parse(step.read(config), "tokenization")
        corpus_location, corpus_digest = artifacts.read_pointer(corpus)
        tokenizer_digests: list[str] = []
        if tokenization_config.model:
            _, tokenizer_digests = sources.fetch_tokenizer(tokenization_config.model, step.local_store)
        key = artifacts.compute_key("shards", tokenization_config, corpus_digest, *tokenizer_digests)
        inputs = {"corpus": corpus_location}
        directory = step.build("shards", key, tokenization_config, num_workers, cluster, task_config, inputs)
        step.report_cost(directory)
        counts = step.publish(shards, directory, metrics)
        # The prefix prevents a collision with the training curve `tokens`.
        step.report({f"shards/{name}": count for name, count in counts.items()}, tokenization=tokenization_config)
