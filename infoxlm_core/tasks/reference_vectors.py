"""Store reference vectors with every exported model: ten sentences and their vectors, for checks by a server.

    reference_vectors.json    {"layer": 8, "pooling": "mean", "sentences": [10 texts], "vectors": [10 rows of d]}

`layer` is an index into `hidden_states`: 0 is the output of the embeddings. `pooling` is cls, or the mean of all tokens
including `<s>` and `</s>`. For a model with a prefix, `"prefix"` contains the text before each sentence. The numbers
are computed in fp32 on a CPU, and written with enough digits to restore the same fp32 values. The model's manifest
lists the file, so the model's digest and signature cover the vectors.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import TypedDict

from infoxlm_core import manifests, user_files
from infoxlm_core.errors import DataCorrupt, InputError
from infoxlm_core.model.huggingface import plain_transformers
from infoxlm_core.model.huggingface.any_encoder import find_default_prefix, find_embedding_settings, load_encoder
from infoxlm_core.tasks.embedding import VectorEncoder, VectorSpec

FILE = "reference_vectors.json"
SENTENCES = (  # in the demo's languages, with different lengths so that the batch contains padding
    "Save the file before you close the window.",
    "Speichern Sie die Datei.",
    "احفظ الملف قبل إغلاق النافذة.",
    "¿Seguro que quiere eliminar este elemento?",
    "Une erreur est survenue.",
    "パスワードを入力してください。",
    "Файл не найден",
    "Değişiklikler kaydedildi.",
    "Bạn không có quyền xem trang này.",
    "请选择一种语言。",
)
PRODUCTS = 6  # consecutive matrix products per layer: query or key, scores, context, output, up, down


class _Content(TypedDict):
    layer: Annotated[int, Field(ge=0, le=1000)]
    pooling: str
    sentences: list[str]
    vectors: list[list[float]]
    prefix: NotRequired[str]


@dataclass(frozen=True)
class Reference:
    """Ten sentences, and the vectors that a copy of the model must reproduce."""

    layer: int
    pooling: str
    sentences: tuple[str, ...]
    vectors: Tensor  # (10, d) float32
    prefix: str = ""  # text to add before each sentence

    @property
    def tolerance(self) -> float:
        """The largest relative difference that rounding can cause between two fp32 computations of a vector.

        Each kernel adds n terms in its own order, and rounds each sum by up to 2^-24. Errors have both signs, so that
        the total is about sqrt(n) 2^-24. The longest sum, in the feed-forward layer, has 4 d terms. The bound adds the
        errors of consecutive products, for both computations. Half-precision weights cause five times this difference.
        """
        return 2 * PRODUCTS * max(1, self.layer) * math.sqrt(4 * self.vectors.shape[1]) * 2**-24


@dataclass(frozen=True)
class Difference:
    """The largest differences between computed vectors and reference vectors."""

    relative: float  # largest length of a difference vector, as a share of the reference vector's length
    absolute: float  # largest difference between two components
    cosine: float  # lowest cosine

    def __str__(self) -> str:
        differences = f"worst difference {self.absolute:.2g}, {self.relative:.2g} of the length"
        return f"worst cosine {self.cosine:.7f}, {differences}"


def write_reference(directory: Path) -> None:
    """Compute an exported model's reference vectors and write `FILE` to its directory.

    Skip models without a tokenizer, which occur in tests.
    """
    if not (directory / "tokenizer_config.json").is_file():
        return
    model, tokenizer = load_encoder(directory, "cpu")
    layer, pooling = find_embedding_settings(model)
    spec = VectorSpec(pooling, layer)
    prefix = find_default_prefix(model)
    encoder = VectorEncoder(model, tokenizer, batch_size=len(SENTENCES), max_tokens=256, prefix=prefix)
    vectors = encoder.embed(SENTENCES, [spec])[spec]
    content = {"layer": layer, "pooling": pooling, "sentences": SENTENCES, "vectors": vectors.tolist()}
    if prefix:
        content["prefix"] = prefix
    manifests.write_atomically(directory / FILE, json.dumps(content, ensure_ascii=False) + "\n")


def read_reference(directory: Path) -> Reference:
    """Read a model's reference vectors.

    Raises:
        InputError: the model has no reference vectors.
        DataCorrupt: the file of reference vectors is not readable.
    """
    path = directory / FILE
    if not path.is_file():
        raise InputError(
            f"{directory} has no {FILE}: the model was exported elsewhere, or by an old version. Remove the model's "
            "artifact from the store, and run the pipeline again to export and register the last checkpoint."
        )
    try:
        content = user_files.read_json(path, _Content, "copy or export the model again", DataCorrupt)
        sentences = content["sentences"]
        vectors = torch.tensor(content["vectors"], dtype=torch.float32)
        # `not … > 0` also rejects NaN.
        if vectors.ndim != 2 or len(vectors) != len(sentences) or not vectors.norm(dim=1).min() > 0:
            raise ValueError(f"{tuple(vectors.shape)} numbers for {len(sentences)} sentences")
        return Reference(content["layer"], content["pooling"], tuple(sentences), vectors, content.get("prefix", ""))
    except (ValueError, TypeError, RuntimeError) as error:  # rows of different lengths, numbers beyond fp32
        raise DataCorrupt(f"{path} cannot be read ({error}). Copy or export the model again.") from None


def compare_vectors(reference: Reference, vectors: Tensor, name: str, explanation: str = "") -> Difference:
    """Compare computed vectors with the reference vectors, and return the largest differences.

    Args:
        reference: the reference vectors.
        vectors: computed vectors (10, d) of the same sentences.
        name: the model's name for messages.
        explanation: last part of error messages, such as ": computed by torch 2.8".

    Raises:
        DataCorrupt: the vectors differ by more than rounding errors can explain.
    """
    expected = reference.vectors.double()
    actual = vectors.double()
    if actual.shape != expected.shape:
        raise DataCorrupt(f"{name} gives vectors {tuple(actual.shape)}, expected {tuple(expected.shape)}{explanation}")
    errors = actual - expected
    relative_errors = errors.norm(dim=1) / expected.norm(dim=1)
    cosines = torch.nn.functional.cosine_similarity(actual, expected)
    difference = Difference(relative_errors.max().item(), errors.abs().max().item(), cosines.min().item())
    if not difference.relative <= reference.tolerance:  # also rejects NaN
        sentence = reference.sentences[int(relative_errors.argmax())]
        raise DataCorrupt(
            f"{name} does not reproduce its reference vectors: {difference}, allowed is {reference.tolerance:.2g} "
            f"({sentence!r}){explanation}"
        )
    return difference


def check_with_transformers(directory: Path, name: str, python: str = sys.executable) -> str:
    """Recompute a model's reference vectors with transformers alone, and return a one-line report of the difference.

    The vectors are computed by a new process of `python` that cannot import this project.

    Raises:
        InputError: the model has no reference vectors, or the process cannot load the model.
        DataCorrupt: the vectors differ.
    """
    reference = read_reference(directory)
    request = {
        "directory": str(directory.resolve()),
        "layer": reference.layer,
        "pooling": reference.pooling,
        "sentences": [reference.prefix + sentence for sentence in reference.sentences],
    }
    result = _run_plain_transformers(python, request, name)
    # The process reports which of this project's packages it was unable to import. It must be all of them.
    if len(result["blocked"]) != len(plain_transformers.BLOCKED_PACKAGES):
        raise InputError(f"{python} could import this project, although it must use transformers alone")
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    difference = compare_vectors(
        reference,
        torch.tensor(result["vectors"], dtype=torch.float32),
        name,
        f": computed by {versions}: serve it with the versions in its manifest (made_by)",
    )
    return (
        f"{name} is served as it was registered: {len(reference.sentences)} vectors, {reference.pooling} of layer "
        f"{reference.layer}, {difference} (allowed {reference.tolerance:.2g}); computed by {versions} without this "
        "project"
    )


def _run_plain_transformers(python: str, request: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Run `plain_transformers.py` with a request on stdin, and return the parsed output.

    Raises:
        InputError: `python` cannot be run, or cannot load the model `name`.
    """
    # The option -I removes PYTHONPATH and the script's directory from the import path.
    command = [python, "-I", plain_transformers.__file__]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",  # avoids warnings about forks
        "TRANSFORMERS_VERBOSITY": "error",
    }
    try:
        process = subprocess.run(  # noqa: S603
            command, input=json.dumps(request), capture_output=True, text=True, env=environment
        )
    except OSError as error:
        raise InputError(f"{python} cannot be run ({error}). Give the Python of an environment.") from None
    if process.returncode:
        error_lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
        reason = error_lines[-1][:300]  # a traceback ends with the error
        raise InputError(f"{name} cannot be loaded by {python} ({reason}). It needs torch and transformers.")
    return json.loads(process.stdout.splitlines()[-1])  # libraries may print lines before the result
