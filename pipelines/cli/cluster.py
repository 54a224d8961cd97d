"""Commands for a cluster: submit, upload, cancel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from components.platform import parameters
from components.settings.cluster import ClusterFile
from infoxlm_core import run_file
from infoxlm_core.errors import ConfigError
from infoxlm_core.results.suite_config import SuiteConfig
from pipelines import submit as kubeflow
from pipelines import trials
from pipelines import upload as uploading
from pipelines.cli.app import CONFIGS, Overrides, Variants, command, find_config, split_list

UPLOADED_VARIANTS = ["MLM", "MLM+TLM", "full"]
"""Variants in the uploaded ablation pipeline, as in `make ablation`."""
Host = Annotated[str, typer.Option(envvar="KF_PIPELINES_ENDPOINT", help="URL of Kubeflow Pipelines: https://…")]


@dataclass(frozen=True)
class TrialSelection:
    """The trials of a sweep that the user has selected."""

    variants: Path = CONFIGS / "ablations.yaml"
    """YAML file with an ablation's variants."""
    only: Sequence[str] = ()
    """Selected variants of an ablation, or tasks of a suite; empty for all."""
    seeds: str = "1,2,3"
    """Comma-separated seeds of an ablation."""


@command()
def submit(
    context: typer.Context,
    config: Annotated[
        Path,
        typer.Argument(
            help="YAML file of the run, or of the suite with --pipeline suite.", parser=find_config, metavar="FILE"
        ),
    ],
    cluster: Annotated[Path, typer.Option(help="YAML file of the cluster; see configs/cluster.yaml.")],
    host: Host = "",
    save: Annotated[
        Path | None,
        typer.Option(
            help="Do not submit. Write the pipeline and its parameters to this YAML file for a manual upload."
        ),
    ] = None,
    pipeline: Annotated[
        Literal[tuple(kubeflow.PIPELINES)],  # type: ignore[valid-type]  # the table is the only list of the names
        typer.Option(
            help="promotion: promote the candidate of the model in the section `registration`. "
            "translation, translation-ablations: FILE needs a section `translation`."
        ),
    ] = "infoxlm",
    variants: Variants = Path("ablations"),
    only: Annotated[
        str, typer.Option(help="Comma-separated variants of ablations, or tasks of suite. Default: all.")
    ] = "",
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds for each variant of ablations.")] = "1,2,3",
    set_: Overrides = None,
    name: Annotated[str, typer.Option(help="Name of the run. Default: from FILE and the pipeline.")] = "",
    experiment: Annotated[str, typer.Option(help="Experiment of the run. Default: from the cluster file.")] = "",
    namespace: Annotated[
        str, typer.Option(help="Namespace of the run, if Kubeflow is multi-user. Default: from the cluster file.")
    ] = "",
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Run every step, and ignore Kubeflow's cache.")] = False,
    wait: Annotated[bool, typer.Option(help="Wait until the run ends, and exit with its exit code.")] = True,
) -> None:
    """Submit a pipeline to Kubeflow Pipelines and follow its run.

    All settings are checked before anything is sent. Ctrl-C stops the command, but not the run. While it waits, this
    command resubmits a run that failed temporarily (exit code 75), up to `submit_again` times. To retry a failed run
    yourself, submit the same settings again: finished artifacts are reused, and training resumes from its last
    checkpoint.
    """
    _check_options(context, pipeline)
    if pipeline.endswith("ablations"):
        trials.check_overrides(set_ or [])
    cluster_file = run_file.load_config(ClusterFile, cluster)
    selection = TrialSelection(variants, split_list(only), seeds)
    arguments = prepare_parameters(pipeline, config, cluster_file, set_ or [], selection)
    # Several pipelines read the same file, so the default name of a run contains the pipeline.
    default_name = config.stem if pipeline in ("infoxlm", "suite") else f"{config.stem}-{pipeline}"
    submission = kubeflow.Submission(
        pipeline=pipeline,
        parameters=parameters.store_if_large(cluster_file.store, arguments),
        name=name or default_name,
        cluster=cluster_file,
        experiment=experiment or cluster_file.experiment,
        use_cache=not no_cache,
        iterations=list_iteration_names(arguments),
    )
    if save:  # needs no server, so --host is checked later
        save.write_text(kubeflow.render_for_cluster(cluster_file, pipeline, submission.parameters), encoding="utf-8")
        account = cluster_file.service_account
        typer.echo(f"wrote {save}: upload it to Kubeflow and run it with service account {account}")
        return
    if not host:
        raise ConfigError("--host is missing. Give the URL of Kubeflow Pipelines, or set KF_PIPELINES_ENDPOINT.")
    client = kubeflow.connect(host, namespace or cluster_file.namespace or "")
    if wait:
        kubeflow.submit_and_wait(client, host, submission, typer.echo)
    else:
        run_id = kubeflow.create_run(client, host, submission)
        typer.echo(f"run         {run_id}\npage        {kubeflow.make_run_url(host, run_id)}")


