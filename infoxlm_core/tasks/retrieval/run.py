"""Measure retrieval on an aligned set (Tatoeba, FLORES, NTREX, your own) by language, direction and layer."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from infoxlm_core import manifests
from infoxlm_core.errors import InputError
from infoxlm_core.model.huggingface.any_encoder import (
    describe,
    find_default_prefix,
    find_embedding_settings,
    load_encoder,
    load_projection,
    read_contrast_settings,
)
from infoxlm_core.progress import show_progress
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
MAX_PAIRS_OF_ALL_LAYERS = 5_000
"""Largest set to measure at every layer. The vectors of a larger set would not fit into memory."""

MISSES_SCHEMA = pa.schema(  # explicit, because pyarrow cannot infer the types of an empty table
    [
        ("language", pa.string()),
        ("direction", pa.string()),
        ("line", pa.int64()),
        ("sentence", pa.string()),
        ("right", pa.string()),
        ("found", pa.string()),
    ]
)


def check(config: RetrievalConfig, has_grid: bool) -> None:  # noqa: ARG001
    """Raise InputError if the test set or a language is missing or not usable."""
    read_aligned(Path(config.data), config.pivot, config.languages)


def list_test_files(config: RetrievalConfig) -> list[Path]:
    """List the local files with aligned sentences."""
    return files.list_test_files(Path(config.data))


def measure(config: RetrievalConfig, encoder: Path, output: Path) -> Scores:
    """Measure retrieval in both directions with every configured vector, and at every layer (InfoXLM, Figure 1).

    Write the first vector's misses to misses.parquet: the query, its translation, and the retrieved sentence.

    Raises:
        InputError: the model, the test set, a language, a layer or a pooling does not exist, or lines do not match.
    """
    sets = read_aligned(Path(config.data), config.pivot, config.languages)
    model, tokenizer = load_encoder(encoder)
    # POOLING@best has a candidate at each layer. All other names have a single candidate.
    candidates_by_name = {name: parse_vector(name, model, encoder) for name in config.vectors}
    specs = _list_specs(candidates_by_name, sets, model, encoder)
    has_contrast = any(spec.pooling == "contrast" for spec in specs)
    projection = load_projection(encoder, model) if has_contrast else None
    prefix = find_default_prefix(model) if config.prefix is None else config.prefix
    vector_encoder = VectorEncoder(model, tokenizer, config.batch_size, config.max_tokens, prefix, projection)
    nearest = _retrieve(config, sets, specs, vector_encoder)

    scores: dict[VectorSpec, dict[str, dict[str, float]]] = {}
    for spec in specs:
        scores[spec] = {language: score_directions(mark_hits(nearest[language][spec])) for language in sets}
    means = {spec: mean_over(scores[spec]) for spec in specs}
    best_specs = {}
    for name, candidates in candidates_by_name.items():
        best_specs[name] = max(candidates, key=lambda spec: means[spec][BOTH_DIRECTIONS])
    main_spec = best_specs[config.vectors[0]]
    main_accuracy = means[main_spec][BOTH_DIRECTIONS]
    logger.info("%s: %.4f over %d languages (%s, layer %d)", encoder, main_accuracy, len(sets), *main_spec)
    write_misses(output / "misses.parquet", sets, {language: nearest[language][main_spec] for language in sets})

    details_by_name = {}
    for name, spec in best_specs.items():
        details_by_name[name] = {**spec._asdict(), "languages": scores[spec], "mean": means[spec]}
    return Scores(
        "retrieval",
        scores[main_spec],
        means[main_spec],
        counts={language: len(sources) for language, (sources, _) in sets.items()},
        test_set=manifests.digest(sets),
        details={
            "vectors": details_by_name,
            "by_layer": average_by_layer(means, model.config.num_hidden_layers),
            "encoder": describe(model),
        },
    )


def _list_specs(
    candidates_by_name: Mapping[str, Sequence[VectorSpec]],
    sets: Mapping[str, AlignedSentences],
    model: "Model",
    encoder: Path,
) -> list[VectorSpec]:
    """List the distinct vectors to compute: all candidates, and every layer if the sets are small enough."""
    specs = {spec for candidates in candidates_by_name.values() for spec in candidates}
    if max(len(sources) for sources, _ in sets.values()) <= MAX_PAIRS_OF_ALL_LAYERS:
        for pooling in POOLINGS:
            specs.update(parse_vector(f"{pooling}@best", model, encoder))  # one spec per layer
    return sorted(specs)


def parse_vector(name: str, model: "Model", encoder: Path) -> list[VectorSpec]:
    """Parse `served` or `POOLING@LAYER` into a single vector, and `POOLING@best` into a vector per layer.

    Raises:
        InputError: the model does not have the layer, or was trained without contrast and has no contrast layer.
    """
    if name == "served":
        served = find_embedding_settings(model)
        return [VectorSpec(served.pooling, served.layer)]
    pooling, _, layer_name = name.partition("@")
    last_layer = model.config.num_hidden_layers
    layers = list(range(last_layer + 1))
    if pooling == "contrast":  # the projection was trained for one layer only
        layers = [_find_contrast_layer(name, model, encoder)]
    if layer_name == "best":
        return [VectorSpec(pooling, layer) for layer in layers]
    if layer_name == "last":
        layer = last_layer
    elif layer_name == "contrast":
        layer = _find_contrast_layer(name, model, encoder)
    else:
        layer = int(layer_name)
    if layer not in layers:
        raise InputError(f"{encoder} has no vector {name}. Give a layer from {layers[0]} to {layers[-1]}.")
    return [VectorSpec(pooling, layer)]


def _find_contrast_layer(name: str, model: "Model", encoder: Path) -> int:
    """Return the layer of the contrastive loss. Raise InputError with the vector's name if there is no such layer."""
    contrast = read_contrast_settings(model.config)
    if contrast is None:
        raise InputError(f"{encoder}: config.json names no contrast layer (field infoxlm). Remove {name} from vectors.")
    return contrast.layer


