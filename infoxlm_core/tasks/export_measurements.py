"""Measure the formats of an exported encoder: size, speed, and how far their vectors are from the original ones."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

from infoxlm_core.model.export import sentence_encoder
from infoxlm_core.model.export.sentence_encoder import Run, SentenceEncoder
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.tasks.embedding import load_embedder
from infoxlm_core.tasks.reference_vectors import Reference, compare
from infoxlm_core.tasks.retrieval.files import AlignedSentences
from infoxlm_core.tasks.retrieval.nearest import accuracy, find_nearest_in_both_directions

Embed = Callable[[Sequence[str]], Tensor]  # from N texts to their vectors, (N, d)

PASSES = 3  # over all texts; the fastest one gives the speed
ORIGINAL = "original"


@dataclass(frozen=True)
class Format:
    """A format of an exported encoder."""

    name: str
    weights: Sequence[Path]  # files that hold the weights
    run: Run
    is_exact: bool  # whether it computes in fp32 and must give the original vectors


@dataclass(frozen=True)
class Measurement:
    """What one format costs and loses, compared with the model that it was made from."""

    format: str
    megabytes: float
    sentences_per_second: float
    """On the texts that are compared, in batches of `sentence_encoder.BATCH`."""
    difference: float
    """Largest difference of two numbers in vectors of length 1."""
    cosine: float
    """Lowest cosine of a vector and the original vector of the same text."""
    retrieval: float | None
    """Share of translations that are retrieved, mean over directions and languages; None without aligned sentences."""


def measure(
    source: Path,
    encoder: SentenceEncoder,
    output: Path,
    formats: Sequence[Format],
    texts: Sequence[str],
    sets: Mapping[str, AlignedSentences],
) -> list[Measurement]:
    """Compare every format with the model that it was made from, which comes first in the result.

    Args:
        source: directory of the original model.
        encoder: what the formats were written from; its speed in PyTorch is reported as that of the original.
        output: directory of the export, with its tokenizer.
        formats: the formats.
        texts: sentences on which vectors and speed are compared.
        sets: aligned sentences by language, to measure retrieval on; may be empty.

    Raises:
        DataCorrupt: a format in fp32 gives other vectors than the original model.
    """
    settings = encoder.settings
    # The prefix is added here, because the functions of exported formats do not add it.
    embed_original = load_embedder(source, settings.layer, settings.pooling, prefix="")
    prefixed_texts = [settings.prefix + text for text in texts]
    original_vectors = F.normalize(embed_original(prefixed_texts), dim=1)  # (N, d)
    expected = Reference(settings.layer, settings.pooling, tuple(texts), original_vectors)
    tokenizer = sentence_encoder.load_tokenizer(output)
    embed_functions = [partial(sentence_encoder.embed, encoder.run, tokenizer)]
    embed_functions += [partial(sentence_encoder.embed, file_format.run, tokenizer) for file_format in formats]
    original_speed, *speeds = _measure_speeds(embed_functions, prefixed_texts)
    original = Measurement(
        format=ORIGINAL,
        megabytes=_measure_megabytes(pretrained.find_weight_files(source)),
        sentences_per_second=original_speed,
        difference=0.0,
        cosine=1.0,
        retrieval=_measure_retrieval(embed_original, sets, settings.prefix),
    )
    measurements = [original]
    for file_format, embed, speed in zip(formats, embed_functions[1:], speeds, strict=True):
        vectors = F.normalize(embed(prefixed_texts), dim=1)
        if file_format.is_exact:
            compare(expected, vectors, f"the format {file_format.name}")
        measurement = Measurement(
            format=file_format.name,
            megabytes=_measure_megabytes(file_format.weights),
            sentences_per_second=speed,
            difference=(vectors - expected.vectors).abs().max().item(),
            cosine=F.cosine_similarity(vectors, expected.vectors).min().item(),
            retrieval=_measure_retrieval(embed, sets, settings.prefix),
        )
        measurements.append(measurement)
    return measurements


def _measure_megabytes(paths: Sequence[Path]) -> float:
    return sum(path.stat().st_size for path in paths) / 1e6


def _measure_speeds(embed_functions: Sequence[Embed], texts: Sequence[str]) -> list[float]:
    """Return the sentences per second of each function in its fastest pass.

    The passes of the functions alternate, so that other work on the machine slows all of them.
    """
    fastest_seconds = [math.inf] * len(embed_functions)
    for _ in range(PASSES):
        for number, embed in enumerate(embed_functions):
            start = time.perf_counter()
            embed(texts)
            fastest_seconds[number] = min(fastest_seconds[number], time.perf_counter() - start)
    return [len(texts) / seconds for seconds in fastest_seconds]


def _measure_retrieval(embed: Embed, sets: Mapping[str, AlignedSentences], prefix: str) -> float | None:
    """Return the retrieval accuracy, mean over directions and languages, or None without sets."""
    shares = []
    for sources, translations in sets.values():
        source_vectors = embed([prefix + text for text in sources])
        translation_vectors = embed([prefix + text for text in translations])
        rows = torch.arange(len(sources))
        for nearest in find_nearest_in_both_directions(source_vectors, translation_vectors):
            shares.append(accuracy(nearest == rows))
    return fmean(shares) if shares else None
