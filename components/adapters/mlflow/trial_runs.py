"""The trials of a sweep as MLflow runs, nested in the run of their pipeline.

All trials have the tag `seed`. Trials of an ablation have the tags `variant`, `what` and `rank`; trials of a suite have
`point` (the trial's name), `model`, `task` and `grid`, and their scores are an artifact of the run.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from components.adapters.mlflow import connection, runs
from components.adapters.mlflow.errors import translate_errors
from components.adapters.mlflow.runs import PARENT, RUN_TAG
from infoxlm_core import user_files
from infoxlm_core.errors import InputError
from infoxlm_core.results import evidence
from infoxlm_core.results.evidence import Outcomes
from infoxlm_core.results.trials import SCORES, Trial, read_scores
from infoxlm_core.tasks.scores import Scores

if TYPE_CHECKING:
    from mlflow.entities import Run


EVALUATION = "evaluation"
"""Folder of a run that holds the files of its evaluation."""
_MAX_RUNS = 5000  # runs that one search returns
_MAX_LISTED = 10  # ablations that an error message lists


class TrialRun(NamedTuple):
    """A trial, as MLflow stores it."""

    run_id: str
    trial: Trial
    status: str
    metrics: Mapping[str, float]
    """Empty if it is not finished."""

    def read_scores(self) -> Scores:
        """Return the scores of a suite's trial, which are an artifact of its run."""
        with self._downloaded(SCORES) as (scores_file,):
            return read_scores(scores_file)

    def read_outcomes(self) -> Outcomes | None:
        """Return which questions the trial of an ablation answered correctly, or None if it stored no evaluation."""
        from mlflow import MlflowClient

        answers_path = f"{EVALUATION}/{evidence.FILE}"
        with translate_errors(f"evaluation of MLflow run {self.run_id}"):
            stored_files = [item.path for item in MlflowClient().list_artifacts(self.run_id, EVALUATION)]
        if answers_path not in stored_files:
            return None
        with self._downloaded(answers_path, f"{EVALUATION}/scores.json") as (answers_file, scores_file):
            scores = evidence.read_scores(scores_file.parent)
            return Outcomes(evidence.read(answers_file, scores["model"]), scores["pivot"])

    def read_json(self, path: str) -> dict[str, Any]:
        """Return the content of a JSON file among the artifacts of the trial's run."""
        with self._downloaded(path) as (json_file,):
            return user_files.read_json(json_file, dict[str, Any], "run the trial again")

    @contextmanager
    def _downloaded(self, *paths: str) -> Iterator[list[Path]]:
        """Download artifacts of the trial's run into a temporary folder, and yield the paths of the local files.

        MLflow may put a file elsewhere than at its path within the run, so only the paths that it returns are used.
        """
        from mlflow import MlflowClient

        client = MlflowClient()
        subject = f"{paths[0]} of MLflow run {self.run_id}"
        with translate_errors(subject), tempfile.TemporaryDirectory() as folder:
            yield [Path(client.download_artifacts(self.run_id, path, folder)) for path in paths]


def open_trial(parent: str, pipeline_run: str, trial: Trial) -> str:
    """Find or create the run of a trial, nested in `parent`. Open it and return its id.

    Args:
        parent: MLflow run of the pipeline run.
        pipeline_run: id of the pipeline run; with the trial's name it identifies the run of the trial.
        trial: the trial of an ablation or a suite.
    """
    from mlflow import MlflowClient
    from mlflow.entities import RunTag

    client = MlflowClient()
    with translate_errors(f"MLflow run of {trial.name}"):
        run_tags = {RUN_TAG: f"{pipeline_run}/{trial.name}", PARENT: runs.find_outermost_run(client, parent)}
        tags = _make_trial_tags(trial) | run_tags
        experiment = client.get_experiment(client.get_run(parent).info.experiment_id).name
        run_id = runs.find_or_create(client, experiment, trial.name, tags)
        client.update_run(run_id, status="RUNNING")
        client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])
    return run_id


def _make_trial_tags(trial: Trial) -> dict[str, str]:
    """Return the tags by which `_make_trial_run` recognizes a trial."""
    if trial.task:  # only trials of a suite have a task
        grid = " ".join(f"{field}={value}" for field, value in sorted(trial.grid.items()))
        tags = {"point": trial.name, "model": trial.model, "task": trial.task, "grid": grid}
    else:
        tags = {"variant": trial.model, "what": trial.what, "rank": str(trial.rank)}
    return {**tags, "seed": str(trial.seed)}


def read_name(run_id: str) -> str:
    """Return the name of the outermost run that contains a run, or of the run itself."""
    from mlflow import MlflowClient

    client = MlflowClient()
    with translate_errors(f"MLflow run {run_id}"):
        outermost_id = runs.find_outermost_run(client, run_id)
        return client.get_run(outermost_id).info.run_name or run_id


def read_trials(run_id: str) -> list[TrialRun]:
    """Return the trials of a sweep, oldest first, whose pipeline run has or contains the MLflow run `run_id`."""
    from mlflow import MlflowClient

    client = MlflowClient()
    with translate_errors(f"runs nested in MLflow run {run_id}"):
        parent = runs.find_outermost_run(client, run_id)  # KFP nests the run of each task in the run of its pipeline
        experiment = client.get_run(parent).info.experiment_id
        trial_filter = f"tags.`{PARENT}` = '{parent}' AND tags.seed LIKE '%'"  # only trials have the tag `seed`
        oldest_first = ["start_time ASC", "run_id ASC"]
        trial_runs = client.search_runs([experiment], trial_filter, max_results=_MAX_RUNS, order_by=oldest_first)
        return [_make_trial_run(run) for run in trial_runs]


def _make_trial_run(run: "Run") -> TrialRun:
    """Return the trial that the tags of an MLflow run describe, with its metrics if the run is finished."""
    tags = run.data.tags
    is_of_ablation = "variant" in tags
    if is_of_ablation:
        trial = Trial.parse(tags)
    else:
        seed = int(tags["seed"])
        trial = Trial(tags["point"], tags["model"], seed, tags["task"])
    metrics = dict(run.data.metrics) if run.info.status == "FINISHED" else {}
    return TrialRun(run.info.run_id, trial, run.info.status, metrics)


def find_ablation(ablation: str, store: Path) -> str:
    """Return the id of the run of an ablation.

    Args:
        ablation: `latest`, an id, or a name, which means the newest ablation of this name.
        store: where MLflow's database is if MLFLOW_TRACKING_URI names no server.

    Raises:
        InputError: there is no such run, or it has no trials.
    """
    client = connection.connect_existing(store)
    with translate_errors("runs of ablations"):
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        variant_filter = "tags.variant LIKE '%'"  # only trials of ablations have the tag `variant`
        newest_first = ["start_time DESC", "run_id ASC"]
        trials = client.search_runs(experiments, variant_filter, max_results=_MAX_RUNS, order_by=newest_first)
        names_by_id: dict[str, str] = {}  # the ablation with the newest trial comes first
        for trial in trials:
            parent = trial.data.tags.get(PARENT)
            if parent is not None and parent not in names_by_id:
                names_by_id[parent] = read_name(parent)
    if not names_by_id:
        raise InputError(f"{connection.tracking_uri(store)} has no ablation: run `infoxlm ablate` first")
    for run_id, name in names_by_id.items():
        if ablation in ("latest", run_id, name):
            return run_id
    newest_ablations = list(names_by_id.items())[:_MAX_LISTED]
    available = ", ".join(f"{name} ({run_id})" for run_id, name in newest_ablations)
    raise InputError(f"no ablation {ablation!r}; known are {available}")
