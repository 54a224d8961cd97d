"""What a sweep found -> an artifact, a page and metrics: the end of an ablation and of a suite."""

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from components.adapters.mlflow import runs as mlflow_runs
from components.platform import artifacts
from infoxlm_core import manifests
from infoxlm_core.results.ablation import Comparison
from infoxlm_core.results.summary import Summary


def publish(
    store: str,
    run: str,
    kind: str,
    found: Any,
    write: Callable[[Path, Any], None],
    comparison: Any,
    report: Any,
    metrics: Any,
) -> None:
    """Write the files of a sweep into the store, and tell KFP and MLflow.

    Args:
        store: directory where artifacts are found by content.
        run: MLflow run of the sweep.
        kind: of the artifact; its page is called so too.
        found: a `Summary` or a `Comparison`.
        write: writes its files into a directory.
        comparison: KFP's artifact, which points to them.
        report: KFP's page.
        metrics: KFP's metrics.
    """
    summary: Summary | Comparison = found
    flat = summary.flatten()
    name = manifests.digest([summary.to_dict(), manifests.VERSIONS[kind]]).removeprefix("sha256:")[:16]

    def build(output: Path) -> dict[str, float]:
        write(output, summary)
        return flat

    made = artifacts.get_or_build(store, kind, name, build)
    artifacts.publish(comparison, made)
    shutil.copy(made / f"{kind}.html", report.path)
    artifacts.log_facts(made, metrics)
    mlflow_runs.log_metrics(run, {re.sub(r"[^\w.:/ -]", "_", metric): value for metric, value in flat.items()})
    mlflow_runs.log_artifacts(run, made, kind)
    if summary.unfinished:
        logging.warning("not finished, and not in the numbers: %s", ", ".join(summary.unfinished))
