"""Commands that run or plan a pipeline: run, ablate, compare, suite, plan, compile."""

import os
import pkgutil
from pathlib import Path
from typing import Annotated, Any

import typer

from infoxlm_core import run_file
from infoxlm_core.errors import InputError
from infoxlm_core.results.suite_config import SuiteConfig
from pipelines import trials
from pipelines.cli.app import Overrides, RunFile, Store, Variants, command, find_config, split_list
from pipelines.submit import PIPELINES

Launcher = Annotated[
    str, typer.Option(envvar="INFOXLM_LAUNCHER", help="Launcher of the workers if num_workers > 0: ray or torchrun.")
]


@command()
def run(config: RunFile, store: Store = "runs", set_: Overrides = None, launcher: Launcher = "ray") -> None:
    """Run the whole pipeline on this machine: prepare, tokenize, pre-train, fine-tune, evaluate, register.

    A file with a section `translation` trains a translator instead, without fine-tuning.

    The same pipeline runs on Kubeflow. Here, each step runs in a subprocess. Steps whose inputs have not changed reuse
    their results in the store. If you interrupt the command, run it again: training resumes from its last checkpoint.
    """
    run_config = run_file.load(config, tuple(set_ or ()))
    run_config.check_whole_run()  # finds settings that would fail only in a late step
    from pipelines import local
    from pipelines.infoxlm import infoxlm
    from pipelines.translation import translation

    pipeline = translation if run_config.translation else infoxlm
    local.run_pipeline(pipeline, local.select_sections(run_config, pipeline), store, config.stem, launcher)
    typer.echo(local.read_summary(store))
    typer.echo(f"the model   {_make_example_command(run_config, store)}")


@command()
def ablate(
    config: RunFile,
    variants: Variants = Path("ablations"),
    only: Annotated[str, typer.Option(help="Comma-separated names of variants to train. Default: all.")] = "",
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds for each variant.")] = "1,2,3",
    store: Store = "runs",
    num_workers: Annotated[
        int,
        typer.Option(
            help="Number of training workers of each trial. 0: the step itself trains. Two trials run at a time."
        ),
    ] = 0,
    set_: Overrides = None,
    launcher: Launcher = "ray",
) -> None:
    """Train variants of a run with several seeds each, and compare them in one table with error bars.

    The text is prepared and tokenized once. A failed trial is reported and does not stop the others. If the command is
    interrupted, run it again to resume.
    """
    trials.check_overrides(set_ or ())
    # Later overrides win, so `--set num_workers=…` takes precedence over --num-workers.
    run_config = run_file.load(config, [f"num_workers={num_workers}", *(set_ or ())])
    run_config.check_whole_run()
    from pipelines import local
    from pipelines.ablations import ablations
    from pipelines.translation import translation_ablations

    pipeline = translation_ablations if run_config.translation else ablations
    planned_trials = trials.plan_trials(run_config, variants, split_list(only), trials.parse_seeds(seeds))
    arguments = local.select_sections(run_config, pipeline) | {"trials": planned_trials}
    _run_sweep(pipeline, arguments, store, f"{config.stem}-ablations", launcher)


@command()
def compare(
    run: Annotated[
        str, typer.Option(help="Id or name of an ablation's run, or latest for the last ablation.")
    ] = "latest",
    metrics: Annotated[str, typer.Option(help="Comma-separated metrics. Default: the main metrics.")] = "",
    output: Annotated[
        Path | None, typer.Option(help="Directory for the report with its tables and figures. Default: print only.")
    ] = None,
    store: Store = "runs",
) -> None:
    """Print the table of a finished ablation from the tracker: mean and deviation of each variant over the seeds."""
    from components.platform import artifacts, sweeps, tracking
    from infoxlm_core.results import page
    from infoxlm_core.results.summaries.ablation import summarise_metrics

    ablation = tracking.get_tracker().find_ablation(run, artifacts.local_directory(store))
    # Sort by rank, the order of the variants in their file. The tracker returns the oldest trial first.
    trial_runs = sorted(ablation.trials(), key=lambda trial_run: trial_run.trial.rank)
    results = [(trial_run.trial, trial_run.metrics) for trial_run in trial_runs]
    summary = summarise_metrics(ablation.name, results, split_list(metrics), sweeps.read_outcomes(ablation))
    typer.echo(page.to_markdown(summary))
    if output:
        page.write_sweep_report(output, "comparison", summary)
        typer.echo(f"comparison  {output}/comparison.html")


