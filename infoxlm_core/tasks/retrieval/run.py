"""Measure retrieval on an aligned set (Tatoeba, FLORES, NTREX, your own), by language, direction and layer."""

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from infoxlm_core import manifests
from infoxlm_core.errors import InputError
from infoxlm_core.model.huggingface.any_encoder import contrast_space, describe, load_encoder, load_projection
from infoxlm_core.progress import progress
from infoxlm_core.tasks.embedding import ALL_POOLINGS, POOLINGS, VectorSpec, embed
from infoxlm_core.tasks.retrieval.files import Sides, read_aligned
from infoxlm_core.tasks.retrieval.nearest import Nearest, Vectors, mark_hits, search, share
from infoxlm_core.tasks.retrieval.settings import RetrievalConfig
from infoxlm_core.tasks.scores import Scores, mean_over

if TYPE_CHECKING:
    from infoxlm_core.model.huggingface.any_encoder import Model

logger = logging.getLogger(__name__)

DIRECTIONS = ("to_pivot", "from_pivot")
CURVE_PAIRS = 5_000  # larger sets are not measured at every layer, because the vectors would not fit into memory


def measure(config: RetrievalConfig, encoder: Path, output: Path) -> Scores:
    """Retrieve in both directions with every configured vector, and at every layer (Figure 1 of the paper).

    Writes misses.parquet: each sentence whose translation the first vector did not find, and what it found.

    Raises:
        InputError: the model, the set, a language, a layer or a pooling does not exist, or lines do not match.
    """
    sets = read_aligned(Path(config.data), config.pivot, config.languages)
    model, tokenizer = load_encoder(encoder)
    candidates = {vector: parse_vector(vector, model, encoder) for vector in config.vectors}
    specs = {spec for named in candidates.values() for spec in named}
    if max(len(sources) for sources, _ in sets.values()) <= CURVE_PAIRS:
        for pooling in POOLINGS:
            specs.update(parse_vector(f"{pooling}@best", model, encoder))
    ordered = sorted(specs)
    projected = any(spec.pooling == "contrast" for spec in specs)
    projection = load_projection(encoder, model) if projected else None

    total = sum(len(side) for sides in sets.values() for side in sides)
    with progress("retrieval", total, "sentences") as advance:

        def embed_texts(texts: list[str], language: str) -> dict[VectorSpec, Tensor]:
            prefixed = [config.prefix + text for text in texts]
            return embed(
                model,
                tokenizer,
                prefixed,
                ordered,
                config.batch_size,
                config.max_tokens,
                projection,
                advance,
                language,
            )

        nearest = search(_embed(sets, config.pivot, embed_texts, advance), config.margin)
    rows = {spec: {language: _score(nearest[language][spec]) for language in sets} for spec in ordered}
    means = {spec: mean_over(rows[spec]) for spec in ordered}
    chosen = {vector: max(named, key=lambda spec: means[spec]["mean"]) for vector, named in candidates.items()}
    main = chosen[config.vectors[0]]
    write_misses(output / "misses.parquet", sets, {language: by_spec[main] for language, by_spec in nearest.items()})
    logger.info("%s: %.4f over %d languages (%s, layer %d)", encoder, means[main]["mean"], len(sets), *main)
    vectors = {
        vector: {**spec._asdict(), "languages": rows[spec], "mean": means[spec]} for vector, spec in chosen.items()
    }
    by_layer = trace_layers(means, model.config.num_hidden_layers)
    return Scores(
        "retrieval",
        rows[main],
        means[main],
        counts={language: len(sources) for language, (sources, _) in sets.items()},
        test_set=manifests.digest(sets),
        details={"vectors": vectors, "by_layer": by_layer, "encoder": describe(model)},
    )


def parse_vector(vector: str, model: "Model", encoder: Path) -> list[VectorSpec]:
    """Return the vector that `POOLING@LAYER` names; for `best` those of all layers, the lowest first.

    Raises:
        InputError: the model does not have the layer, or was not contrasted.
    """
    pooling, _, layer_name = vector.partition("@")
    last_layer = model.config.num_hidden_layers
    layers = range(last_layer + 1)
    layer_of_name = {"last": last_layer}
    if "contrast" in (pooling, layer_name):
        space = contrast_space(model)
        if space is None:
            raise InputError(f"{encoder}: config.json names no contrast layer (infoxlm): leave {vector} out of vectors")
        layer_of_name["contrast"] = space[0]
        if pooling == "contrast":  # the projection was trained for this layer only
            layers = range(space[0], space[0] + 1)
    if layer_name == "best":
        return [VectorSpec(pooling, layer) for layer in layers]
    layer = layer_of_name[layer_name] if layer_name in layer_of_name else int(layer_name)
    if layer not in layers:
        raise InputError(f"{encoder} has no vector {vector}: its layers are {layers[0]} to {layers[-1]}")
    return [VectorSpec(pooling, layer)]


def _embed(
    sets: Mapping[str, Sides],
    pivot_language: str,
    embed_texts: Callable[[list[str], str], dict[VectorSpec, Tensor]],
    advance: Callable[[int], None],
) -> Iterator[tuple[str, Vectors, Vectors]]:
    embedded: list[str] = []
    pivot: dict[VectorSpec, Tensor] = {}
    for language, (sources, targets) in sets.items():
        if sources is embedded:  # one file of the pivot serves all languages
            advance(len(sources))
        else:
            embedded, pivot = sources, embed_texts(sources, pivot_language)
        yield language, pivot, embed_texts(targets, language)


def _score(nearest: Nearest) -> dict[str, float]:
    """Return the accuracy in each direction and their mean."""
    hits = mark_hits(nearest)
    shares = {direction: share(hits[direction]) for direction in DIRECTIONS}
    return shares | {"mean": fmean(shares.values())}


def trace_layers(means: Mapping[VectorSpec, Mapping[str, float]], last: int) -> dict[str, dict[str, list[float]]]:
    """Return the means over languages at every layer, for each pooling that was measured at all layers."""
    curves = {}
    for pooling in ALL_POOLINGS:
        specs = [VectorSpec(pooling, layer) for layer in range(last + 1)]
        if all(spec in means for spec in specs):
            curves[pooling] = {metric: [means[spec][metric] for spec in specs] for metric in means[specs[0]]}
    return curves


def write_misses(path: Path, sets: Mapping[str, Sides], nearest: Mapping[str, Nearest]) -> None:
    """Write a row for each sentence whose translation was not found."""
    kinds = {"language": "string", "direction": "string", "line": "int64", "sentence": "string", "right": "string",
             "found": "string"}  # fmt: skip
    rows = []
    for language, (sources, targets) in sets.items():
        for direction, queries, candidates in (("to_pivot", targets, sources), ("from_pivot", sources, targets)):
            for row, best in enumerate(nearest[language][direction].tolist()):
                if row != best:
                    miss = (language, direction, row, queries[row], candidates[row], candidates[best])
                    rows.append(dict(zip(kinds, miss, strict=True)))
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(kinds.items())), path)
