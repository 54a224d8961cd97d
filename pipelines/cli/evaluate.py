"""`infoxlm evaluate`: one task for any encoder, or any fine-tuned model, beside the published numbers."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
import yaml

from infoxlm_core import run_file
from infoxlm_core.config import EvaluationConfig
from infoxlm_core.errors import ConfigError, InputError
from infoxlm_core.languages import GROUPS
from infoxlm_core.results.suite_config import SuiteConfig
from pipelines.cli.app import Store, app, ending_clearly


class Task(NamedTuple):
    """How the settings of a task begin."""

    kind: Literal["retrieval", "classification", "question_answering"]
    table: Literal["xnli", "mlqa", "tatoeba", "none"] = "none"
    normaliser: str = "squad"


HELD_OUT = "held-out"
TRAINED = "train.en.json"
"""Stands for the training text of a reader that is trained already: its language counts, for the transfer gap."""

TASKS = {
    "tatoeba": Task("retrieval", "tatoeba"),
    "pairs": Task("retrieval"),
    "xnli": Task("classification", "xnli"),
    "classification": Task("classification"),
    "mlqa": Task("question_answering", "mlqa", "mlqa"),
    "xquad": Task("question_answering"),
    "tydiqa": Task("question_answering"),
    "squad": Task("question_answering"),
    "question-answering": Task("question_answering"),
}
"""By name, besides HELD_OUT."""


@app.command()
def evaluate(
    model: Annotated[
        str, typer.Option(help="A Hugging Face directory, s3://bucket/prefix, ORG/NAME or models:/NAME@ALIAS.")
    ],
    task: Annotated[str, typer.Option(help=f"{HELD_OUT}, {', '.join(TASKS)}.")],
    data: Annotated[str, typer.Option(help="The test sets: a folder, a file, or s3://bucket/prefix.")],
    languages: Annotated[
        str, typer.Option(help="Of tatoeba, pairs: all, 14, 22, 36 (the paper's) or codes: de,fr.")
    ] = "all",
    vector: Annotated[
        list[str] | None,
        typer.Option(
            help="Of tatoeba, pairs: POOLING@LAYER. POOLING: mean, mean_no_special, cls, contrast; LAYER: a number, "
            "last, contrast, best. Repeatable; default: mean@best and cls@last."
        ),
    ] = None,
    prefix: Annotated[str, typer.Option(help="Of tatoeba, pairs: stands before every sentence.")] = "",
    margin: Annotated[bool, typer.Option("--margin", help="Of tatoeba, pairs: compare by ratio margin.")] = False,
    floor: Annotated[str | None, typer.Option(help="Another model to compare with.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Another value of the task's config: batch_size=16. Repeatable.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Where scores, page and figures go.")] = Path("evaluation"),
    store: Store = "runs",
) -> None:
    """Measure a model on one task; print the table with the published numbers, write scores, a page and figures.

    Any encoder: held-out (translations and perplexity of a prepared corpus), tatoeba, pairs (your own translations).
    A model fine-tuned for it: xnli, classification; mlqa, xquad, tydiqa, squad, question-answering.

    infoxlm evaluate --model models:/infoxlm@champion --task tatoeba --data LASER/data/tatoeba/v1 --languages 14

    infoxlm evaluate --model my-xnli-model --task xnli --data XNLI-1.0
    """
    with ending_clearly():
        from components.platform import stores

        models = name_models(model, floor)
        if task == HELD_OUT:
            measure_held_out(models, data, output, stores.local(store))
        elif task in TASKS:
            more = {"languages": languages, "vectors": vector, "prefix": prefix, "margin": margin}
            measure_task(parse(models, task, data, more, set_ or []), task, output, stores.local(store))
        else:
            raise InputError(f"--task {task}: give one of {HELD_OUT}, {', '.join(TASKS)}")


def name_of(source: str) -> str:
    """What a model is called in tables: the last part of where it is (models:/infoxlm@champion: infoxlm-champion)."""
    return re.sub("[^A-Za-z0-9]+", "-", re.split("[/:]", source.rstrip("/"))[-1]).strip("-") or "model"


def name_models(model: str, floor: str | None) -> dict[str, str]:
    """Where the models are, by names of which none could be taken for another's."""
    models = {name_of(model): model}
    if floor:
        name = name_of(floor)
        models[f"{name}-floor" if name.lower() == name_of(model).lower() else name] = floor
    return models