@command(name="suite")
def suite_(
    config: Annotated[
        Path, typer.Argument(help="YAML file of the suite; see configs/suite.yaml.", parser=find_config, metavar="FILE")
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(help="NAME=SOURCE: add a model, or replace the model of this name in FILE. Repeatable."),
    ] = None,
    only: Annotated[str, typer.Option(help="Comma-separated names of tasks to measure. Default: all.")] = "",
    store: Store = "runs",
    num_workers: Annotated[
        int,
        typer.Option(help="Number of workers of each fine-tuning. 0: the step itself trains. Two steps run at a time."),
    ] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting, such as tasks.xnli.seeds=[1,2]. Repeatable.")
    ] = None,
    launcher: Launcher = "ray",
) -> None:
    """Fine-tune and measure encoders on several tasks, and report them beside published results.

    SOURCE is a directory, s3://bucket/prefix, a name on the Hugging Face hub, or models:/NAME@ALIAS. A failed trial is
    reported and does not stop the others. If the command is interrupted, run it again to resume.
    """
    for name_and_source in model or ():
        if "=" not in name_and_source:
            raise InputError(f"--model {name_and_source!r} has no source. Write NAME=SOURCE, such as mine=my-encoder.")
    # `--model NAME=SOURCE` is short for `--set models.NAME=SOURCE`.
    overrides = [*(set_ or ()), *(f"models.{name_and_source}" for name_and_source in model or ())]
    suite_config = run_file.load_config(SuiteConfig, config, overrides).choose(split_list(only))
    from infoxlm_core.results.trials import plan
    from pipelines.suite import suite

    trial_count = len(plan(suite_config))
    typer.echo(f"{trial_count} trials: {', '.join(suite_config.models)} on {', '.join(suite_config.tasks)}")
    arguments = {"suite": suite_config.listed(), "num_workers": num_workers}
    _run_sweep(suite, arguments, store, config.stem, launcher)


@command()
def plan(
    config: RunFile,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of GPUs, with one worker each. Default: 8, or the number of virtual shards if it is smaller.",
        ),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            help="Type of GPU, such as h200, h100-pcie or a100. The error message for an unknown type lists all types."
        ),
    ] = "h200",
    set_: Overrides = None,
) -> None:
    """Estimate the parameters, memory, FLOPs and time of pre-training without data, weights or a GPU."""
    run_config = run_file.load(config, tuple(set_ or ()))
    from infoxlm_core.systems.infoxlm import plan

    pretraining = run_config.pretraining
    num_gpus = gpus or min(8, pretraining.batches.virtual_shards)  # a worker needs at least one virtual shard
    tables = plan.plan(pretraining, run_config.tokenization.new_vocabulary_size, num_gpus, gpu)
    typer.echo("\n".join(plan.describe(tables)))


@command()
def compile(
    output: Annotated[Path, typer.Option(help="Directory for the YAML files.")] = Path("pipelines/compiled"),
) -> None:
    """Compile the pipelines to YAML files for the Kubeflow UI and `kfp run create`."""
    from kfp import compiler

    output.mkdir(parents=True, exist_ok=True)
    for name, function_name in PIPELINES.items():
        path = output / f"{name}.yaml"
        compiler.Compiler().compile(pkgutil.resolve_name(function_name), str(path))
        typer.echo(f"wrote {path}")


def _make_example_command(config: run_file.RunConfig, store: str) -> str:
    """Return an example command that uses the model registered by a run."""
    registration = config.registration
    # If even the first version must be better than its start model, there may be no champion yet.
    alias = "candidate" if registration.against == "start" else "champion"
    command_name = "embed"
    if config.translation:
        command_name = f"translate --to {config.translation.languages[1]}"
    return f"infoxlm {command_name} --store {store} models:/{registration.name}@{alias} 'a sentence'"


def _run_sweep(pipeline: Any, arguments: dict[str, Any], store: str, name: str, launcher: str) -> None:
    """Run a sweep pipeline, and print the summary of the finished trials even if a trial failed.

    The parallel trials share the CPU cores equally, unless the user has set OMP_NUM_THREADS.
    """
    from pipelines import local
    from pipelines.steps import PARALLEL_TRIALS

    threads_per_trial = max(1, (os.cpu_count() or 1) // PARALLEL_TRIALS)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_trial))
    local.set_launcher(launcher)  # outside the block: if a name is refused, the last summary is that of another run
    try:
        local.run_pipeline(pipeline, arguments, store, name, launcher)
    finally:
        typer.echo(local.read_summary(store))
