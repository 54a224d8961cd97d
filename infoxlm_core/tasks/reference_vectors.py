"""Store ten sentences and their vectors beside every exported model, so that a server can check its own results.

    reference_vectors.json    {"layer": 8, "pooling": "mean", "sentences": [10 texts], "vectors": [10 rows of d]}

`layer` counts as in `hidden_states`: 0 is the output of the embeddings. `pooling` is cls, or mean of all tokens
including `<s>` and `</s>`. The file of a model with a prefix also has `"prefix"`, the text before each sentence. The
numbers are fp32, computed on a CPU, and written so that reading restores the same fp32.
The model's manifest lists the file, so digest and signature cover it.
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
SENTENCES = (  # the demo's languages; their lengths differ, so that a batch has padding
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
PRODUCTS = 6  # consecutive matrix products of a layer: query or key, scores, context, output, up, down


class _Content(TypedDict):
    layer: Annotated[int, Field(ge=0, le=1000)]
    pooling: str
    sentences: list[str]
    vectors: list[list[float]]
    prefix: NotRequired[str]


@dataclass(frozen=True)
class Reference:
    """Ten sentences, and the vectors that a copy of the model must give for them."""

    layer: int
    pooling: str
    sentences: tuple[str, ...]
    vectors: Tensor  # (10, d) float32
    prefix: str = ""  # text before each sentence

    @property
    def tolerance(self) -> float:
        """The largest relative difference that rounding explains between two fp32 computations of a vector.

        A kernel adds n terms in its own order, each rounded by up to 2^-24. Errors have both signs, so their sum is
        about sqrt(n) 2^-24. The longest sum, in the feed-forward layer, has 4 d terms. Errors of consecutive products
        are added in full, for both computations. Weights in half precision differ five times as much.
        """
        return 2 * PRODUCTS * max(1, self.layer) * math.sqrt(4 * self.vectors.shape[1]) * 2**-24


@dataclass(frozen=True)
class Difference:
    """The largest differences between computed vectors and reference vectors."""

    relative: float  # largest length of a difference, as a share of the vector's length
    absolute: float  # largest difference of two numbers
    cosine: float  # lowest cosine

    def __str__(self) -> str:
        differences = f"worst difference {self.absolute:.2g}, {self.relative:.2g} of the length"
        return f"worst cosine {self.cosine:.7f}, {differences}"


def write_reference(directory: Path) -> None:
    """Compute the reference vectors of an exported model, and write them beside it.

    Models without tokenizer, as in tests, get none.
    """
    if not (directory / "tokenizer_config.json").is_file():
        return
    model, tokenizer = load_encoder(directory, "cpu")
    layer, pooling = find_embedding_settings(model)
    spec = VectorSpec(pooling, layer)
    prefix = find_default_prefix(model)
    encoder = VectorEncoder(model, tokenizer, len(SENTENCES), max_tokens=256, prefix=prefix)
    vectors = encoder.embed(SENTENCES, [spec])[spec]
    content = {"layer": layer, "pooling": pooling, "sentences": SENTENCES, "vectors": vectors.tolist()}
    if prefix:
        content["prefix"] = prefix
    manifests.write_atomically(directory / FILE, json.dumps(content, ensure_ascii=False) + "\n")


def read_reference(directory: Path) -> Reference:
    """Read the reference vectors beside a model.

    Raises:
        InputError: the model has no reference vectors.
        DataCorrupt: their file is not readable.
    """
    path = directory / FILE
    if not path.is_file():
        raise InputError(
            f"{directory} has no {FILE}: it was exported elsewhere, or by an old version. Remove its artifact from the "
            "store and run the pipeline again, which exports and registers it from the last checkpoint."
        )
    try:
        content = user_files.read_json(path, _Content, "copy or export the model again", DataCorrupt)
        sentences = content["sentences"]
        vectors = torch.tensor(content["vectors"], dtype=torch.float32)
        # The last condition is also true for NaN, so that all lengths are above 0.
        if vectors.ndim != 2 or len(vectors) != len(sentences) or not vectors.norm(dim=1).min() > 0:
            raise ValueError(f"{tuple(vectors.shape)} numbers for {len(sentences)} sentences")
        return Reference(content["layer"], content["pooling"], tuple(sentences), vectors, content.get("prefix", ""))
    except (ValueError, TypeError, RuntimeError) as error:  # rows of different lengths, numbers beyond fp32
        raise DataCorrupt(f"{path} cannot be read ({error}). Copy or export the model again.") from None


def compare_vectors(reference: Reference, vectors: Tensor, name: str, explanation: str = "") -> Difference:
    """Return the differences between computed vectors and the reference vectors.

    Args:
        reference: the reference vectors.
        vectors: the computed vectors of the same sentences.
        name: the model's name in messages.
        explanation: end of error messages, such as ": computed by torch 2.8".

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
    if not difference.relative <= reference.tolerance:  # true for NaN too
        sentence = reference.sentences[int(relative_errors.argmax())]
        raise DataCorrupt(
            f"{name} gives other vectors than were registered: {difference}, allowed is {reference.tolerance:.2g} "
            f"({sentence!r}){explanation}"
        )
    return difference


def check_with_transformers(directory: Path, name: str, python: str = sys.executable) -> str:
    """Compute a model's reference vectors again with transformers alone, and return a line that reports the difference.

    A new process of `python` computes them, in which this project cannot be imported.

    Raises:
        InputError: the model has no reference vectors, or the process cannot load it.
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
    """Run `plain_transformers.py` with a request on its stdin, and return the JSON that it prints.

    Raises:
        InputError: `python` cannot be run, or it cannot load the model `name`.
    """
    # -I isolates the process: PYTHONPATH is ignored, and the script's folder is not on the path of imports.
    command = [python, "-I", plain_transformers.__file__]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",  # it would warn about forks
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
        reason = error_lines[-1][:300]
        raise InputError(f"{name} cannot be loaded by {python} ({reason}). It needs torch and transformers.")
    return json.loads(process.stdout.splitlines()[-1])
