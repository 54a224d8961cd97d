"""Commands that run or plan a pipeline: run, ablate, compare, suite, plan, compile."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infoxlm_core import manifests, run_file
from infoxlm_core.results.suite_config import SuiteConfig
from pipelines.cli.app import Overrides, RunFile, Store, Variants, app, config_file, report_errors, split_list

if TYPE_CHECKING:
    from components.platform.tracking import Run

Launcher = Annotated[
    str,
    typer.Option(envvar="INFOXLM_LAUNCHER", help="ray or torchrun: what starts workers, if num_workers asks for some."),
]


@app.command()
def run(
    config: RunFile,
    store: Store = "runs",
    set_: Overrides = None,
    launcher: Launcher = "ray",
) -> None:
    """Run the whole pipeline on this machine: prepare, tokenize, pre-train, fine-tune, evaluate, register.

    It is the DAG that a Kubeflow cluster runs, each step in a subprocess. STORE keeps all results by content: a step
    whose inputs did not change is not run again, and a training that was killed continues from its checkpoint.
    """
    with report_errors():
        checked = run_file.load(config, tuple(set_ or ()))
        from infoxlm_core.results.trials import HEADLINES
        from pipelines import local
        from pipelines.infoxlm import infoxlm

        done = local.run(infoxlm, local.sections(checked, infoxlm), store, config.stem, launcher)
        report = local.artifact(store, "evaluate", "scores")
        if not report:
            raise RuntimeError("the pipeline has finished without scores")
        scores = manifests.load(report)["facts"]
        for name in HEADLINES:
            if name in scores:
                typer.echo(f"{name:28}{scores[name]:10.4f}    untrained {scores[f'untrained/{name}']:10.4f}")
        typer.echo(f"report      {report}/report.html")
        _show_address(done)
        typer.echo(
            f"the model   infoxlm embed --store {store} models:/{checked.registration.name}@champion 'a sentence'"
        )


@app.command()
def ablate(
    config: Annotated[
        Path,
        typer.Argument(
            help="YAML file of the run that the variants change, or demo.", parser=config_file, metavar="FILE"
        ),
    ],
    variants: Variants = Path("ablations"),
    only: Annotated[str, typer.Option(help="Variants, separated by commas; default: all of the file.")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds of every variant, separated by commas.")] = "1,2,3",
    store: Store = "runs",
    num_workers: Annotated[
        int, typer.Option(help="Workers of each trial; two trials run at a time. 0: in the step itself.")
    ] = 0,
    set_: Overrides = None,
    launcher: Launcher = "ray",
) -> None:
    """Train variants of a run with several seeds each; end in one table with error bars.

    Text is prepared and tokenized once. If the command is killed, start it again: it continues where it was. A trial
    that fails is named and does not stop the others.
    """
    with report_errors():
        checked = run_file.load(config, (f"num_workers={num_workers}", *(set_ or ())))
        from pipelines import local, trials
        from pipelines.ablations import AT_A_TIME, ablations

        planned = trials.plan(checked, variants, split_list(only), trials.read_seeds(seeds))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // AT_A_TIME)))
        arguments = local.sections(checked, ablations) | {"trials": planned}
        try:
            done = local.run(ablations, arguments, store, f"{config.stem}-ablations", launcher)
        finally:  # print the finished trials also if one failed
            if directory := local.artifact(store, "compare", "comparison"):
                typer.echo((directory / "comparison.md").read_text(encoding="utf-8"))
                typer.echo(f"comparison  {directory}/comparison.html")
        _show_address(done)


@app.command()
def compare(
    run: Annotated[str, typer.Option(help="Id or name of an ablation's run, or latest.")] = "latest",
    metrics: Annotated[str, typer.Option(help="Metrics, separated by commas; default: the headlines.")] = "",
    output: Annotated[
        Path | None, typer.Option(help="Directory for the page, its tables, figures and numbers.")
    ] = None,
    store: Store = "runs",
) -> None:
    """Print the table of an ablation from its tracker: variants over their seeds, with error bars."""
    with report_errors():
        from components.platform import artifacts, tracking
        from infoxlm_core.results import page
        from infoxlm_core.results.summary import summarise_metrics

        chosen = tracking.tracker().find_ablation(run, artifacts.local(store))
        results = [(trial_run.trial, trial_run.metrics) for trial_run in chosen.trials()]
        summary = summarise_metrics(chosen.name, results, split_list(metrics))
        typer.echo(page.to_markdown(summary))
        if output:
            page.write(output, "comparison", summary)
            typer.echo(f"comparison  {output}/comparison.html")


@app.command()
def suite(
    config: Annotated[
        Path, typer.Argument(help="YAML file of the suite; see configs/suite.yaml.", parser=config_file, metavar="FILE")
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(help="NAME=SOURCE: a model beside those of the file, or instead of that of the name. Repeatable."),
    ] = None,
    only: Annotated[str, typer.Option(help="Tasks, separated by commas; default: all of the file.")] = "",
    store: Store = "runs",
    num_workers: Annotated[
        int, typer.Option(help="Workers of each fine-tuning; two points run at a time. 0: in the step itself.")
    ] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a value: tasks.xnli.seeds=[1,2]. Repeatable.")
    ] = None,
    launcher: Launcher = "ray",
) -> None:
    """Fine-tune and measure encoders on tasks; end in one page beside the published numbers.

    SOURCE is a directory, s3://bucket/prefix, a name on the hub, or models:/NAME@ALIAS. Kill it and start it again:
    what is finished is found, the rest goes on. A point that fails is named and does not stop the others.
    """
    with report_errors():
        checked = run_file.load_as(SuiteConfig, config, [*(set_ or ()), *(f"models.{named}" for named in model or ())])
        checked = checked.choose(split_list(only))
        from infoxlm_core.results.trials import plan
        from pipelines import local
        from pipelines.suite import AT_A_TIME
        from pipelines.suite import suite as dag

        typer.echo(f"{len(plan(checked))} points: {', '.join(checked.models)} on {', '.join(checked.tasks)}")
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // AT_A_TIME)))
        try:
            arguments = {"suite": checked.listed(), "num_workers": num_workers}
            done = local.run(dag, arguments, store, config.stem, launcher)
        finally:  # print the finished points also if one failed
            if directory := local.artifact(store, "summarise", "comparison"):
                typer.echo((directory / "suite.md").read_text(encoding="utf-8"))
                typer.echo(f"report      {directory}/suite.html")
        _show_address(done)


def _show_address(run: "Run | None") -> None:
    """Print where a person can look at a run, if its tracker shows it somewhere."""
    if run and (lines := run.describe()):
        typer.echo(lines)


@app.command()
def plan(
    config: RunFile,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Workers, one a GPU: 8, or as many as there are virtual shards.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="h200, h100-pcie, a100, …; an unknown one lists all.")] = "h200",
    set_: Overrides = None,
) -> None:
    """Estimate parameters, memory, FLOPs and time of a pre-training, without data, weights or a GPU."""
    with report_errors():
        checked = run_file.load(config, tuple(set_ or ()))
        from infoxlm_core.systems.infoxlm import plan
        from infoxlm_core.systems.table import SYSTEMS

        tables = SYSTEMS[checked.pretraining.system].plan(
            checked.pretraining,
            checked.tokenization.vocabulary_size,
            gpus or min(8, checked.pretraining.batches.virtual_shards),
            gpu,
        )
        typer.echo("\n".join(plan.describe(tables)))


@app.command()
def compile(
    output: Annotated[Path, typer.Option(help="Directory for the YAML files.")] = Path("pipelines/compiled"),
) -> None:
    """Compile the pipelines to the YAML that the Kubeflow UI and `kfp run create` take."""
    with report_errors():
        from kfp import compiler

        from pipelines.ablations import ablations
        from pipelines.infoxlm import infoxlm
        from pipelines.promotion import promotion
        from pipelines.suite import suite

        output.mkdir(parents=True, exist_ok=True)
        dags = {"infoxlm": infoxlm, "ablations": ablations, "suite": suite, "promotion": promotion}
        for name, dag in dags.items():
            compiler.Compiler().compile(dag, str(output / f"{name}.yaml"))
            typer.echo(f"wrote {output / name}.yaml")
