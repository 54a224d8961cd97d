"""Measure retrieval on an aligned set (Tatoeba, FLORES, NTREX, your own), by language, direction and layer."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from infoxlm_core import manifests
from infoxlm_core.errors import InputError
from infoxlm_core.model.huggingface.any_encoder import (
    contrast_space,
    describe,
    load_encoder,
    load_projection,
    served_prefix,
    served_space,
)
from infoxlm_core.progress import progress
from infoxlm_core.tasks.embedding import ALL_POOLINGS, POOLINGS, VectorEncoder, VectorSpec
from infoxlm_core.tasks.retrieval import files
from infoxlm_core.tasks.retrieval.files import AlignedSentences, read_aligned
from infoxlm_core.tasks.retrieval.nearest import NearestRows, accuracy, find_nearest_by_spec, mark_hits
from infoxlm_core.tasks.retrieval.task import BOTH_DIRECTIONS, RetrievalConfig
from infoxlm_core.tasks.scores import Scores, mean_over

if TYPE_CHECKING:
    from infoxlm_core.model.huggingface.any_encoder import Model

logger = logging.getLogger(__name__)

DIRECTIONS = ("to_pivot", "from_pivot")
CURVE_PAIRS = 5_000  # larger sets are not measured at every layer, because the vectors would not fit into memory


def check(config: RetrievalConfig, has_grid: bool) -> None:  # noqa: ARG001
    """Raise InputError if the set or a language is missing or not usable."""
    read_aligned(Path(config.data), config.pivot, config.languages)


def list_test_files(config: RetrievalConfig) -> list[Path]:
    """Return the local files with aligned sentences."""
    return files.list_test_files(Path(config.data))


def measure(config: RetrievalConfig, encoder: Path, output: Path) -> Scores:
    """Measure retrieval in both directions with every configured vector, and at every layer (Figure 1 of the paper).

    Write misses.parquet: the sentences whose translation the first vector did not find, with the sentence it found.

    Raises:
        InputError: the model, the set, a language, a layer or a pooling does not exist, or lines do not match.
    """
    sets = read_aligned(Path(config.data), config.pivot, config.languages)
    model, tokenizer = load_encoder(encoder)
    # mean@best stands for the vectors of all layers, of which the one with the best score is chosen.
    candidates = {vector: parse_vector(vector, model, encoder) for vector in config.vectors}
    specs = _list_specs(candidates, sets, model, encoder)
    has_contrast = any(spec.pooling == "contrast" for spec in specs)
    projection = load_projection(encoder, model) if has_contrast else None
    prefix = served_prefix(model) if config.prefix is None else config.prefix
    vector_encoder = VectorEncoder(model, tokenizer, config.batch_size, config.max_tokens, prefix, projection)
    nearest = _retrieve(config, sets, specs, vector_encoder)
    scores: dict[VectorSpec, dict[str, dict[str, float]]] = {}
    for spec in specs:
        scores[spec] = {language: score_directions(mark_hits(nearest[language][spec])) for language in sets}
    means = {spec: mean_over(scores[spec]) for spec in specs}
    chosen_specs = {}
    for vector, vector_candidates in candidates.items():
        chosen_specs[vector] = max(vector_candidates, key=lambda spec: means[spec][BOTH_DIRECTIONS])
    main_spec = chosen_specs[config.vectors[0]]
    write_misses(output / "misses.parquet", sets, {language: nearest[language][main_spec] for language in sets})
    accuracy_of_main = means[main_spec][BOTH_DIRECTIONS]
    logger.info("%s: %.4f over %d languages (%s, layer %d)", encoder, accuracy_of_main, len(sets), *main_spec)

    details_by_vector = {}
    for vector, spec in chosen_specs.items():
        details_by_vector[vector] = {**spec._asdict(), "languages": scores[spec], "mean": means[spec]}
    return Scores(
        "retrieval",
        scores[main_spec],
        means[main_spec],
        counts={language: len(sources) for language, (sources, _) in sets.items()},
        test_set=manifests.digest(sets),
        details={
            "vectors": details_by_vector,
            "by_layer": average_by_layer(means, model.config.num_hidden_layers),
            "encoder": describe(model),
        },
    )


def _list_specs(
    candidates: Mapping[str, Sequence[VectorSpec]], sets: Mapping[str, AlignedSentences], model: "Model", encoder: Path
) -> list[VectorSpec]:
    """Return all vectors to compute: the candidates, and those of every layer if the sets are small enough."""
    specs: set[VectorSpec] = set()
    for vector_candidates in candidates.values():
        specs.update(vector_candidates)
    largest_set = max(len(sources) for sources, _ in sets.values())
    if largest_set <= CURVE_PAIRS:
        for pooling in POOLINGS:
            specs.update(parse_vector(f"{pooling}@best", model, encoder))
    return sorted(specs)


def parse_vector(vector: str, model: "Model", encoder: Path) -> list[VectorSpec]:
    """Return the vector that `served` or `POOLING@LAYER` names, or the vectors of all layers for `POOLING@best`.

    Raises:
        InputError: the model does not have the layer, or has no contrast layer because it was trained without XLCO.
    """
    if vector == "served":
        space = served_space(model)
        return [VectorSpec(space.pooling, space.layer)]
    pooling, _, layer_name = vector.partition("@")
    last_layer = model.config.num_hidden_layers
    layers = range(last_layer + 1)
    layer_of_name = {"last": last_layer}
    if "contrast" in (pooling, layer_name):
        contrast = contrast_space(model.config)
        if contrast is None:
            raise InputError(
                f"{encoder}: config.json names no contrast layer (field infoxlm). Remove {vector} from vectors."
            )
        layer_of_name["contrast"] = contrast.layer
        if pooling == "contrast":  # the projection was trained for this layer only
            layers = range(contrast.layer, contrast.layer + 1)
    if layer_name == "best":
        return [VectorSpec(pooling, layer) for layer in layers]
    layer = layer_of_name[layer_name] if layer_name in layer_of_name else int(layer_name)
    if layer not in layers:
        raise InputError(f"{encoder} has no vector {vector}. Give a layer from {layers[0]} to {layers[-1]}.")
    return [VectorSpec(pooling, layer)]


def _retrieve(
    config: RetrievalConfig, sets: Mapping[str, AlignedSentences], specs: Sequence[VectorSpec], encoder: VectorEncoder
) -> dict[str, dict[VectorSpec, NearestRows]]:
    """Embed all sentences, and find the nearest ones by language and vector, with a progress bar."""
    nearest: dict[str, dict[VectorSpec, NearestRows]] = {}
    previous_sources: list[str] = []
    source_vectors: dict[VectorSpec, Tensor] = {}
    num_sentences = sum(len(sources) + len(targets) for sources, targets in sets.values())
    with progress("retrieval", num_sentences, "sentences") as advance:
        for language, (sources, targets) in sets.items():
            if sources == previous_sources:  # most sets have the same pivot sentences in all languages
                advance(len(sources))
            else:
                source_vectors = encoder.embed(sources, specs, config.pivot, advance)
                previous_sources = sources
            target_vectors = encoder.embed(targets, specs, language, advance)
            nearest[language] = find_nearest_by_spec(source_vectors, target_vectors, config.margin)
            logger.info("retrieved %d pairs of %s", len(sources), language)
    return nearest


def score_directions(hits: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the accuracy in each direction and their mean. `hits` are (N,) bool by direction."""
    scores = {direction: accuracy(hits[direction]) for direction in DIRECTIONS}
    scores[BOTH_DIRECTIONS] = fmean(scores.values())
    return scores


