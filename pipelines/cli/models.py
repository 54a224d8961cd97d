"""Commands for a model: import, embed, serve, serve-check, translate."""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from infoxlm_core import user_files
from infoxlm_core.errors import InputError
from pipelines.cli.app import Store, command

Model = Annotated[
    str, typer.Argument(help="models:/NAME@ALIAS, models:/NAME/VERSION, or a directory in Hugging Face format.")
]
Sentences = Annotated[list[str] | None, typer.Argument(help="Sentences. Default: the lines of standard input.")]
MAX_CHARACTERS = 1 << 20
"""Length limit of a sentence. A longer text is probably a file without line feeds."""


@command(name="import")
def import_(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="XLM-R's model.pt, an InfoXLM checkpoint of fairseq, or pytorch_model.bin in the directory of a "
            "Hugging Face model."
        ),
    ],
    directory: Annotated[Path, typer.Argument(help="Directory to create, in Hugging Face format.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Directory with sentencepiece.bpe.model or tokenizer.json. Default: the checkpoint's directory."
        ),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Attention heads of a fairseq checkpoint. Default: hidden size / 64.")
    ] = None,
) -> None:
    """Convert a pickled checkpoint of fairseq or Hugging Face to safetensors without executing its code.

    The files of a Hugging Face model that describe its tokenizer, pooling and prompts are copied.
    """
    from infoxlm_core.model.huggingface import fairseq

    imported = fairseq.convert(checkpoint, directory, tokenizer, heads)
    projection = "with projection" if imported.projection else "without projection"
    typer.echo(f"wrote {directory}: {imported.size}, {projection}")
    for name in imported.missing:  # tensors of the masked-LM head, which is written only if it is complete
        typer.echo(f"missing {name}: the model has no masked-LM head")
    for name, number in imported.unused_parts.items():
        typer.echo(f"unused {name}: {number} tensors")


def read_lines(stream: BinaryIO, name: str = "standard input") -> list[str]:
    """Return the lines of a UTF-8 stream in any locale. Raise EncodingError for an invalid line."""
    text = user_files.decode(stream.read(), name)
    if not text:
        return []
    # `splitlines` would also split at rarer characters, such as U+2028, and row i would not belong to line i.
    return text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")


def check_sentences(texts: Sequence[str]) -> None:
    """Raise InputError if the list is empty, or if a sentence is too long or not UTF-8."""
    if not texts:
        raise InputError("There is no sentence. Give sentences as arguments, or one per line on standard input.")
    for number, text in enumerate(texts, 1):
        # Python decodes invalid bytes of a command-line argument to surrogates.
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InputError(f"Sentence {number} is not UTF-8: {text!r:.60}. Convert it to UTF-8.")
        if len(text) > MAX_CHARACTERS:
            raise InputError(
                f"Sentence {number} has {len(text):,} characters. Split it into parts of at most {MAX_CHARACTERS:,}."
            )


def _load_model(model: str, store: str) -> Path:
    """Return a model's local directory. Download a registered model."""
    from components.adapters.mlflow import model_registry
    from components.platform import artifacts

    return model_registry.load_encoder(model, artifacts.local_directory(store))


