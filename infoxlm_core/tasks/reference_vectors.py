"""Ten sentences and their vectors beside every exported model: whoever serves it can see that it still gives them.

    reference_vectors.json    {"layer": 8, "pooling": "mean", "sentences": [10 texts], "vectors": [10 rows of d]}

`layer` counts as in `hidden_states`: 0 is the output of the embeddings. `pooling` is mean, of all tokens with `<s>` and
`</s>`, or cls. The numbers are fp32, computed on a CPU, and written so that reading them gives the same fp32 again. The
file is one of those that the model's manifest names, so its digest and its signature cover it.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import TypedDict

from infoxlm_core import manifests, outside
from infoxlm_core.errors import DataCorrupt, InputError
from infoxlm_core.model.huggingface import plain_transformers
from infoxlm_core.model.huggingface.any_encoder import contrast_space, load_encoder
from infoxlm_core.tasks.embedding import VectorSpec, embed

FILE = "reference_vectors.json"
SENTENCES = (  # the demo's languages; of different lengths, so that a batch of them has padding
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
PRODUCTS = 6  # matrix products that follow each other in a layer: query or key, scores, context, output, up, down


class _Said(TypedDict):
    """What the file says."""

    layer: Annotated[int, Field(ge=0, le=1000)]
    pooling: str
    sentences: list[str]
    vectors: list[list[float]]


@dataclass(frozen=True)
class Reference:
    """What the file says."""

    layer: int
    pooling: str
    sentences: tuple[str, ...]
    vectors: Tensor  # (10, d) float32

    @property
    def tolerance(self) -> float:
        """How far two computations in fp32 may be apart, as a share of a vector's length.

        A kernel adds up n terms in an order of its own, each time rounded by up to 2^-24: the errors go either way and
        come to about sqrt(n) 2^-24; the longest sum, that of the feed-forward layer, has 4 d terms. From product to
        product we let them add in full, for either computation. Weights in half precision are five times outside.
        """
        return 2 * PRODUCTS * max(1, self.layer) * math.sqrt(4 * self.vectors.shape[1]) * 2**-24


@dataclass(frozen=True)
class Difference:
    """How far vectors are from those of the file, where they are farthest."""

    share: float
    """Of the vector's length."""
    absolute: float
    """Of one number."""
    cosine: float

    def __str__(self) -> str:
        return f"worst cosine {self.cosine:.7f}, worst difference {self.absolute:.2g}, {self.share:.2g} of the length"


def write(directory: Path) -> None:
    """Put the file beside an exported model, in its own space; nothing if the model has no tokenizer, as in tests."""
    if not (directory / "tokenizer_config.json").is_file():
        return
    model, tokenizer = load_encoder(directory, "cpu")
    layer, pooling = contrast_space(model) or (model.config.num_hidden_layers, "mean")
    spec = VectorSpec(pooling, layer)
    vectors = embed(model, tokenizer, SENTENCES, [spec], len(SENTENCES), max_tokens=256)[spec]
    said = {"layer": layer, "pooling": pooling, "sentences": SENTENCES, "vectors": vectors.tolist()}
    manifests.write_atomically(directory / FILE, json.dumps(said, ensure_ascii=False) + "\n")


def read(directory: Path) -> Reference:
    """Read the file.

    Raises:
        InputError: the model has none.
        DataCorrupt: it cannot be read.
    """
    path = directory / FILE
    if not path.is_file():
        raise InputError(
            f"{directory} has no {FILE}: it was made elsewhere, or before these were kept; remove its artifact from "
            "the store and run the pipeline again: it is exported anew from the last checkpoint, and registered"
        )
    try:
        said = outside.read_json(path, _Said, "copy or export the model again", DataCorrupt)
        vectors = torch.tensor(said["vectors"], dtype=torch.float32)
        if vectors.ndim != 2 or len(vectors) != len(said["sentences"]) or not vectors.norm(dim=1).min() > 0:
            raise ValueError(f"{tuple(vectors.shape)} numbers for {len(said['sentences'])} sentences")
        return Reference(said["layer"], said["pooling"], tuple(said["sentences"]), vectors)
    except (ValueError, TypeError, RuntimeError) as error:  # rows of different lengths, numbers beyond fp32
        raise DataCorrupt(f"{path} cannot be read ({error}): copy or export the model again") from None


def compare(reference: Reference, vectors: Tensor, name: str, computed: str = "") -> Difference:
    """How far vectors are from the registered ones.

    Raises:
        DataCorrupt: further than two computations of the same can be apart; `computed` says where these come from.
    """
    ours, theirs = reference.vectors.double(), vectors.double()
    if theirs.shape != ours.shape:
        raise DataCorrupt(f"{name} gives vectors {tuple(theirs.shape)}, registered are {tuple(ours.shape)}{computed}")
    apart = theirs - ours
    shares = apart.norm(dim=1) / ours.norm(dim=1)
    cosines = torch.nn.functional.cosine_similarity(theirs, ours)
    found = Difference(shares.max().item(), apart.abs().max().item(), cosines.min().item())
    if not found.share <= reference.tolerance:  # also: not a number
        sentence = reference.sentences[int(shares.argmax())]
        raise DataCorrupt(
            f"{name} gives other vectors than were registered: {found}, allowed is {reference.tolerance:.2g} "
            f"({sentence!r}){computed}"
        )
    return found


def check(directory: Path, name: str, python: str = sys.executable) -> str:
    """Let a fresh process of `python` compute the vectors by transformers alone; say in one line how far they are.

    Raises:
        InputError: the model has no vectors to compare with, or that process cannot load it.
        DataCorrupt: it gives other vectors.
    """
    reference = read(directory)
    wanted = {"directory": str(directory.resolve()), "layer": reference.layer, "pooling": reference.pooling}
    said = _run(python, wanted | {"sentences": reference.sentences}, name)
    if len(said["blocked"]) != len(plain_transformers.OURS):
        raise InputError(f"{python} could import this project: it was to have transformers alone")
    versions = ", ".join(f"{one} {version}" for one, version in said["versions"].items())
    found = compare(
        reference,
        torch.tensor(said["vectors"], dtype=torch.float32),
        name,
        f": computed by {versions}{_made_by(directory)}: serve it with these",
    )
    return (
        f"{name} is served as it was registered: {len(reference.sentences)} vectors, {reference.pooling} of layer "
        f"{reference.layer}, {found} (allowed {reference.tolerance:.2g}); computed by {versions} without this project"
    )


def _run(python: str, wanted: Mapping[str, Any], name: str) -> dict[str, Any]:
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    command = [python, "-I", plain_transformers.__file__]  # isolated: no PYTHONPATH, no folder of the script
    try:
        done = subprocess.run(  # noqa: S603
            command, input=json.dumps(wanted), capture_output=True, text=True, env={**os.environ, **quiet}
        )
    except OSError as error:
        raise InputError(f"{python} cannot be run ({error}): give the Python of an environment") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise InputError(f"{name} cannot be loaded by {python} ({reason[:300]}): it needs torch and transformers")
    return json.loads(done.stdout.splitlines()[-1])


def _made_by(directory: Path) -> str:
    """With which versions the model was exported, if its manifest says so."""
    if not (directory / manifests.NAME).is_file():
        return ""
    made = manifests.load(directory).get("made_by", {})
    return ", made by " + ", ".join(f"{one} {made[one]}" for one in ("torch", "transformers") if one in made)