def average_by_layer(
    means: Mapping[VectorSpec, Mapping[str, float]], last_layer: int
) -> dict[str, dict[str, list[float]]]:
    """Return pooling -> metric -> mean over languages at each layer, for poolings that were measured at all layers."""
    curves: dict[str, dict[str, list[float]]] = {}
    for pooling in ALL_POOLINGS:
        specs = [VectorSpec(pooling, layer) for layer in range(last_layer + 1)]
        if not all(spec in means for spec in specs):
            continue
        curves[pooling] = {}
        for metric in means[specs[0]]:
            curves[pooling][metric] = [means[spec][metric] for spec in specs]
    return curves


def write_misses(path: Path, sets: Mapping[str, AlignedSentences], nearest: Mapping[str, NearestRows]) -> None:
    """Write a row for each sentence whose translation was not found."""
    types = dict.fromkeys(("language", "direction", "line", "sentence", "right", "found"), "string") | {"line": "int64"}
    rows = []
    for language, (sources, targets) in sets.items():
        for direction, queries, candidates in (("to_pivot", targets, sources), ("from_pivot", sources, targets)):
            for line, nearest_line in enumerate(nearest[language][direction].tolist()):
                if line == nearest_line:
                    continue
                row = {
                    "language": language,
                    "direction": direction,
                    "line": line,
                    "sentence": queries[line],
                    "right": candidates[line],
                    "found": candidates[nearest_line],
                }
                rows.append(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema(types.items())  # pyarrow cannot infer the types if there are no rows
    pq.write_table(pa.Table.from_pylist(rows, schema), path)
