"""Measure the size, speed and accuracy of an exported encoder's formats."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from infoxlm_core.model.export import sentence_encoder
from infoxlm_core.model.export.sentence_encoder import SentenceEncoder, VectorFunction
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.tasks.embedding import load_embedder
from infoxlm_core.tasks.reference_vectors import Reference, compare_vectors
from infoxlm_core.tasks.retrieval.files import AlignedSentences
from infoxlm_core.tasks.retrieval.nearest import accuracy, find_nearest_in_both_directions

EmbedFunction = Callable[[Sequence[str]], Tensor]  # N texts -> vectors (N, d)

PASSES = 3  # number of timed passes over the texts; only the fastest is used
ORIGINAL = "original"


@dataclass(frozen=True)
class Format:
    """One format of an exported encoder."""

    name: str
    weights: Sequence[Path]  # weight files
    run: VectorFunction
    is_exact: bool  # whether the format computes in fp32 and must reproduce the original vectors


@dataclass(frozen=True)
class Measurement:
    """The cost of one format, and its loss of accuracy against the original model."""

    format: str
    megabytes: float
    sentences_per_second: float
    """Speed in batches of `sentence_encoder.BATCH` texts."""
    difference: float
    """Largest difference between a component of a normalised vector and its original."""
    cosine: float
    """Lowest cosine between a vector and its original."""
    retrieval: float | None
    """Mean retrieval accuracy over languages and both directions; None without aligned sentences."""


def measure(
    source: Path,
    encoder: SentenceEncoder,
    output: Path,
    formats: Sequence[Format],
    texts: Sequence[str],
    sets: Mapping[str, AlignedSentences],
) -> list[Measurement]:
    """Measure the original model and every format of its export, in this order.

    Args:
        source: directory of the original model.
        encoder: the exported encoder; its speed in PyTorch is reported as the original's speed.
        output: directory of the export, including its tokenizer.
        formats: the formats to measure.
        texts: sentences for comparing the vectors and the speed.
        sets: mapping from language to aligned sentences for retrieval; may be empty.

    Raises:
        DataCorrupt: a format in fp32 does not reproduce the original model's vectors.
    """
    settings = encoder.settings
    # Exported formats do not add the prefix, so the texts already contain it.
    embed_original = load_embedder(source, settings.layer, settings.pooling, prefix="")
    prefixed_texts = [settings.prefix + text for text in texts]
    original_vectors = F.normalize(embed_original(prefixed_texts), dim=1)  # (N, d)
    reference = Reference(settings.layer, settings.pooling, tuple(texts), original_vectors)
    tokenizer = sentence_encoder.load_tokenizer(output)
    vector_functions = [encoder.run, *(file_format.run for file_format in formats)]
    original_speed, *format_speeds = _measure_speeds(vector_functions, tokenizer, prefixed_texts)
    original = Measurement(
        format=ORIGINAL,
        megabytes=_measure_megabytes(pretrained.find_weight_files(source)),
        sentences_per_second=original_speed,
        difference=0.0,
        cosine=1.0,
        retrieval=_measure_retrieval(embed_original, sets, settings.prefix),
    )
    measurements = [original]
    for file_format, speed in zip(formats, format_speeds, strict=True):
        embed = partial(sentence_encoder.embed, file_format.run, tokenizer)
        vectors = F.normalize(embed(prefixed_texts), dim=1)
        if file_format.is_exact:
            compare_vectors(reference, vectors, f"the format {file_format.name}")
        measurement = Measurement(
            format=file_format.name,
            megabytes=_measure_megabytes(file_format.weights),
            sentences_per_second=speed,
            difference=(vectors - original_vectors).abs().max().item(),
            cosine=F.cosine_similarity(vectors, original_vectors).min().item(),
            retrieval=_measure_retrieval(embed, sets, settings.prefix),
        )
        measurements.append(measurement)
    return measurements


def _measure_megabytes(paths: Sequence[Path]) -> float:
    """Return the total size of the files in megabytes."""
    return sum(path.stat().st_size for path in paths) / 1e6


def _measure_speeds(functions: Sequence[VectorFunction], tokenizer: Tokenizer, texts: Sequence[str]) -> list[float]:
    """Measure each format's speed in sentences per second.

    The formats take turns, so that other work on the machine slows all formats alike. Only the fastest of `PASSES`
    passes over the texts is used, because it is the least disturbed.
    """
    fastest_seconds = [math.inf] * len(functions)
    for _ in range(PASSES):
        for index, compute_vectors in enumerate(functions):
            start = time.perf_counter()
            sentence_encoder.embed(compute_vectors, tokenizer, texts)
            seconds = time.perf_counter() - start
            fastest_seconds[index] = min(fastest_seconds[index], seconds)
    return [len(texts) / seconds for seconds in fastest_seconds]


def _measure_retrieval(embed: EmbedFunction, sets: Mapping[str, AlignedSentences], prefix: str) -> float | None:
    """Return the mean retrieval accuracy over languages and both directions, or None without aligned sentences."""
    accuracies = []
    for sources, translations in sets.values():
        source_vectors = embed([prefix + text for text in sources])
        translation_vectors = embed([prefix + text for text in translations])
        correct_rows = torch.arange(len(sources))
        for nearest_rows in find_nearest_in_both_directions(source_vectors, translation_vectors):
            accuracies.append(accuracy(nearest_rows == correct_rows))
    return fmean(accuracies) if accuracies else None