def _retrieve(
    config: RetrievalConfig, sets: Mapping[str, AlignedSentences], specs: Sequence[VectorSpec], encoder: VectorEncoder
) -> dict[str, dict[VectorSpec, NearestRows]]:
    """Embed all sentences with a progress bar, and find the nearest sentences by language and vector."""
    nearest: dict[str, dict[VectorSpec, NearestRows]] = {}
    embedded_sources: list[str] = []
    source_vectors: dict[VectorSpec, Tensor] = {}
    num_sentences = sum(len(sources) + len(targets) for sources, targets in sets.values())
    with show_progress("retrieval", num_sentences, "sentences") as advance:
        for language, (sources, targets) in sets.items():
            if sources == embedded_sources:  # most test sets have the same pivot sentences in all languages
                advance(len(sources))
            else:
                source_vectors = encoder.embed(sources, specs, config.pivot, advance)
                embedded_sources = sources
            target_vectors = encoder.embed(targets, specs, language, advance)
            nearest[language] = find_nearest_by_spec(source_vectors, target_vectors, config.margin)
            logger.info("retrieved %d pairs of %s", len(sources), language)
    return nearest


def score_directions(hits: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the accuracy in each direction and the mean of both, given the mask of hits (N,) by direction."""
    scores = {direction: accuracy(hits[direction]) for direction in DIRECTIONS}
    scores[BOTH_DIRECTIONS] = fmean(scores.values())
    return scores


def average_by_layer(
    means: Mapping[VectorSpec, Mapping[str, float]], last_layer: int
) -> dict[str, dict[str, list[float]]]:
    """List the mean scores at each layer, by pooling and metric. Skip poolings not measured at every layer."""
    means_by_pooling: dict[str, dict[str, list[float]]] = {}
    for pooling in ALL_POOLINGS:
        specs = [VectorSpec(pooling, layer) for layer in range(last_layer + 1)]
        if all(spec in means for spec in specs):
            metrics = means[specs[0]]
            means_by_pooling[pooling] = {metric: [means[spec][metric] for spec in specs] for metric in metrics}
    return means_by_pooling


def write_misses(path: Path, sets: Mapping[str, AlignedSentences], nearest: Mapping[str, NearestRows]) -> None:
    """Write a row per sentence whose translation was not found."""
    misses: list[dict[str, Any]] = []
    for language, (sources, translations) in sets.items():
        misses += _list_misses(language, "to_pivot", translations, sources, nearest[language]["to_pivot"])
        misses += _list_misses(language, "from_pivot", sources, translations, nearest[language]["from_pivot"])
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(misses, MISSES_SCHEMA), path)


def _list_misses(
    language: str, direction: str, queries: Sequence[str], candidates: Sequence[str], nearest_rows: Tensor
) -> list[dict[str, Any]]:
    """List the queries whose nearest candidate is not their translation. Translations have the same row."""
    return [
        {
            "language": language,
            "direction": direction,
            "line": row,
            "sentence": queries[row],
            "right": candidates[row],
            "found": candidates[nearest_row],
        }
        for row, nearest_row in enumerate(nearest_rows.tolist())
        if nearest_row != row
    ]
