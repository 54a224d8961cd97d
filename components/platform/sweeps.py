"""What a sweep found -> an artifact, a page and metrics: the end of an ablation and of a suite."""

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from components.platform import artifacts, tracking
from infoxlm_core import manifests
from infoxlm_core.results.ablation import Comparison
from infoxlm_core.results.summary import Summary
from infoxlm_core.tasks.task import Scores


def read_scores(run: tracking.Run) -> dict[str, Scores]:
    """The scores of a suite's trials that are finished, by name; those that nobody works on any more are ended."""
    found = run.trials()
    for one in found:
        if one.status == "RUNNING":
            tracking.tracker().find_run(one.run_id).end("FAILED")
    return {one.trial.name: one.read_scores() for one in found if one.status == "FINISHED"}


def publish(
    store: str,
    run: tracking.Run,
    kind: str,
    found: Any,
    write: Callable[[Path, Any], None],
    comparison: Any,
    report: Any,
    metrics: Any,
) -> None:
    """Write the files of a sweep into the store, and tell KFP and the tracker.

    Args:
        store: directory where artifacts are found by content.
        run: of the sweep.
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
    run.log_metrics({re.sub(r"[^\w.:/ -]", "_", metric): value for metric, value in flat.items()})
    run.log_artifacts(made, kind)
    if summary.unfinished:
        logging.warning("not finished, and not in the numbers: %s", ", ".join(summary.unfinished))
