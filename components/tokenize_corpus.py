"""Component: prepared corpora -> SentencePiece model and token shards."""

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
    """Train a SentencePiece model, or take one, and encode the corpora with it.

    Args:
        config: a `TokenizationConfig` as a mapping.
        store: directory, or s3://bucket/prefix, where artifacts are found by content.
        corpus: output of prepare_corpus.
        shards: the tokenizer and the token shards.
        metrics: numbers of sequences and tokens, and size of the vocabulary.
        num_workers: Ray Data workers, of a cluster pods; 0 tokenizes in this process.
        cluster: a `ClusterConfig` as a mapping: the workers are those of a RayJob; empty: of this step.
        task_config: the environment of the step, for the pods of the RayJob.
    """
    from components.platform import artifacts, sources
    from components.platform.stage_run import stage_run
    from infoxlm_core.config import TokenizationConfig
    from infoxlm_core.training import fingerprint

    with stage_run("tokenize_corpus", store) as step:
        checked = TokenizationConfig.parse(step.read(config), "tokenization")
        location, digest = artifacts.read_pointer(corpus)
        tokenizer = sources.fetch_tokenizer(checked.model, step.here) if checked.model else None
        key = artifacts.key_of("shards", checked, digest, *fingerprint.digest_inputs(tokenizer))
        inputs = {"corpus": location}
        directory = step.make("shards", key, checked, num_workers, cluster, task_config, inputs)
        step.report_cost(directory)
        counts = step.publish(shards, directory, metrics)
        # with a prefix, since `tokens` is a curve of the training in MLflow
        step.report({f"shards/{name}": count for name, count in counts.items()}, tokenization=checked)
