"""The command `infoxlm evaluate`: measure any encoder or fine-tuned model on one task."""

import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infoxlm_core import run_file
from infoxlm_core.config import EvaluationConfig
from infoxlm_core.errors import InputError
from infoxlm_core.languages import GROUPS
from infoxlm_core.results.suite_config import SuiteConfig
from infoxlm_core.tasks import TASKS
from infoxlm_core.tasks.task import Task
from pipelines.cli.app import Store, command

if TYPE_CHECKING:
    from infoxlm_core.results.summaries.suite import Summary

HELD_OUT = "held-out"
PRESETS = {name: (task, preset) for task in TASKS.values() for name, preset in task.presets.items()}
"""Mapping from --task value (other than HELD_OUT) to task and preset."""


@command()
def evaluate(
    model: Annotated[
        str, typer.Option(help="Directory in Hugging Face format, s3://bucket/prefix, ORG/NAME or models:/NAME@ALIAS.")
    ],
    task: Annotated[str, typer.Option(help=f"One of {HELD_OUT}, {', '.join(PRESETS)}.")],
    data: Annotated[str, typer.Option(help="Test sets: a directory, a file, or s3://bucket/prefix.")],
    languages: Annotated[
        str,
        typer.Option(
            help="Only for tatoeba and pairs: all, 14, 22 or 36 (the groups of the paper), or codes such as de,fr."
        ),
    ] = "all",
    vector: Annotated[
        list[str] | None,
        typer.Option(
            help="Only for tatoeba and pairs: POOLING@LAYER, or served (the vector that users get). POOLING is mean, "
            "mean_no_special, cls or contrast; LAYER is a number, last, contrast or best. Repeatable. Default: "
            "mean@best, cls@last and served."
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            help="Only for tatoeba, pairs and mining: text to put before every sentence; '' for none. Default: the "
            "prefix that the model was trained with."
        ),
    ] = None,
    margin: Annotated[
        bool, typer.Option("--margin", help="Only for tatoeba and pairs: rank by ratio margin instead of cosine.")
    ] = False,
    floor: Annotated[
        str | None, typer.Option(help="Second model for comparison, in the same forms as --model.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a setting of the task, such as batch_size=16. Repeatable."),
    ] = None,
    output: Annotated[Path, typer.Option(help="Directory for the report, scores and figures.")] = Path("evaluation"),
    store: Store = "runs",
) -> None:
    """Evaluate a model on one task, print a table beside published results, and write a report with figures.

    Tasks for any encoder: held-out (retrieval and perplexity on a prepared corpus), tatoeba, pairs (your own
    translations), mining (BUCC 2018). All other tasks need a model that was fine-tuned for them: xnli, classification,
    mlqa, xquad, tydiqa, squad, question-answering, panx, named-entities.

    infoxlm evaluate --model models:/infoxlm@champion --task tatoeba --data LASER/data/tatoeba/v1 --languages 14

    infoxlm evaluate --model my-xnli-model --task xnli --data XNLI-1.0
    """
    from components.platform import artifacts

    models = name_models(model, floor)
    files = [path.name for path in output.iterdir()] if output.is_dir() else []
    # Overwrite an earlier report, but protect a directory without a report, which has the user's own files.
    if files and not {"report.html", "suite.html"} & set(files):
        raise InputError(f"--output {output} contains other files, such as {files[0]}. Give an empty directory.")
    if task == HELD_OUT:
        measure_held_out(models, data, output, artifacts.local_directory(store))
    elif task in PRESETS:
        options = {"languages": languages, "vectors": vector, "prefix": prefix, "margin": margin}
        config = build_suite(models, task, data, options, set_ or [])
        measure_task(config, task, output, artifacts.local_directory(store))
    else:
        raise InputError(f"There is no task {task!r}. Give --task one of {HELD_OUT}, {', '.join(PRESETS)}.")


def derive_name(source: str) -> str:
    """Return a model's name for tables: the end of its source, such as infoxlm-champion."""
    base_name = re.split("[/:]", source.rstrip("/"))[-1]
    return re.sub("[^A-Za-z0-9]+", "-", base_name).strip("-") or "model"


def name_models(model: str, floor: str | None) -> dict[str, str]:
    """Return a mapping from model name in the report to model source.

    Args:
        model: source of the model to evaluate.
        floor: source of a second model for comparison, the baseline, or None.
    """
    model_name = derive_name(model)
    if floor is None:
        return {model_name: model}
    floor_name = derive_name(floor)
    if floor_name.lower() == model_name.lower():  # names become file names, and some systems ignore their case
        floor_name = f"{floor_name}-floor"
    return {model_name: model, floor_name: floor}