def parse(models: dict[str, str], task: str, data: str, more: dict[str, Any], changes: list[str]) -> SuiteConfig:
    """The task as a suite of one task; `more` are the options of retrieval, `changes` any other fields."""
    kind, table, normaliser = TASKS[task]
    settings: dict[str, Any] = {"task": kind}
    if kind == "retrieval":
        codes = more["languages"]
        if not re.fullmatch(r"all|14|22|36|[a-z]{2,3}(,[a-z]{2,3})*", codes):
            raise InputError(f"--languages {codes!r}: give all, 14, 22, 36, or codes such as de,fra")
        settings |= {"data": data, "prefix": more["prefix"], "margin": more["margin"]}
        settings["languages"] = codes if codes in ("all", *GROUPS) else codes.split(",")
        settings |= {"vectors": more["vectors"]} if more["vectors"] else {}
    elif kind == "classification":
        settings["data"] = data
    else:
        settings |= {"train": [TRAINED], "test": [data], "normaliser": normaliser}
    for change in changes:
        try:
            run_file.override(settings, change)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {change}: {' '.join(str(error).split())}") from None
    return SuiteConfig.parse({"models": models, "tasks": {task: {"settings": settings, "table": table}}})


def measure_task(config: SuiteConfig, task: str, output: Path, store: Path) -> None:
    """Measure every model on a task; print and write what a suite of this task alone would."""
    from components.platform import sources
    from infoxlm_core.results import pages, trials
    from infoxlm_core.results.summary import summarise
    from infoxlm_core.tasks import task_of

    directories = {name: sources.fetch_model(source, store) for name, source in config.models.items()}
    for directory in directories.values():
        check_tuned(directory, config.tasks[task].settings.task)
    settings = config.tasks[task].settings
    settings = task_of(settings).localise(
        settings, lambda source: source if source == TRAINED else str(sources.fetch_data(source, store))
    )
    scores = {
        trial.name: trials.measure(settings, directories[trial.model], {}, output / trial.model)
        for trial, _, _ in trials.plan(config)
    }
    summary = summarise(config, scores)
    if task_of(settings).trained:  # how these models were trained is not known here
        found = summary.tasks[task]
        known = tuple(fact for fact in found.protocol if fact.what in ("test set", "normaliser"))
        summary = replace(summary, tasks={task: replace(found, protocol=known)})
    pages.write_suite(output, summary)
    typer.echo((output / "suite.md").read_text(encoding="utf-8"))
    typer.echo(f"page        {output / 'suite.html'}")


def check_tuned(directory: Path, kind: str) -> None:
    """Refuse a model that says of itself that it was made for something else than a task, before anything is read."""
    from infoxlm_core.model import pretrained

    wanted = {"classification": "ForSequenceClassification", "question_answering": "ForQuestionAnswering"}.get(kind)
    said = pretrained.read_config(directory).get("architectures")
    if wanted and said and not any(wanted in name for name in said):
        raise InputError(
            f"{directory} ({', '.join(said)}) is not fine-tuned for {kind.replace('_', ' ')}: fine-tune and measure it "
            "with `infoxlm suite`, or give a model that is"
        )


def measure_held_out(models: dict[str, str], corpus: str, output: Path, store: Path) -> None:
    """Retrieval by layer and perplexity on the held-out text of a prepared corpus."""
    from components.platform import sources
    from infoxlm_core.stages import evaluation

    encoders = {name: sources.fetch_model(source, store) for name, source in models.items()}
    local = sources.fetch_data(corpus, store)
    for name, value in evaluation.evaluate(EvaluationConfig(), local, encoders, {}, output).items():
        typer.echo(f"{name:40} {value:.4f}")
    typer.echo(f"page        {output / 'report.html'}")
