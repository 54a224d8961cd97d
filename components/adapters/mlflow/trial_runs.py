"""The trials of a sweep as MLflow runs, nested in the pipeline run's MLflow run.

All trials have the tag `seed`. An ablation's trials also have the tags `variant`, `what` and `rank`. A suite's trials
have the tags `point` (the trial's name), `model`, `task` and `grid`, and store their scores as an artifact of the run.
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
"""Directory of a run with its evaluation files."""
_MAX_RUNS = 5000  # largest number of runs in a search result
_MAX_LISTED = 10  # largest number of ablations in an error message


class TrialRun(NamedTuple):
    """A sweep's trial in MLflow."""

    run_id: str
    trial: Trial
    status: str
    metrics: Mapping[str, float]
    """Metrics by name; empty until the trial is finished."""

    def read_scores(self) -> Scores:
        """Read the scores of a suite's trial from the run's artifacts."""
        with self._downloaded(SCORES) as (scores_file,):
            return read_scores(scores_file)

    def read_outcomes(self) -> Outcomes | None:
        """Return which questions an ablation's trial answered correctly, or None if its evaluation is not stored.

        Outcomes also name the pivot, the language that every translation pair contains.
        """
        from mlflow import MlflowClient

        answers_path = f"{EVALUATION}/{evidence.FILE}"
        with translate_errors(f"evaluation of MLflow run {self.run_id}"):
            stored_files = [item.path for item in MlflowClient().list_artifacts(self.run_id, EVALUATION)]
        if answers_path not in stored_files:
            return None
        with self._downloaded(answers_path, f"{EVALUATION}/scores.json") as (answers_file, scores_file):
            scores = evidence.read_scores(scores_file.parent)
            # The file may also have the answers of the model that the training started from.
            return Outcomes(evidence.read(answers_file, scores["model"]), scores["pivot"])

    def read_json(self, path: str) -> dict[str, Any]:
        """Return the content of a JSON file in the run's artifacts."""
        with self._downloaded(path) as (json_file,):
            return user_files.read_json(json_file, dict[str, Any], "run the trial again")

    @contextmanager
    def _downloaded(self, *paths: str) -> Iterator[list[Path]]:
        """Download artifacts of the trial's run to a temporary directory, and yield their local paths.

        The local paths come from MLflow, because they may differ from the paths in the run.
        """
        from mlflow import MlflowClient

        client = MlflowClient()
        subject = f"{paths[0]} of MLflow run {self.run_id}"
        with translate_errors(subject), tempfile.TemporaryDirectory() as directory:
            yield [Path(client.download_artifacts(self.run_id, path, directory)) for path in paths]


def open_trial(parent: str, pipeline_run: str, trial: Trial) -> str:
    """Find or create a trial's nested run, and open it. Return the id of the nested run.

    Args:
        parent: id of the pipeline run's MLflow run.
        pipeline_run: id of the pipeline run. Together with the trial's name, it identifies the nested run.
        trial: trial of an ablation or a suite.
    """
    from mlflow import MlflowClient
    from mlflow.entities import RunTag

    client = MlflowClient()
    with translate_errors(f"MLflow run of {trial.name}"):
        # `read_trials` finds the trials of a sweep by their outermost run, whichever pipeline task opened them.
        run_tags = {RUN_TAG: f"{pipeline_run}/{trial.name}", PARENT: runs.find_outermost_run(client, parent)}
        tags = _make_trial_tags(trial) | run_tags
        experiment_name = client.get_experiment(client.get_run(parent).info.experiment_id).name
        run_id = runs.find_or_create(client, experiment_name, trial.name, tags)
        client.update_run(run_id, status="RUNNING")  # an earlier attempt may have ended the run
        client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])
    return run_id


def _make_trial_tags(trial: Trial) -> dict[str, str]:
    """Return the tags from which `_make_trial_run` restores a trial."""
    if trial.task:  # only a suite's trials have a task
        grid = " ".join(f"{field}={value}" for field, value in sorted(trial.grid.items()))
        tags = {"point": trial.name, "model": trial.model, "task": trial.task, "grid": grid}
    else:
        tags = {"variant": trial.model, "what": trial.what, "rank": str(trial.rank)}
    return {**tags, "seed": str(trial.seed)}


def read_name(run_id: str) -> str:
    """Return the name of the outermost run that contains a run, or the run's own name."""
    from mlflow import MlflowClient

    client = MlflowClient()
    with translate_errors(f"MLflow run {run_id}"):
        outermost_id = runs.find_outermost_run(client, run_id)
        return client.get_run(outermost_id).info.run_name or run_id


def read_trials(run_id: str) -> list[TrialRun]:
    """Return all trials of a sweep, oldest first.

    Args:
        run_id: id of the sweep's MLflow run, or of a run nested in it.
    """
    from mlflow import MlflowClient

    client = MlflowClient()
    with translate_errors(f"runs nested in MLflow run {run_id}"):
        sweep_id = runs.find_outermost_run(client, run_id)  # KFP nests each task's run in the pipeline run's run
        experiment_id = client.get_run(sweep_id).info.experiment_id
        trial_filter = f"tags.`{PARENT}` = '{sweep_id}' AND tags.seed LIKE '%'"  # only trials have the tag `seed`
        oldest_first = ["start_time ASC", "run_id ASC"]
        trial_runs = client.search_runs([experiment_id], trial_filter, max_results=_MAX_RUNS, order_by=oldest_first)
        return [_make_trial_run(run) for run in trial_runs]


def _make_trial_run(run: "Run") -> TrialRun:
    """Restore a trial from the tags of an MLflow run. Add its metrics if the run is finished."""
    tags = run.data.tags
    if "variant" in tags:  # only an ablation's trials have this tag
        trial = Trial.parse(tags)
    else:
        trial = Trial(tags["point"], tags["model"], int(tags["seed"]), tags["task"])
    metrics = dict(run.data.metrics) if run.info.status == "FINISHED" else {}
    return TrialRun(run.info.run_id, trial, run.info.status, metrics)


def find_ablation(ablation: str, store: Path) -> str:
    """Return the id of an ablation's MLflow run.

    Args:
        ablation: `latest`, a run id, or a run name. If several runs have the name, the newest is chosen.
        store: directory with MLflow's database if MLFLOW_TRACKING_URI is not set.

    Raises:
        InputError: the run does not exist or has no trials.
    """
    client = connection.connect_existing(store)
    with translate_errors("runs of ablations"):
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        variant_filter = "tags.variant LIKE '%'"  # only an ablation's trials have the tag `variant`
        newest_first = ["start_time DESC", "run_id ASC"]
        trials = client.search_runs(experiments, variant_filter, max_results=_MAX_RUNS, order_by=newest_first)
        names_by_id: dict[str, str] = {}  # in the order of their newest trials
        for trial in trials:
            parent = trial.data.tags.get(PARENT)
            if parent is not None and parent not in names_by_id:  # once per parent: `read_name` sends several requests
                names_by_id[parent] = read_name(parent)
    if not names_by_id:
        raise InputError(f"{connection.tracking_uri(store)} has no ablation: run `infoxlm ablate` first")
    for run_id, name in names_by_id.items():
        if ablation in ("latest", run_id, name):
            return run_id
    newest_ablations = list(names_by_id.items())[:_MAX_LISTED]
    available = ", ".join(f"{name} ({run_id})" for run_id, name in newest_ablations)
    raise InputError(f"no ablation {ablation!r}; known are {available}")
