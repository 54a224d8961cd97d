"""The `infoxlm` command: run the pipeline, its ablations, compile them, embed sentences, evaluate any encoder."""

import json
import logging
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from infoxlm_core import manifests, run_file
from infoxlm_core.config import EvaluationConfig
from infoxlm_core.errors import InfoXLMError, InputError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help=(
        "From text in many languages to an evaluated, registered cross-lingual encoder (InfoXLM).\n\n"
        "Start with `infoxlm run configs/demo.yaml`, then look at the report it names, then try\n"
        '`infoxlm embed models:/infoxlm@champion "Save changes" "Enregistrer les modifications"`.\n\n'
        "Exit codes: 0 done · 2 input or config refused · 3 our own data is damaged · 4 no valid checkpoint ·\n"
        "5 training diverged · 70 internal error · 75 try again, the run goes on where it was."
    ),
)
Store = Annotated[
    Path, typer.Option(help="Directory for artifacts, checkpoints and, without MLFLOW_TRACKING_URI, MLflow's database.")
]


@contextmanager
def _ending_clearly():
    """One line and a documented exit code instead of a traceback, for errors of ours."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        yield
    except InfoXLMError as error:
        typer.echo(f"infoxlm: {type(error).__name__}: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(error.exit_code) from None
    except typer.Exit:
        raise
    except OSError as error:  # a directory that cannot be written, a file that cannot be read
        typer.echo(f"infoxlm: {type(error).__name__}: {error}: give another path or change its permissions", err=True)
        raise typer.Exit(InputError.exit_code) from None
    except Exception as error:
        logging.exception("internal error")
        typer.echo(f"infoxlm: {type(error).__name__}: {' '.join(str(error).split())}: please report this", err=True)
        raise typer.Exit(InfoXLMError.exit_code) from None


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="YAML file of the run; see configs/.")],
    store: Store = Path("runs"),
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a value: pretraining.optimization.steps=100. Repeatable."),
    ] = None,
):
    """Run the whole pipeline on this machine: prepare, tokenize, pre-train, fine-tune, evaluate, register.

    It is the DAG that a Kubeflow cluster runs, each step in a subprocess. Everything is kept in STORE by content:
    a step whose inputs did not change is not run again, and a training that was killed goes on from its checkpoint.
    """
    with _ending_clearly():
        checked = run_file.load(config, tuple(set_ or ()))
        from infoxlm_core.evaluation import HEADLINES
        from pipelines import local
        from pipelines.infoxlm import infoxlm

        done = local.run(infoxlm, local.sections(checked, infoxlm), store, config.stem)
        report = local.artifact(store, "evaluate", "scores")
        assert report, "a pipeline that is done has scores"
        scores = manifests.load(report)["facts"]
        for name in HEADLINES:
            if name in scores:
                typer.echo(f"{name:28}{scores[name]:10.4f}    untrained {scores[f'untrained/{name}']:10.4f}")
        typer.echo(f"report      {report}/report.html")
        typer.echo(f"MLflow      mlflow ui --backend-store-uri {done['mlflow']}   (run {done['run_id']})")
        typer.echo(
            f"the model   infoxlm embed --store {store} models:/{checked.registration.name}@champion 'a sentence'"
        )


@app.command()
def ablate(
    config: Annotated[Path, typer.Argument(help="YAML file of the run that the variants change.")],
    variants: Annotated[Path, typer.Option(help="YAML file: name -> overrides of the section pretraining.")] = Path(
        "configs/ablations.yaml"
    ),
    only: Annotated[str, typer.Option(help="Variants, separated by commas; default: all of the file.")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds of every variant, separated by commas.")] = "1,2,3",
    store: Store = Path("runs"),
    num_workers: Annotated[
        int, typer.Option(help="Ray workers of each trial; two trials run at a time. 0: in the step itself.")
    ] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a value, as in `run`. Repeatable.")] = None,
):
    """Train variants of a run with several seeds each; end in one table with error bars.

    Prepares and tokenizes once. Kill it and start it again: what is finished is found, the rest goes on. A trial that
    fails is named and does not stop the others.
    """
    with _ending_clearly():
        checked = run_file.load(config, (f"num_workers={num_workers}", *(set_ or ())))
        from pipelines import local, trials
        from pipelines.ablations import AT_A_TIME, ablations

        planned = trials.plan(checked, variants, _split(only), trials.read_seeds(seeds))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // AT_A_TIME)))
        arguments = local.sections(checked, ablations) | {"trials": planned}
        try:
            done = local.run(ablations, arguments, store, f"{config.stem}-ablations")
        finally:  # what has finished is shown, also when a trial failed
            if found := local.artifact(store, "compare", "comparison"):
                typer.echo((found / "comparison.md").read_text(encoding="utf-8"))
                typer.echo(f"comparison  {found}/comparison.html")
        typer.echo(f"MLflow      mlflow ui --backend-store-uri {done['mlflow']}   (run {done['run_id']})")


@app.command()
def compare(
    run: Annotated[str, typer.Option(help="Id or name of an ablation's MLflow run, or latest.")] = "latest",
    metrics: Annotated[str, typer.Option(help="Metrics, separated by commas; default: the headlines.")] = "",
    output: Annotated[Path | None, typer.Option(help="Directory for HTML, PNG, Markdown, JSON.")] = None,
    store: Store = Path("runs"),
):
    """Print the table of an ablation from MLflow: variants over their seeds, with error bars."""
    with _ending_clearly():
        from components.adapters import trial_runs
        from infoxlm_core import comparison
        from infoxlm_core.evaluation import HEADLINES

        run_id, name = trial_runs.find_ablation(run, store)
        found = trial_runs.read(run_id)
        chosen = _split(metrics)
        comparison.check_metrics(found, chosen)
        compared = comparison.compare(found, chosen or comparison.choose(HEADLINES), name)
        typer.echo(comparison.render(compared, "md"))
        if output:
            comparison.write(output, compared)
            typer.echo(f"comparison  {output}/comparison.html")


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@app.command()
def plan(
    config: Annotated[Path, typer.Argument(help="YAML file of the run; see configs/.")],
    gpus: Annotated[int, typer.Option(min=1, help="Workers, one a GPU.")] = 8,
    gpu: Annotated[str, typer.Option(help="h100, h200, a100 or v100.")] = "h200",
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a value, as in `run`. Repeatable.")] = None,
):
    """Say what pre-training would take: parameters, memory, FLOPs, time. Needs no data, no weights and no GPU."""
    with _ending_clearly():
        checked = run_file.load(config, tuple(set_ or ()))
        from infoxlm_core import planning

        tables = planning.plan(checked.pretraining, checked.tokenization.vocabulary_size, gpus, gpu)
        typer.echo("\n".join(planning.describe(tables)))


@app.command(name="import")
def import_(
    checkpoint: Annotated[Path, typer.Argument(help="XLM-R's model.pt, an InfoXLM training checkpoint, or a .bin.")],
    directory: Annotated[Path, typer.Argument(help="Hugging Face directory to make.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of sentencepiece.bpe.model; default: the checkpoint's.")
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads; default: hidden size / 64.")] = None,
):
    """Convert pickled weights, fairseq's or Hugging Face's, to a directory of safetensors; run none of their code."""
    with _ending_clearly():
        from infoxlm_core.model import fairseq

        found = fairseq.convert(checkpoint, directory, tokenizer, heads)
        typer.echo(f"wrote {directory}: {found.size}, {'with' if found.projection else 'without'} projection")
        for name in found.missing:
            typer.echo(f"missing {name}: the masked-LM head is left out")
        for name, number in found.unused_parts.items():
            typer.echo(f"unused {name}: {number} tensors")


@app.command()
def compile(
    output: Annotated[Path, typer.Option(help="Directory for the YAML files.")] = Path("pipelines/compiled"),
):
    """Compile the pipelines to the YAML that the Kubeflow UI and `kfp run create` take."""
    with _ending_clearly():
        from kfp import compiler

        from pipelines.ablations import ablations
        from pipelines.infoxlm import infoxlm

        output.mkdir(parents=True, exist_ok=True)
        for name, dag in {"infoxlm": infoxlm, "ablations": ablations}.items():
            compiler.Compiler().compile(dag, str(output / f"{name}.yaml"))
            typer.echo(f"wrote {output / name}.yaml")


@app.command()
def embed(
    model: Annotated[str, typer.Argument(help="A Hugging Face directory, models:/NAME@ALIAS or models:/NAME/VERSION.")],
    sentences: Annotated[list[str] | None, typer.Argument(help="Sentences; none: lines of standard input.")] = None,
    layer: Annotated[
        int | None, typer.Option(help="Layer to read; default: the one the model was contrasted at.")
    ] = None,
    pooling: Annotated[str | None, typer.Option(help="mean or cls; default: the model's own.")] = None,
    vectors: Annotated[bool, typer.Option("--vectors", help="Print a JSON vector a line, not similarities.")] = False,
    store: Store = Path("runs"),
):
    """Embed sentences; print how similar each is to the first, or the vectors themselves."""
    with _ending_clearly():
        from components.adapters import model_registry
        from infoxlm_core.tasks import embedding

        texts = sentences or [line.rstrip("\n") for line in sys.stdin]
        if not texts:
            raise InputError("no sentence to embed: give some as arguments or on standard input, one a line")
        for number, text in enumerate(texts, 1):
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise InputError(f"sentence {number} is not UTF-8: {text!r:.60}: convert it")
        found = embedding.embed_sentences(model_registry.load_encoder(model, store), texts, layer, pooling)
        if vectors:
            for vector in found.tolist():
                typer.echo(json.dumps(vector))
            return
        import torch.nn.functional as F

        for text, similarity in zip(texts, F.cosine_similarity(found, found[:1]).tolist(), strict=True):
            typer.echo(f"{similarity:7.4f}  {text}")


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="A Hugging Face directory or models:/NAME@ALIAS.")],
    corpus: Annotated[Path, typer.Option(help="A prepared corpus: a directory with held_out/.")],
    output: Annotated[Path, typer.Option(help="Where scores.json, report.html and figures go.")] = Path("evaluation"),
    floor: Annotated[str | None, typer.Option(help="Another encoder to compare with.")] = None,
    store: Store = Path("runs"),
):
    """Evaluate any encoder on held-out translations: retrieval by layer and language, masked-LM perplexity."""
    with _ending_clearly():
        from components.adapters import model_registry
        from infoxlm_core import evaluation

        names = {"model": model} | ({"floor": floor} if floor else {})
        encoders = {name: model_registry.load_encoder(source, store) for name, source in names.items()}
        scores = evaluation.evaluate(EvaluationConfig(), corpus, encoders, {}, output)
        for name, value in scores.items():
            typer.echo(f"{name:40} {value:.4f}")
        typer.echo(f"report {output / 'report.html'}")


def main() -> None:
    """Entry point; quiet where libraries talk too much."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    app()
