"""Stage export: an encoder -> a directory for other libraries, with a model card that compares the formats.

Each format is loaded from its files, and its size, speed and accuracy are measured. Accuracy is the difference between
its vectors and those of the original model.
"""

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean

import torch

from infoxlm_core import manifests
from infoxlm_core.corpora import cleaning, lines
from infoxlm_core.errors import InputError
from infoxlm_core.languages import two_letters
from infoxlm_core.model.export import onnx, sentence_encoder, sentence_transformers, vocabulary
from infoxlm_core.model.export.sentence_encoder import SentenceEncoder, VectorFunction
from infoxlm_core.model.export.vocabulary import TrimmedTokenizer
from infoxlm_core.model.huggingface import any_encoder, origin, pretrained
from infoxlm_core.results import page
from infoxlm_core.tasks import export_measurements, reference_vectors
from infoxlm_core.tasks.export_measurements import Format, Measurement
from infoxlm_core.tasks.retrieval.files import AlignedSentences, read_aligned

SENTENCE_TRANSFORMERS, ONNX, INT8 = "sentence-transformers", "onnx", "onnx-int8"
FILES = {SENTENCE_TRANSFORMERS: pretrained.WEIGHTS, ONNX: "onnx/model.onnx", INT8: "onnx/model_qint8.onnx"}
"""Mapping from format name to weight file."""
MAX_TEXTS = 128
"""Maximum number of texts for comparing the formats in accuracy and speed."""


@dataclass(frozen=True)
class ExportSettings:
    """The formats to write, and the text for trimming and measuring."""

    formats: Sequence[str]
    """Keys of `FILES`."""
    languages: Sequence[str] = ()
    """Languages to measure. Without `texts`, pieces in other scripts are removed from the vocabulary."""
    texts: Sequence[Path] = ()
    """Text files with one sentence per line. Pieces that do not occur in the text are removed from the vocabulary."""
    data: Path | None = None
    """Directory of aligned sentences for measuring retrieval."""
    pivot: str = "en"
    """Language with which all other languages in `data` are aligned."""


def export(source: Path, name: str, settings: ExportSettings, output: Path) -> list[Measurement]:
    """Write an encoder in several formats, with a model card and reference vectors, and measure each format.

    Args:
        source: a Hugging Face directory.
        name: model name for the card.
        settings: formats, languages and text.
        output: directory to create; must be empty or missing.

    Returns:
        Measurements of the original model and of each format.

    Raises:
        InputError: a format is unknown, a required package is missing, or the model cannot be exported.
        DataCorrupt: the vectors of an fp32 format differ from those of the model.
    """
    check_settings(settings, output)
    output.parent.mkdir(parents=True, exist_ok=True)
    # Write beside `output` and rename at the end, so that an interrupted export leaves no incomplete directory.
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as directory:
        unfinished_output = Path(directory, output.name)
        measurements = _write_export(source, name, settings, unfinished_output)
        manifests.move_into_place(unfinished_output, output)
    return measurements


def _write_export(source: Path, name: str, settings: ExportSettings, output: Path) -> list[Measurement]:
    """Write an export's files and return the measurements. See `export`."""
    aligned_sentences = _read_aligned_sentences(settings)
    encoder = sentence_encoder.load(source)
    prefix = encoder.settings.prefix
    tokenizer_json = sentence_transformers.read_tokenizer(source)
    trimmed_tokenizer = _trim(encoder, tokenizer_json, settings)
    if trimmed_tokenizer:
        tokenizer_json = trimmed_tokenizer.content
    # Always write the files for SentenceTransformers, because the other formats need their tokenizer.
    sentence_transformers.write(encoder, source, output, tokenizer_json)
    texts = _choose_texts(settings, aligned_sentences, trimmed_tokenizer, prefix)
    formats = _write_formats(encoder, settings.formats, output)
    measurements = export_measurements.measure(source, encoder, output, formats, texts, aligned_sentences)
    reference_vectors.write_reference(output)
    if SENTENCE_TRANSFORMERS not in settings.formats:
        (output / FILES[SENTENCE_TRANSFORMERS]).unlink()  # was needed only for the reference vectors
    card = page.render(
        "export_card.md",
        name=name,
        settings=settings,
        vector=encoder.settings,
        config=encoder.encoder.config,
        max_tokens=any_encoder.read_max_seq_length(output),
        unchanged_share=_compute_unchanged_share(trimmed_tokenizer, aligned_sentences, prefix),
        measurements=measurements,
        files=FILES,
        text_count=len(texts),
        threads=torch.get_num_threads(),
        pair_count=sum(len(sources) for sources, _ in aligned_sentences.values()),
        languages=sorted(aligned_sentences),
        padding=sentence_encoder.load_tokenizer(output).padding,
        origin=origin.read(source),
    )
    page.write_files(output, {"README.md": card})
    manifests.write(output, "export", inputs={"encoder": pretrained.digest_weights(source)})
    return measurements


def _read_aligned_sentences(settings: ExportSettings) -> dict[str, AlignedSentences]:
    """Read the aligned sentences for `languages`, by default for all languages. Without `data`, return none."""
    if settings.data is None:
        return {}
    other_languages = [code for code in settings.languages if two_letters(code) != two_letters(settings.pivot)]
    return read_aligned(settings.data, settings.pivot, other_languages or "all")


