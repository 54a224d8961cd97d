"""Component: raw text files -> clean, deduplicated, decontaminated corpora."""

from kfp import dsl

from components.stage import stage


@stage
def prepare_corpus(
    config: dict,
    store: str,
    corpus: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    num_workers: int = 0,
):
    """Prepare corpora from text files, catalogs and tables, here or on S3.

    Args:
        config: a `PreparationConfig` as a mapping.
        store: directory where artifacts are found by content.
        corpus: where the prepared corpora are.
        metrics: sentences and pairs kept.
        num_workers: Ray Data workers; 0 prepares inside this process.
    """
    import os
    from pathlib import Path

    from components import runtime
    from components.adapters import data_source, mlflow_runs, object_store, ray_data
    from infoxlm_core import preparation
    from infoxlm_core.config import PreparationConfig

    with runtime.ending_clearly(store, "prepare_corpus"):
        checked = PreparationConfig.parse(config, "preparation")
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "infoxlm"

        def fetch(path: str) -> str:
            return str(data_source.fetch(path, runtime.local(store))) if object_store.is_url(path) else path

        sources = [source.model_copy(update={"path": tuple(map(fetch, source.paths))}) for source in checked.corpora]
        local = checked.model_copy(update={"corpora": tuple(sources)})

        def prepare(output: Path) -> dict:
            with ray_data.workers(num_workers) as spread:
                return preparation.facts(preparation.prepare(local, output, cache, spread))

        name = runtime.key("corpus", checked, *preparation.digest_sources(local))
        made = runtime.make(store, "corpus", name, prepare)
        runtime.publish(corpus, made)
        counts = runtime.facts(made, metrics)
        run = runtime.run_id(store)
        mlflow_runs.log_params(run, {"preparation": checked.model_dump(mode="json", exclude={"corpora"})})
        mlflow_runs.log_metrics(run, counts)
        mlflow_runs.log_artifacts(run, made / "report.json", "preparation")
