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

    from components import stage
    from components.adapters import mlflow_tracker
    from infoxlm_core import preparation
    from infoxlm_core.config import PreparationConfig

    with stage.ending_clearly(store, "prepare_corpus"):
        checked = PreparationConfig.parse(config, "preparation")
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "infoxlm"
        name = stage.key("corpus", checked, *preparation.digest_sources(checked))
        made = stage.make(
            store, "corpus", name, lambda output: preparation.facts(preparation.prepare(checked, output, cache))
        )
        stage.publish(corpus, made)
        counts = stage.facts(made, metrics)
        run = stage.run_id(store)
        mlflow_tracker.log_params(run, {"preparation": checked.model_dump(mode="json", exclude={"corpora"})})
        mlflow_tracker.log_metrics(run, counts)
        mlflow_tracker.log_artifacts(run, made / "report.json", "preparation")
