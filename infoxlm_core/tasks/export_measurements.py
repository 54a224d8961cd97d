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
from tokenizers import Tokenizer
from torch import Tensor

from infoxlm_core.model.export import sentence_encoder
from infoxlm_core.model.export.sentence_encoder import SentenceEncoder, VectorFunction
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.tasks.embedding import load_embedder
from infoxlm_core.tasks.reference_vectors import Reference, compare_vectors
from infoxlm_core.tasks.retrieval.files import AlignedSentences
from infoxlm_core.tasks.retrieval.nearest import accuracy, find_nearest_in_both_directions

EmbedFunction = Callable[[Sequence[str]], Tensor]  # from N texts to their vectors, (N, d)

PASSES = 3  # over all texts; the fastest one gives the speed
ORIGINAL = "original"


@dataclass(frozen=True)
class Format:
    """A format of an exported encoder."""

    name: str
    weights: Sequence[Path]  # files that hold the weights
    run: VectorFunction
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
    """Measure the original model and every format of its export, in this order.

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
    # The prefix is added here, because exported formats do not add it.
    embed_original = load_embedder(source, settings.layer, settings.pooling, prefix="")
    prefixed_texts = [settings.prefix + text for text in texts]
    original_vectors = F.normalize(embed_original(prefixed_texts), dim=1)  # (N, d)
    reference = Reference(settings.layer, settings.pooling, tuple(texts), original_vectors)
    tokenizer = sentence_encoder.load_tokenizer(output)
    runs = [encoder.run, *(file_format.run for file_format in formats)]
    speeds = _measure_speeds(runs, tokenizer, prefixed_texts)
    original = Measurement(
        format=ORIGINAL,
        megabytes=_measure_megabytes(pretrained.find_weight_files(source)),
        sentences_per_second=speeds[0],
        difference=0.0,
        cosine=1.0,
        retrieval=_measure_retrieval(embed_original, sets, settings.prefix),
    )
    measurements = [original]
    for file_format, speed in zip(formats, speeds[1:], strict=True):
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
    """Return the size of files in megabytes."""
    return sum(path.stat().st_size for path in paths) / 1e6


def _measure_speeds(runs: Sequence[VectorFunction], tokenizer: Tokenizer, texts: Sequence[str]) -> list[float]:
    """Return how many sentences each format embeds per second, in the fastest of several passes over the texts.

    The formats take turns, so that other work on the machine slows all of them.
    """
    fastest_seconds = [math.inf] * len(runs)
    for _ in range(PASSES):
        for index, run in enumerate(runs):
            start = time.perf_counter()
            sentence_encoder.embed(run, tokenizer, texts)
            seconds = time.perf_counter() - start
            fastest_seconds[index] = min(fastest_seconds[index], seconds)
    return [len(texts) / seconds for seconds in fastest_seconds]


def _measure_retrieval(embed: EmbedFunction, sets: Mapping[str, AlignedSentences], prefix: str) -> float | None:
    """Return the mean accuracy of retrieval over both directions of all languages, or None without aligned sentences.

    Args:
        embed: returns the vectors of sentences that already have their prefix.
        sets: sentences of the pivot and their translations by language.
        prefix: text before every sentence.
    """
    accuracies = []
    for sources, translations in sets.values():
        source_vectors = embed([prefix + text for text in sources])
        translation_vectors = embed([prefix + text for text in translations])
        correct_rows = torch.arange(len(sources))
        for nearest_rows in find_nearest_in_both_directions(source_vectors, translation_vectors):
            accuracies.append(accuracy(nearest_rows == correct_rows))
    return fmean(accuracies) if accuracies else None