def build_suite(
    models: dict[str, str], task: str, data: str, options: dict[str, Any], overrides: list[str]
) -> SuiteConfig:
    """Return the config of a suite that measures models on a single task.

    Args:
        models: mapping from model name to source.
        task: key of PRESETS, that is, the name of a well-known test set or of a task.
        data: location of the test sets.
        options: values of command-line options by setting name. Settings that the task does not have are ignored.
        overrides: further overrides of task settings, such as `batch_size=16`.

    Raises:
        ConfigError, InputError: an override or an option is invalid.
    """
    task_definition, preset = PRESETS[task]
    test_settings = task_definition.build_test_settings(data)
    settings: dict[str, Any] = {"task": task_definition.name, **test_settings, **preset.settings}
    # The command has the same options for all tasks, so the values may include settings that this task does not have.
    task_fields = task_definition.settings.model_fields
    settings |= {name: value for name, value in options.items() if value is not None and name in task_fields}
    if settings.get("languages"):
        settings["languages"] = _parse_languages(settings["languages"])
    for override in overrides:
        run_file.apply_override(settings, override)
    tasks = {task: {"settings": settings, "table": preset.table}}
    return SuiteConfig.parse({"models": models, "tasks": tasks})


def _parse_languages(languages: str) -> str | list[str]:
    """Parse --languages: return `all`, the name of a language group, or a list of language codes."""
    if languages == "all" or languages in GROUPS:
        return languages
    if not re.fullmatch(r"[a-z]{2,3}(,[a-z]{2,3})*", languages):
        raise InputError(
            f"--languages {languages!r} is not a list of languages. Give all, 14, 22, 36, or codes such as de,fra."
        )
    return languages.split(",")


def measure_task(config: SuiteConfig, task: str, output: Path, store: Path) -> None:
    """Measure every model of a suite on its only task. Print the results table and write the report.

    Args:
        config: config of the suite, from `build_suite`.
        task: name of the suite's task.
        output: directory for the report and each model's predictions.
        store: local store, which receives copies of models and data.
    """
    from components.platform import sources
    from infoxlm_core.results import page, trials
    from infoxlm_core.results.summaries.suite import summarise
    from infoxlm_core.tasks import task_of

    settings = config.tasks[task].settings
    task_definition = task_of(settings)
    model_directories = {name: sources.fetch_model(source, store) for name, source in config.models.items()}
    for directory in model_directories.values():  # check all models before the first measurement, which may take long
        check_architecture(directory, task_definition)

    local_settings = sources.fetch_task_data(settings, store)
    scores_by_trial = {}
    # Write to `output` only at the end: `evaluate` refuses a directory that has predictions, but no report.
    with tempfile.TemporaryDirectory(prefix="infoxlm-evaluate-") as predictions:
        for planned in trials.plan(config):
            trial = planned.trial
            directory = model_directories[trial.model]
            # `training` is empty, because nothing is known about a fine-tuning that was done elsewhere.
            scores_by_trial[trial.name] = trials.measure_model(
                local_settings, encoder=directory, model=directory, training={}, output=Path(predictions, trial.model)
            )
        summary = summarise(config, scores_by_trial)
        if task_definition.is_finetuned:
            summary = _drop_training_protocol(summary, task)
        page.write_sweep_report(output, "suite", summary)
        shutil.copytree(predictions, output, dirs_exist_ok=True)
    typer.echo((output / "suite.md").read_text(encoding="utf-8"))
    typer.echo(f"page        {output / 'suite.html'}")


def _drop_training_protocol(summary: "Summary", task: str) -> "Summary":
    """Remove the fine-tuning settings from a summary. They are unknown for models that were fine-tuned elsewhere."""
    task_summary = summary.tasks[task]
    test_protocol = tuple(fact for fact in task_summary.protocol if fact.what in ("test set", "normaliser"))
    return replace(summary, tasks={task: replace(task_summary, protocol=test_protocol)})


def check_architecture(directory: Path, task: Task[Any]) -> None:
    """Raise InputError if a model's config names architectures, but none for this task."""
    from infoxlm_core.model.huggingface import pretrained

    if not task.head:  # the task needs no fine-tuning
        return
    architectures = pretrained.read_config(directory).get("architectures")
    if not architectures:
        return
    if not any(f"For{task.head.architecture}" in architecture for architecture in architectures):
        raise InputError(
            f"{directory} ({', '.join(architectures)}) is not fine-tuned for {task.name.replace('_', ' ')}. Fine-tune "
            "and measure it with `infoxlm suite`, or give a model that is fine-tuned for it."
        )


def measure_held_out(models: dict[str, str], corpus: str, output: Path, store: Path) -> None:
    """Measure retrieval at each layer and perplexity on the held-out text of a prepared corpus.

    Print the metrics and write a report.

    Args:
        models: mapping from model name to source.
        corpus: location of the prepared corpus.
        output: directory for the report.
        store: local store, which receives copies of models and the corpus.
    """
    from components.platform import sources
    from infoxlm_core.stages import evaluation

    encoders = {name: sources.fetch_model(source, store) for name, source in models.items()}
    local_corpus = sources.fetch_data(corpus, store)
    metrics = evaluation.evaluate(EvaluationConfig(), local_corpus, encoders, classifiers={}, output=output)
    for name, value in metrics.items():
        typer.echo(f"{name:40} {value:.4f}")
    typer.echo(f"page        {output / 'report.html'}")