def check_settings(settings: ExportSettings, output: Path) -> None:
    """Raise InputError if a format is missing, unknown or cannot be written, or if the output directory is not empty.

    Commands that download or train a model before they export it call this function first.
    """
    if not settings.formats:
        raise InputError(f"no format to export: give some of {', '.join(FILES)}")
    for format_name in settings.formats:
        if format_name not in FILES:
            raise InputError(f"{format_name!r:.100} is not a format: give some of {', '.join(FILES)}")
    if {ONNX, INT8} & set(settings.formats):
        onnx.check_installed()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output} exists: give a new directory")


def _trim(encoder: SentenceEncoder, tokenizer_json: str, settings: ExportSettings) -> TrimmedTokenizer | None:
    """Reduce the tokenizer and the embeddings to the tokens that the text or languages need.

    Args:
        encoder: the model; its embeddings are changed in place.
        tokenizer_json: content of the model's tokenizer.json.
        settings: export settings.

    Returns:
        The trimmed tokenizer, or None if the settings name neither text nor languages.
    """
    if settings.texts:
        prefixed_lines = (encoder.settings.prefix + line for line in _read_lines(settings.texts))
        needed_ids = vocabulary.find_pieces_in_text(tokenizer_json, prefixed_lines)
    elif settings.languages:
        scripts: set[str] = set()
        for code in settings.languages:
            scripts.update(cleaning.find_scripts(code))
        needed_ids = vocabulary.find_pieces_in_scripts(tokenizer_json, sorted(scripts))
    else:
        return None
    # Keep the pieces of prompts, because a prompt's script may differ from that of the text ("query: " and Russian).
    needed_ids |= vocabulary.find_pieces_in_text(tokenizer_json, encoder.settings.prompts.text_by_name.values())
    pad_id = encoder.encoder.config.pad_token_id or 0  # without a padding token, keep only id 0 in place
    trimmed_tokenizer = TrimmedTokenizer(tokenizer_json, needed_ids, pad_id)
    vocabulary.trim_embeddings(encoder, trimmed_tokenizer)
    return trimmed_tokenizer


def _read_lines(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the lines of text files. Raise InputError for a line that is not UTF-8."""
    for path in paths:
        for number, text, problem in lines.read_lines(path):
            if problem:
                raise InputError(f"{path}:{number}: {problem}: give UTF-8 text with one sentence a line")
            yield text


def _choose_texts(
    settings: ExportSettings,
    aligned_sentences: Mapping[str, AlignedSentences],
    trimmed_tokenizer: TrimmedTokenizer | None,
    prefix: str,
) -> list[str]:
    """Choose up to `MAX_TEXTS` texts for comparing the formats in accuracy and speed.

    The sources, in order of preference, are the aligned sentences, the first lines of the text files and the reference
    sentences.

    Raises:
        InputError: the trimmed tokenizer splits all these texts differently from the original tokenizer.
    """
    texts: list[str] = []
    if aligned_sentences:
        texts_per_side = math.ceil(MAX_TEXTS / (2 * len(aligned_sentences)))
        for sources, targets in aligned_sentences.values():
            texts += [*sources[:texts_per_side], *targets[:texts_per_side]]
    elif settings.texts:
        texts = list(islice(_read_lines(settings.texts), MAX_TEXTS))
    else:
        texts = list(reference_vectors.SENTENCES)
    if trimmed_tokenizer:  # the vectors of texts that are split differently cannot be compared
        texts = [text for text in texts if trimmed_tokenizer.splits_as_before(prefix + text)]
    if not texts:
        raise InputError("no text to measure the export on: give text, or aligned sentences in the export's languages")
    return texts[:MAX_TEXTS]


def _compute_unchanged_share(
    trimmed_tokenizer: TrimmedTokenizer | None, aligned_sentences: Mapping[str, AlignedSentences], prefix: str
) -> float | None:
    """Return the share of aligned sentences that the trimmed and the original tokenizer split in the same way.

    Return None without a trimmed tokenizer or without sentences.
    """
    sentences = [text for sides in aligned_sentences.values() for side in sides for text in side]
    if trimmed_tokenizer is None or not sentences:
        return None
    return fmean(trimmed_tokenizer.splits_as_before(prefix + sentence) for sentence in sentences)


def _write_formats(encoder: SentenceEncoder, format_names: Sequence[str], output: Path) -> list[Format]:
    """Write the ONNX files, and load each format from its files."""
    _write_onnx_files(encoder, format_names, output)
    formats = []
    for format_name in format_names:
        path = output / FILES[format_name]
        if format_name == SENTENCE_TRANSFORMERS:
            model, _ = any_encoder.load_encoder(output, "cpu")
            compute_vectors: VectorFunction = SentenceEncoder(model.base_model, encoder.settings).run
        else:
            compute_vectors = onnx.OnnxEncoder(path)
        weight_files = sorted(path.parent.glob(f"{path.name}*"))  # large ONNX models have an external weight file
        formats.append(Format(format_name, weight_files, compute_vectors, is_exact=format_name != INT8))
    return formats


def _write_onnx_files(encoder: SentenceEncoder, format_names: Sequence[str], output: Path) -> None:
    """Write the requested ONNX files: fp32, int8 or both."""
    if ONNX not in format_names and INT8 not in format_names:
        return
    onnx_path = output / FILES[ONNX]
    onnx.write(encoder, onnx_path)
    if INT8 in format_names:
        onnx.quantise(onnx_path, output / FILES[INT8])
    if ONNX not in format_names:  # the fp32 model was needed only for quantisation
        # The name with an asterisk also matches the external weight file of a large model.
        for path in onnx_path.parent.glob(f"{onnx_path.name}*"):
            path.unlink()