@command()
def upload(
    cluster: Annotated[
        Path, typer.Argument(help="YAML file of the cluster; see configs/cluster.yaml.", metavar="FILE")
    ],
    host: Host,
    run: Annotated[
        Path,
        typer.Option(
            help="YAML file of the run whose settings become the default parameters.",
            parser=find_config,
            metavar="FILE",
            show_default="demo",
        ),
    ] = Path("demo"),
    suite: Annotated[
        Path | None,
        typer.Option(
            help="YAML file of the suite. Without it, Kubeflow asks for the suite of each run.",
            parser=find_config,
            metavar="FILE",
        ),
    ] = None,
    set_: Overrides = None,
    namespace: Annotated[
        str,
        typer.Option(help="Namespace that may see the pipelines. Default: from the cluster file, else all namespaces."),
    ] = "",
) -> None:
    """Upload all pipelines to Kubeflow with default parameters, so that runs can be started in its web interface.

    In the form *Create run*, the parameter `overrides` changes single settings, such as
    {"pretraining.optimization.steps": 2000}. An unchanged pipeline is not uploaded again.
    """
    cluster_file = run_file.load_config(ClusterFile, cluster)
    defaults = {}  # collected first, so that an invalid setting prevents all uploads
    for pipeline in kubeflow.PIPELINES:
        if pipeline == "suite" and suite:
            values = prepare_parameters(pipeline, suite, cluster_file)
        elif pipeline == "suite" or pipeline.startswith("translation"):  # Kubeflow asks for the settings
            values = kubeflow.select_parameters(pipeline, cluster_file.make_parameters())
        else:
            selection = TrialSelection(only=UPLOADED_VARIANTS)
            values = prepare_parameters(pipeline, run, cluster_file, set_ or [], selection)
        defaults[pipeline] = parameters.store_if_large(cluster_file.store, values)
    namespace = namespace or cluster_file.namespace or ""
    client = kubeflow.connect(host, namespace)
    for pipeline, values in defaults.items():
        version = uploading.upload_version(client, host, cluster_file, pipeline, values, namespace)
        result = "uploaded" if version.is_new else "unchanged"
        typer.echo(f"{result:9}   {version.name}    {version.page}")
    typer.echo(
        f"start runs with service account {cluster_file.service_account}, in experiment {cluster_file.experiment}"
    )


@command()
def cancel(run: Annotated[str, typer.Argument(help="Id of the run, as `submit` prints it.")], host: Host) -> None:
    """Terminate a run on a cluster. Finished artifacts are kept, and the next run resumes from them.

    Kubeflow kills the step after about a second. If the step cannot delete its training job in this time, the job
    saves a checkpoint and ends 15 minutes later.
    """
    client = kubeflow.connect(host)
    with kubeflow.translate_errors(host):
        client.terminate_run(run)
    typer.echo(f"asked Kubeflow to terminate run {run}")


def _check_options(context: typer.Context, pipeline: str) -> None:
    """Raise ConfigError if the user gave an option that selects trials, but the pipeline does not use this option."""
    if pipeline.endswith("ablations"):
        return
    unused_options = ("variants", "seeds") if pipeline == "suite" else ("variants", "only", "seeds")
    for option in unused_options:
        source = context.get_parameter_source(option)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(
                f"--{option} has no effect on the pipeline {pipeline}. Remove it, or choose another --pipeline."
            )


