"""The `infoxlm` command: run the pipeline, compile it, embed sentences, evaluate any encoder."""

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

        done = local.run(checked, store, config.stem)
        scores = manifests.load(Path(done["scores"]))["facts"]
        for name in HEADLINES:
            if name in scores:
                typer.echo(f"{name:28}{scores[name]:10.4f}    untrained {scores[f'untrained/{name}']:10.4f}")
        typer.echo(f"report      {done['scores']}/report.html")
        typer.echo(f"MLflow      mlflow ui --backend-store-uri {done['mlflow']}   (run {done['run_id']})")
        typer.echo(
            f"the model   infoxlm embed --store {store} models:/{checked.registration.name}@champion 'a sentence'"
        )


@app.command()
def compile(
    output: Annotated[Path, typer.Option(help="Where the YAML goes.")] = Path("pipelines/compiled/infoxlm.yaml"),
):
    """Compile the pipeline to the YAML that the Kubeflow UI and `kfp run create` take."""
    with _ending_clearly():
        from kfp import compiler

        from pipelines.infoxlm import infoxlm

        output.parent.mkdir(parents=True, exist_ok=True)
        compiler.Compiler().compile(infoxlm, str(output))
        typer.echo(f"wrote {output}")


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
