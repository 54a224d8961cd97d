"""Commands on a cluster: submit, upload, cancel."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from components.platform import parameters
from components.settings.cluster import ClusterFile
from infoxlm_core import run_file
from infoxlm_core.errors import ConfigError
from infoxlm_core.results.suite_config import SuiteConfig
from pipelines.cli.app import Overrides, Variants, app, config_file, report_errors, split_list

UPLOADED_VARIANTS = ["MLM", "MLM+TLM", "full"]
"""Variants of the ablation that is uploaded: those of `make ablation`."""
Host = Annotated[str, typer.Option(envvar="KF_PIPELINES_ENDPOINT", help="Address of Kubeflow Pipelines: https://…")]


@app.command()
def submit(
    config: Annotated[
        Path,
        typer.Argument(
            help="YAML file of the run; with --pipeline suite that of a suite.", parser=config_file, metavar="FILE"
        ),
    ],
    cluster: Annotated[Path, typer.Option(help="YAML file of the cluster; see configs/cluster.yaml.")],
    host: Host = "",
    save: Annotated[
        Path | None,
        typer.Option(help="Send nothing: write the pipeline with its parameters to a YAML file for Kubeflow's page."),
    ] = None,
    pipeline: Annotated[
        Literal["infoxlm", "ablations", "suite", "promotion"],
        typer.Option(help="promotion: of the candidate that the file's registration names, by its gate."),
    ] = "infoxlm",
    variants: Variants = Path("ablations"),
    only: Annotated[str, typer.Option(help="Of ablations: variants; of suite: tasks. Separated by commas.")] = "",
    seeds: Annotated[str, typer.Option(help="Of ablations: seeds of every variant.")] = "1,2,3",
    set_: Overrides = None,
    name: Annotated[str, typer.Option(help="Of the run; default: those of file and pipeline.")] = "",
    experiment: Annotated[str, typer.Option(help="Default: that of the cluster's file.")] = "",
    namespace: Annotated[
        str, typer.Option(help="Of the run, where Kubeflow has many users. Default: that of the cluster's file.")
    ] = "",
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Run every step, ignoring Kubeflow's cache.")] = False,
    wait: Annotated[bool, typer.Option(help="Follow the run to its end, and end as it does.")] = True,
) -> None:
    """Start a pipeline on a Kubernetes cluster with Kubeflow Pipelines; follow it to its end.

    All settings are checked before anything is sent. Ctrl-C ends the waiting, not the run. The next run with the same
    settings finds what is finished, and a training continues from its checkpoint: to try again, submit again. While
    `submit` waits, it does so itself when a run ends with "try again" (exit code 75), up to `submit_again` times.
    """
    with report_errors():
        place = run_file.load_as(ClusterFile, cluster)
        arguments = prepare(pipeline, config, place, set_ or [], variants, split_list(only), seeds)
        from pipelines import submit as kubeflow

        submission = kubeflow.Submission(
            pipeline,
            parameters.fit(place.store, arguments),
            name or (config.stem if pipeline in ("infoxlm", "suite") else f"{config.stem}-{pipeline}"),
            place,
            experiment or place.experiment,
            not no_cache,
        )
        if save:
            save.write_text(kubeflow.with_defaults(place, pipeline, submission.parameters), encoding="utf-8")
            typer.echo(f"wrote {save}: upload it in Kubeflow, and start it as {place.service_account}")
            return
        if not host:
            raise ConfigError("--host: give the address of Kubeflow Pipelines, or set KF_PIPELINES_ENDPOINT")
        client = kubeflow.connect(host, namespace or place.namespace or "")
        if wait:
            kubeflow.run_to_end(client, host, submission, typer.echo)
        else:
            run = kubeflow.create(client, host, submission)
            typer.echo(f"run         {run}\npage        {kubeflow.page(host, run)}")


@app.command()
def upload(
    cluster: Annotated[
        Path, typer.Argument(help="YAML file of the cluster; see configs/cluster.yaml.", metavar="FILE")
    ],
    host: Host,
    run: Annotated[
        Path,
        typer.Option(
            help="YAML file of the run whose settings are the defaults.",
            parser=config_file,
            metavar="FILE",
            show_default="demo",
        ),
    ] = Path("demo"),
    suite: Annotated[
        Path | None,
        typer.Option(
            help="YAML file of a suite; without one the page asks for it.", parser=config_file, metavar="FILE"
        ),
    ] = None,
    set_: Overrides = None,
    namespace: Annotated[
        str,
        typer.Option(help="Whose users see the pipelines; default: that of the cluster's file, else all users do."),
    ] = "",
) -> None:
    """Upload the pipelines to Kubeflow's page, so that *Create run* needs no typing: it runs the demo on the cluster.

    There, `overrides` changes single fields: {"pretraining.optimization.steps": 2000}. A version is named by release
    and content; the same content is uploaded once.
    """
    with report_errors():
        place, changes = run_file.load_as(ClusterFile, cluster), set_ or []
        from pipelines import submit as kubeflow
        from pipelines import upload as uploading

        defaults = {}
        for pipeline in kubeflow.PIPELINES:
            if pipeline != "suite":
                known = prepare(pipeline, run, place, changes, config_file("ablations"), UPLOADED_VARIANTS, "1,2,3")
            elif suite:
                known = prepare(pipeline, suite, place, [], suite, [], "")
            else:
                known = place_parameters(pipeline, place)
            defaults[pipeline] = parameters.fit(place.store, known)
        namespace = namespace or place.namespace or ""
        client = kubeflow.connect(host, namespace)
        for pipeline, known in defaults.items():
            version = uploading.upload(client, host, place, pipeline, known, namespace)
            typer.echo(f"{'uploaded' if version.new else 'is there'}    {version.name}    {version.page}")
        typer.echo(f"start runs as {place.service_account}, in the experiment {place.experiment}")


@app.command()
def cancel(run: Annotated[str, typer.Argument(help="Id of the run, as `submit` prints it.")], host: Host) -> None:
    """End a run on a cluster. What is finished stays, and the next run continues from there.

    A training saves if there is time: Kubeflow kills the step that follows it after about a second. If the step was too
    slow to delete the job, the job saves and ends itself when no step has followed it for 15 minutes.
    """
    with report_errors():
        from pipelines import submit as kubeflow

        client = kubeflow.connect(host)
        with kubeflow.translate_errors(host):
            client.terminate_run(run)
        typer.echo(f"asked for the end of {run}")


def prepare(
    pipeline: str, config: Path, place: ClusterFile, changes: list[str], variants: Path, only: list[str], seeds: str
) -> dict[str, Any]:
    """Return the parameters of a pipeline, checked as a local run checks them.

    Raises:
        ConfigError: a setting is wrong, or the run does not fit the cluster.
    """
    where = place_parameters(pipeline, place)
    if pipeline == "suite":
        from infoxlm_core.results import trials as points

        suite = run_file.load_as(SuiteConfig, config, changes).choose(only)
        parameters.split_points(points.plan(suite))  # refuses a suite that is too large
        return where | {"suite": suite.listed(), "num_workers": place.pool.gpus if place.pool.gpus > 1 else 0}
    run = run_file.load(config, changes)
    if pipeline == "promotion":
        return where | {"model": f"models:/{run.registration.name}@candidate", "gate": run.registration.gates}
    from pipelines import local, trials
    from pipelines.ablations import ablations
    from pipelines.infoxlm import infoxlm

    place.pool.split(run.num_workers)  # refuses workers that do not fill their pods
    if pipeline == "infoxlm":
        return where | local.sections(run, infoxlm)
    planned = trials.plan(run, variants, only, trials.read_seeds(seeds))
    parameters.check_loop(3 * len(planned), f"{len(planned)} trials", "fewer variants (--only) or seeds at a time")
    return where | local.sections(run, ablations) | {"trials": planned}


def place_parameters(pipeline: str, place: ClusterFile) -> dict[str, Any]:
    """Return the parameters of a pipeline that come from the file of the cluster."""
    from pipelines import submit as kubeflow

    declared = kubeflow.declared(kubeflow.read_compiled(pipeline)[0])
    return {name: value for name, value in place.parameters().items() if name in declared}
