"""Commands on a model: import, embed, serve, serve-check."""

import json
import logging
import sys
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from infoxlm_core import outside
from infoxlm_core.errors import InputError
from pipelines.cli.app import Store, app, report_errors

LONGEST = 1 << 20
"""Characters of a sentence to embed. A longer text is probably a file without line feeds."""


@app.command(name="import")
def import_(
    checkpoint: Annotated[Path, typer.Argument(help="XLM-R's model.pt, an InfoXLM training checkpoint, or a .bin.")],
    directory: Annotated[Path, typer.Argument(help="Hugging Face directory to make.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of sentencepiece.bpe.model; default: the checkpoint's.")
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads; default: hidden size / 64.")] = None,
) -> None:
    """Convert pickled weights of fairseq or Hugging Face to a directory of safetensors, without running their code."""
    with report_errors():
        from infoxlm_core.model.huggingface import fairseq

        imported = fairseq.convert(checkpoint, directory, tokenizer, heads)
        typer.echo(f"wrote {directory}: {imported.size}, {'with' if imported.projection else 'without'} projection")
        for name in imported.missing:
            typer.echo(f"missing {name}: the masked-LM head is left out")
        for name, number in imported.unused_parts.items():
            typer.echo(f"unused {name}: {number} tensors")


def read_lines(stream: BinaryIO) -> list[str]:
    """Return the lines of a UTF-8 stream in any locale; EncodingError names the line and byte that are not UTF-8."""
    text = outside.decode(stream.read(), "standard input")
    if not text:
        return []
    return text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")


@app.command()
def embed(
    model: Annotated[str, typer.Argument(help="A Hugging Face directory, models:/NAME@ALIAS or models:/NAME/VERSION.")],
    sentences: Annotated[list[str] | None, typer.Argument(help="Sentences; none: lines of standard input.")] = None,
    layer: Annotated[
        int | None, typer.Option(help="Layer to read; default: the one the model was contrasted at.")
    ] = None,
    pooling: Annotated[
        str | None, typer.Option(help="mean, mean_no_special, cls or contrast; default: the model's own.")
    ] = None,
    vectors: Annotated[bool, typer.Option("--vectors", help="Print a JSON vector a line, not similarities.")] = False,
    store: Store = "runs",
) -> None:
    """Embed sentences; print how similar each is to the first, or the vectors themselves."""
    with report_errors():
        from components.adapters.mlflow import model_registry
        from components.platform import artifacts
        from infoxlm_core.tasks import embedding

        texts = sentences or read_lines(sys.stdin.buffer)
        if not texts:
            raise InputError("no sentence to embed: give sentences as arguments, or on standard input, one a line")
        for number, text in enumerate(texts, 1):
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise InputError(f"sentence {number} is not UTF-8: {text!r:.60}: convert it")
            if len(text) > LONGEST:
                raise InputError(f"sentence {number} has {len(text):,} characters, more than {LONGEST:,}: cut it")
        found = embedding.embed_sentences(
            model_registry.load_encoder(model, artifacts.local(store)), texts, layer, pooling
        )
        if vectors:
            for vector in found.tolist():
                typer.echo(json.dumps(vector))
            return
        import torch.nn.functional as F

        for text, similarity in zip(texts, F.cosine_similarity(found, found[:1]).tolist(), strict=True):
            typer.echo(f"{similarity:7.4f}  {text}")


@app.command(name="serve-check")
def serve_check(
    model: Annotated[
        str, typer.Argument(help="models:/NAME@ALIAS, models:/NAME/VERSION, or the directory of an exported model.")
    ],
    python: Annotated[
        str, typer.Option(help="Of an environment with torch and transformers, such as that of your server.")
    ] = sys.executable,
    store: Store = "runs",
) -> None:
    """Show that a model gives the vectors that were registered with it, without the code of this project.

    Every exported model has reference_vectors.json: ten sentences and their vectors. The registered files are fetched
    and compared with digest and signature. Then a new process, which cannot import this project, loads them with
    transformers as the model card says and computes the ten vectors. They must be equal up to the rounding of fp32,
    since other kernels add in another order.

    Exit codes: 0 with the worst cosine and difference in one line; 3 if the vectors differ; 2 if the model has no
    reference vectors, or the other Python cannot load it.
    """
    with report_errors():
        from components.adapters.mlflow import model_registry
        from components.platform import artifacts
        from infoxlm_core.tasks import reference_vectors

        typer.echo(reference_vectors.check(model_registry.load_encoder(model, artifacts.local(store)), model, python))


@app.command()
def serve(
    model: Annotated[
        str, typer.Argument(help="models:/NAME@ALIAS, models:/NAME/VERSION, or the directory of an exported model.")
    ],
    name: Annotated[str, typer.Option(help="By which clients ask for it.")] = "infoxlm",
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, envvar="INFOXLM_PORT", help="0: any that is free.")] = 8080,
    store: Store = "runs",
) -> None:
    """Serve the vectors of sentences over HTTP, after the ten registered ones have come out as they were.

    POST /v1/models/NAME:predict {"instances": ["a sentence"]} -> {"predictions": [[…]]}: KServe's protocol V1, and what
    the components `serving` and `serving-kserve` of k8s/ run. No TLS, no login: put something before it that has them.
    """
    with report_errors():
        from components.adapters.mlflow import model_registry
        from components.platform import artifacts
        from infoxlm_core.tasks import embedding, reference_vectors
        from pipelines import serving

        directory = model_registry.load_encoder(model, artifacts.local(store))
        reference = reference_vectors.read(directory)
        embed = embedding.load_embedder(directory, reference.layer, reference.pooling)
        found = reference_vectors.compare(reference, embed(reference.sentences), model)
        logging.info("%s: %d vectors as registered, %s", model, len(reference.sentences), found)
        serving.serve(embed, name, host, port)
