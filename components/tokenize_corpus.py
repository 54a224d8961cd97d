"""Component: prepared corpora -> SentencePiece model and token shards."""

from kfp import dsl

from components.stage import stage


@stage
def tokenize_corpus(
    config: dict,
    store: str,
    corpus: dsl.Input[dsl.Dataset],
    shards: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    num_workers: int = 0,
):
    """Train (or take) a SentencePiece model and encode the corpora.

    Args:
        config: a `TokenizationConfig` as a mapping.
        store: directory where artifacts are found by content.
        corpus: output of prepare_corpus.
        shards: where tokenizer and token shards are.
        metrics: sequences, tokens, vocabulary size.
        num_workers: Ray Data workers; 0 tokenizes inside this process.
    """
    from pathlib import Path

    from components import runtime
    from components.adapters import mlflow_runs, model_source, ray_data
    from infoxlm_core import tokenization
    from infoxlm_core.config import TokenizationConfig
    from infoxlm_core.model import tokenizers

    with runtime.ending_clearly(store, "tokenize_corpus"):
        checked = TokenizationConfig.parse(config, "tokenization")
        source, digest = runtime.find(corpus)
        local = checked
        if checked.model:
            found = model_source.fetch(checked.model, runtime.local(store), only=tokenizers.MODEL)
            local = checked.model_copy(update={"model": str(found)})

        def tokenize(output: Path) -> dict:
            with ray_data.workers(num_workers) as spread:
                return tokenization.tokenize(local, source, output, spread)

        name = runtime.key("shards", checked, digest, *runtime.given(local.model))
        made = runtime.make(store, "shards", name, tokenize)
        runtime.publish(shards, made)
        counts = runtime.facts(made, metrics)
        run = runtime.run_id(store)
        mlflow_runs.log_params(run, {"tokenization": checked.model_dump(mode="json")})
        mlflow_runs.log_metrics(run, counts)