@command()
def embed(
    model: Model,
    sentences: Sentences = None,
    layer: Annotated[
        int | None, typer.Option(help="Layer to pool. Default: the contrast layer, or the last layer without contrast.")
    ] = None,
    pooling: Annotated[
        str | None,
        typer.Option(
            help="mean, mean_no_special, cls or contrast. Default: the pooling of the contrast or of "
            "sentence-transformers' files, else mean."
        ),
    ] = None,
    vectors: Annotated[
        bool, typer.Option("--vectors", help="Print one JSON vector per line instead of similarities.")
    ] = False,
    file: Annotated[
        Path | None, typer.Option(help="Embed the lines of this file, and write their vectors to --output.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="NumPy file (.npy) for the vectors of --file, as float32.")
    ] = None,
    store: Store = "runs",
) -> None:
    """Embed sentences. Print the cosine similarity of each sentence to the first one, or all vectors.

    With --file, the command embeds a file with one sentence per line. Row i of the output is the vector of line i.

    infoxlm embed models:/infoxlm@champion --file sentences.txt --output vectors.npy
    """
    from infoxlm_core.tasks import embedding, vector_files

    if (file is None) != (output is None):
        raise InputError("--file and --output belong together. Give both, or neither.")
    if file and (sentences or vectors):
        raise InputError("--file embeds the lines of a file. Leave out other sentences and --vectors.")
    texts: list[str] = []
    if not file:
        texts = sentences or read_lines(sys.stdin.buffer)
        check_sentences(texts)
    directory = _load_model(model, store)
    embedder = embedding.load_embedder(directory, layer, pooling)
    if file and output:  # both or neither, as checked above
        num_lines = vector_files.embed_file(embedder, file, output)
        typer.echo(f"wrote {output}: {num_lines:,} vectors, {embedder.spec.pooling} of layer {embedder.spec.layer}")
        return
    sentence_vectors = embedder(texts)
    if vectors:
        for vector in sentence_vectors.tolist():
            typer.echo(json.dumps(vector))
        return
    import torch.nn.functional as F

    similarities = F.cosine_similarity(sentence_vectors, sentence_vectors[:1])
    for text, similarity in zip(texts, similarities.tolist(), strict=True):
        typer.echo(f"{similarity:7.4f}  {text}")


@command(name="serve-check")
def serve_check(
    model: Model,
    python: Annotated[
        str,
        typer.Option(help="Python interpreter that has torch and transformers, for example the one on your server."),
    ] = sys.executable,
    store: Store = "runs",
) -> None:
    """Check that a model computes its reference vectors with transformers alone, without the code of this project.

    Every exported model has reference_vectors.json with ten sentences and their vectors. The command downloads the
    registered files and verifies their digest and signature. Then a new process that cannot import this project loads
    the files with transformers, as the model card says, and computes the vectors again. The vectors must be equal up to
    fp32 rounding.

    Exit codes: 0 the vectors are equal · 3 they differ · 2 the model has no reference vectors, or the interpreter given
    by --python cannot load the model.
    """
    from infoxlm_core.tasks import reference_vectors

    directory = _load_model(model, store)
    typer.echo(reference_vectors.check_with_transformers(directory, model, python))


@command()
def serve(
    model: Model,
    name: Annotated[str, typer.Option(help="Name of the model in the URL.")] = "infoxlm",
    host: Annotated[str, typer.Option(help="Address of the server. 0.0.0.0 means all addresses.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, envvar="INFOXLM_PORT", help="Port of the server. 0 means any free port.")
    ] = 8080,
    store: Store = "runs",
) -> None:
    """Serve sentence vectors over HTTP, after checking that the model computes its ten reference vectors.

    The server speaks version 1 of KServe's protocol: POST /v1/models/NAME:predict {"instances": ["a sentence"]} returns
    {"predictions": [[…]]}. Put a proxy with TLS and login in front of the server, because it has neither. In a cluster,
    the components `serving` and `serving-kserve` of k8s/ run this command.
    """
    from infoxlm_core.tasks import embedding, reference_vectors
    from pipelines import serving

    directory = _load_model(model, store)
    reference = reference_vectors.read_reference(directory)
    # Serve the same vectors that the model's reference file has.
    embed = embedding.load_embedder(directory, reference.layer, reference.pooling)
    differences = reference_vectors.compare_vectors(reference, embed(reference.sentences), model)
    logging.info("%s: %d reference vectors are equal up to rounding, %s", model, len(reference.sentences), differences)
    serving.serve_embeddings(embed, name, host, port)


@command()
def translate(
    model: Model,
    sentences: Sentences = None,
    to: Annotated[
        str, typer.Option(help="Language of the translations. It must be one of the two languages of the model.")
    ] = ...,  # type: ignore[assignment]  # required, but Python needs a default after that of `sentences`
    file: Annotated[Path | None, typer.Option(help="Translate the lines of this file.")] = None,
    store: Store = "runs",
) -> None:
    """Translate sentences with a translator that `infoxlm run` trained, one per line.

    infoxlm translate models:/translator@champion --to fr "Save changes"
    """
    from infoxlm_core.systems.translation.decoding import TextTranslator

    if file and sentences:
        raise InputError("Sentences and --file are both given. Give only one of them.")
    if file:
        with file.open("rb") as stream:
            texts = read_lines(stream, str(file))
    else:
        texts = sentences or read_lines(sys.stdin.buffer)
    check_sentences(texts)
    directory = _load_model(model, store)
    for translation in TextTranslator.load(directory).translate(texts, to):
        typer.echo(translation)