def prepare_parameters(
    pipeline: str,
    config: Path,
    cluster_file: ClusterFile,
    overrides: Sequence[str] = (),
    selection: TrialSelection = TrialSelection(),
) -> dict[str, Any]:
    """Read and check the settings of a run or suite, and return the parameters of its pipeline.

    Args:
        pipeline: name of a compiled pipeline.
        config: YAML file of a run, or of a suite for the pipeline `suite`.
        cluster_file: settings of the cluster on which the pipeline will run.
        overrides: overrides of settings in `config`.
        selection: selected trials of a sweep.

    Raises:
        ConfigError: a setting is invalid, or the run does not fit the cluster.
    """
    if pipeline == "suite":
        settings = _prepare_suite(config, cluster_file, overrides, selection)
    elif pipeline == "promotion":
        registration = run_file.load(config, overrides).registration
        settings = {"model": f"models:/{registration.name}@candidate", "gate": registration.gates}
    else:
        settings = _prepare_run(pipeline, config, cluster_file, overrides, selection)
    # A pipeline has only some of the cluster's parameters and of the run's sections.
    return kubeflow.select_parameters(pipeline, cluster_file.make_parameters() | settings)


def _prepare_suite(
    config: Path, cluster_file: ClusterFile, overrides: Sequence[str], selection: TrialSelection
) -> dict[str, Any]:
    """Return the parameters `suite` and `num_workers` of the suite pipeline.

    Raises:
        ConfigError: a setting is invalid, or the suite has more trials than Argo can run.
    """
    from infoxlm_core.results.trials import plan

    suite = run_file.load_config(SuiteConfig, config, overrides).choose(selection.only)
    parameters.split_trials(plan(suite))  # raises ConfigError if the suite is too large
    gpus = cluster_file.pool.gpus
    num_workers = gpus if gpus > 1 else 0  # with a single GPU, the step itself trains
    return {"suite": suite.listed(), "num_workers": num_workers}


def _prepare_run(
    pipeline: str, config: Path, cluster_file: ClusterFile, overrides: Sequence[str], selection: TrialSelection
) -> dict[str, Any]:
    """Return a run's settings by section, and the trials of an ablation.

    Raises:
        ConfigError: a setting is invalid, or the run does not fit the pipeline or the cluster.
    """
    run = run_file.load(config, overrides)
    run.check_whole_run()
    trains_translator = pipeline.startswith("translation")
    if trains_translator and run.translation is None:
        raise ConfigError(f"{config} has no section translation. Add it, or choose another pipeline.")
    if run.translation is not None and not trains_translator:
        matching_pipeline = "translation" if pipeline == "infoxlm" else "translation-ablations"
        raise ConfigError(
            f"{config} has a section translation, but the pipeline {pipeline} trains no translator. Use `infoxlm "
            f"submit` with --pipeline {matching_pipeline}, or remove the section."
        )
    cluster_file.pool.split_workers(run.num_workers)  # raises ConfigError unless the workers fill whole pods
    settings = run.model_dump(mode="json", exclude_none=True)  # KFP has no None
    if pipeline.endswith("ablations"):
        seeds = trials.parse_seeds(selection.seeds)
        planned_trials = trials.plan_trials(run, selection.variants, selection.only, seeds)
        trial_count = len(planned_trials)
        step_count = 3 * trial_count  # each iteration of the loop has three steps
        parameters.check_loop_size(step_count, f"{trial_count} trials", "fewer variants (--only) or seeds at a time")
        settings["trials"] = planned_trials
    return settings


def list_iteration_names(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of a loop's iterations, such as "FIRST_TRIAL" or "FIRST_TRIAL and 3 more".

    Args:
        arguments: arguments of the pipeline, with the key `trials` for an ablation or `suite` for a suite.
    """
    from infoxlm_core.results import trials as suite_trials

    if "trials" in arguments:
        return [suite_trials.Trial.parse(item["trial"]).name for item in arguments["trials"]]
    if "suite" not in arguments:
        return []
    planned_trials = suite_trials.plan(SuiteConfig.parse(arguments["suite"], "suite"))
    trial_names = [planned.trial.name for planned in planned_trials]
    iteration_names = []
    # An iteration measures a batch of trials, because Argo limits the number of steps.
    for first_name, *other_names in parameters.split_trials(trial_names):
        iteration_names.append(f"{first_name} and {len(other_names)} more" if other_names else first_name)
    return iteration_names
