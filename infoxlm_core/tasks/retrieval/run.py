"""Task: find translations in an aligned set (Tatoeba, FLORES, NTREX, your own), by language, direction and layer."""

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from infoxlm_core import manifests
from infoxlm_core.errors import InputError
from infoxlm_core.model.huggingface.any_encoder import contrast_space, describe, load_encoder, load_projection
from infoxlm_core.progress import progress
from infoxlm_core.tasks.embedding import ALL_POOLINGS, POOLINGS, Place, embed
from infoxlm_core.tasks.retrieval import files, nearest
from infoxlm_core.tasks.retrieval.files import Sides
from infoxlm_core.tasks.retrieval.settings import RetrievalConfig
from infoxlm_core.tasks.task import Scores, mean_over

if TYPE_CHECKING:
    from infoxlm_core.model.huggingface.any_encoder import Model

logger = logging.getLogger(__name__)

DIRECTIONS = ("to_pivot", "from_pivot")
CURVE_PAIRS = 5_000  # up to which every layer is measured unasked: all layers of more do not fit into memory


def measure(config: RetrievalConfig, encoder: Path, output: Path) -> Scores:
    """Retrieve in both directions with every vector asked for, and by layer (Figure 1 of the paper).

    Writes misses.parquet: each sentence whose translation the first vector did not find, and what it did.

    Raises:
        InputError: no such model, set, language, layer or pooling, or a set whose lines do not fit.
    """
    sets = files.read_aligned(Path(config.data), config.pivot, config.languages)
    model, tokenizer = load_encoder(encoder)
    meant = {vector: find_places(vector, model, encoder) for vector in config.vectors}
    places = [place for chosen in meant.values() for place in chosen]
    if max(len(sources) for sources, _ in sets.values()) <= CURVE_PAIRS:
        places += [place for pooling in POOLINGS for place in find_places(f"{pooling}@best", model, encoder)]
    places = sorted(set(places))
    projected = any(place.pooling == "contrast" for place in places)
    projection = load_projection(encoder, model) if projected else None

    total = sum(len(side) for sides in sets.values() for side in sides)
    with progress("retrieval", total, "sentences") as advance:

        def read(texts: list[str]) -> dict[Place, Tensor]:
            prefixed = [config.prefix + text for text in texts]
            return embed(model, tokenizer, prefixed, places, config.batch_size, config.max_tokens, projection, advance)

        found = nearest.search(_embed(sets, read, advance), config.margin)
    cells = {place: {code: _share_right(found[code][place]) for code in sets} for place in places}
    chosen = {  # of equals the lowest layer
        vector: max(candidates, key=lambda place: mean_over(cells[place])["mean"])
        for vector, candidates in meant.items()
    }
    first = chosen[config.vectors[0]]
    write_misses(output / "misses.parquet", sets, {code: found[code][first] for code in sets})
    main = mean_over(cells[first])
    logger.info("%s: %.4f over %d languages (%s, layer %d)", encoder, main["mean"], len(sets), *first)
    vectors = {
        vector: {**place._asdict(), "languages": cells[place], "mean": mean_over(cells[place])}
        for vector, place in chosen.items()
    }
    by_layer = trace_layers(cells, model.config.num_hidden_layers)
    return Scores(
        "retrieval",
        cells[first],
        main,
        counts={code: len(sources) for code, (sources, _) in sets.items()},
        test_set=manifests.digest(sets),
        details={"vectors": vectors, "by_layer": by_layer, "encoder": describe(model)},
    )


def find_places(vector: str, model: "Model", encoder: Path) -> list[Place]:
    """`POOLING@LAYER` -> the place it names, of `best` all; InputError if the model has none, or was not contrasted."""
    pooling, _, name = vector.partition("@")
    last, space = model.config.num_hidden_layers, contrast_space(model)
    if space is None and "contrast" in (pooling, name):
        raise InputError(f"{encoder}: config.json names no contrast layer (infoxlm): leave {vector} out of vectors")
    layers = range(last + 1) if space is None or pooling != "contrast" else range(space[0], space[0] + 1)
    if name == "best":
        return [Place(pooling, layer) for layer in layers]
    named = {"last": last} | ({"contrast": space[0]} if space else {})
    layer = named[name] if name in named else int(name)
    if layer not in layers:
        raise InputError(f"{encoder} has no vector {vector}: its layers are {layers[0]} to {layers[-1]}")
    return [Place(pooling, layer)]


def _embed(
    sets: Mapping[str, Sides], vectors: Callable[[list[str]], dict[Place, Tensor]], advance: Callable[[int], None]
) -> Iterator[tuple[str, nearest.Vectors, nearest.Vectors]]:
    asked: list[str] = []
    pivot: dict[Place, Tensor] = {}
    for code, (sources, targets) in sets.items():
        if sources is asked:  # one file of the pivot for all languages
            advance(len(sources))
        else:
            asked, pivot = sources, vectors(sources)
        yield code, pivot, vectors(targets)


def _share_right(found: Mapping[str, Tensor]) -> dict[str, float]:
    """Accuracy in each direction and their mean."""
    shares = {name: (found[name] == torch.arange(len(found[name]))).double().mean().item() for name in DIRECTIONS}
    return shares | {"mean": fmean(shares.values())}


def trace_layers(cells: Mapping[Place, dict[str, dict[str, float]]], last: int) -> dict[str, dict[str, list[float]]]:
    """Means over languages at every layer, for each pooling that was measured at all of them."""
    curves = {}
    for pooling in ALL_POOLINGS:
        places = [Place(pooling, layer) for layer in range(last + 1)]
        if all(place in cells for place in places):
            means = [mean_over(cells[place]) for place in places]
            curves[pooling] = {name: [mean[name] for mean in means] for name in means[0]}
    return curves


def write_misses(path: Path, sets: Mapping[str, Sides], found: Mapping[str, dict[str, Tensor]]) -> None:
    """Write a row for each sentence that was not answered by its translation."""
    kinds = {"language": "string", "direction": "string", "line": "int64", "sentence": "string", "right": "string",
             "found": "string"}  # fmt: skip
    rows = []
    for code, (sources, targets) in sets.items():
        for direction, asked, candidates in (("to_pivot", targets, sources), ("from_pivot", sources, targets)):
            for row, best in enumerate(found[code][direction].tolist()):
                if row != best:
                    miss = (code, direction, row, asked[row], candidates[row], candidates[best])
                    rows.append(dict(zip(kinds, miss, strict=True)))
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(kinds.items())), path)
