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
    """Train (or take) a SentencePiece model and encode the corpora.

    Args:
        config: a `TokenizationConfig` as a mapping.
        store: directory, or s3://bucket/prefix, where artifacts are found by content.
        corpus: output of prepare_corpus.
        shards: where tokenizer and token shards are.
        metrics: sequences, tokens, vocabulary size.
        num_workers: Ray Data workers, of a cluster pods; 0 tokenizes inside this process.
        cluster: a `ClusterConfig` as a mapping: the workers are those of a RayJob; empty: of this step.
        task_config: the environment of the step, for the pods of the RayJob.
    """
    from components.platform import artifacts, sources
    from components.platform.stage_run import stage_run
    from infoxlm_core.config import TokenizationConfig
    from infoxlm_core.training import fingerprint

    with stage_run("tokenize_corpus", store) as step:
        checked = TokenizationConfig.parse(step.read(config), "tokenization")
        text, digest = artifacts.read_pointer(corpus)
        given = sources.fetch_tokenizer(checked.model, step.here) if checked.model else None
        key = artifacts.key_of("shards", checked, digest, *fingerprint.digest_inputs(given))
        made = step.make(
            "shards",
            key,
            checked,
            num_workers=num_workers,
            cluster=cluster,
            task_config=task_config,
            inputs={"corpus": text},
        )
        step.report_cost(made)
        counts = step.publish(shards, made, metrics)
        # under names of their own: in MLflow `tokens` is a curve of the training
        step.report({f"shards/{name}": count for name, count in counts.items()}, tokenization=checked)
