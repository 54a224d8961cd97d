"""Component: raw text files -> clean, deduplicated, decontaminated corpora."""

from kfp import dsl

from components.stage import stage


@stage
def prepare_corpus(config: dict, store: str, corpus: dsl.Output[dsl.Dataset], metrics: dsl.Output[dsl.Metrics]):
    """Prepare corpora from text files, catalogs and tables.

    Args:
        config: a `PreparationConfig` as a mapping.
        store: directory where artifacts are found by content.
        corpus: where the prepared corpora are.
        metrics: sentences and pairs kept.
    """
    import os
    from pathlib import Path

    from components import runtime
    from components.adapters import mlflow_runs
    from infoxlm_core import preparation
    from infoxlm_core.config import PreparationConfig

    with runtime.ending_clearly(store, "prepare_corpus"):
        checked = PreparationConfig.parse(config, "preparation")
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "infoxlm"
        name = runtime.key("corpus", checked, *preparation.digest_sources(checked))
        made = runtime.make(
            store, "corpus", name, lambda output: preparation.facts(preparation.prepare(checked, output, cache))
        )
        runtime.publish(corpus, made)
        counts = runtime.facts(made, metrics)
        run = runtime.run_id(store)
        mlflow_runs.log_params(run, {"preparation": checked.model_dump(mode="json", exclude={"corpora"})})
        mlflow_runs.log_metrics(run, counts)
        mlflow_runs.log_artifacts(run, made / "report.json", "preparation")
