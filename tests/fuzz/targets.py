"""Fuzz targets: every reader of files that users supply, as a function of the bytes of one file.

A target writes valid files into a folder and returns the contents of one of them (`examples`). `read` replaces that
file and reads the folder as the product does. Files that the project writes itself are protected by the digests of
their manifests and are not fuzzed.
"""

import bz2
import gzip
import io
import json
import lzma
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import polib
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import zstandard
from safetensors.torch import save_file

from components.settings.cluster import ClusterFile
from infoxlm_core import errors, run_file
from infoxlm_core.config import CorpusSource, TokenizationConfig
from infoxlm_core.corpora import evaluation_sets, formats
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.model.huggingface import any_encoder, directories, fairseq, pretrained, tokenizers
from infoxlm_core.results import trials
from infoxlm_core.results.suite_config import SuiteConfig
from infoxlm_core.stages import tokenization
from infoxlm_core.tasks.classification.table import read_labelled
from infoxlm_core.tasks.classification.task import ClassificationConfig
from infoxlm_core.tasks.named_entities.files import read_tagged
from infoxlm_core.tasks.named_entities.task import NamedEntitiesConfig
from infoxlm_core.tasks.question_answering.files import read_squad, read_training
from infoxlm_core.tasks.retrieval.files import read_aligned
from pipelines import trials as variants
from tests.toys.corpus import write_corpus
from tests.toys.fairseq import infoxlm_checkpoint, model_tensors
from tests.toys.models import save_model
from tests.toys.questions import riddles, write_squad
from tests.toys.run import write_config
from tests.toys.text import messages

ROOT = Path(__file__).parents[2]


class Target(NamedTuple):
    """A reader of user files."""

    examples: Callable[[Path], list[bytes]]
    """Writes the other files that the reader needs to a folder. Returns valid contents of the file to damage."""

    read: Callable[[Path, bytes], Any]
    """Reads the folder with this content of the file."""

    slow: bool = False
    """Whether a call takes tens of milliseconds."""


TARGETS: dict[str, Target] = {}


def file_target(name: str, examples: list[bytes], read: Callable[[Path], Any]) -> Target:
    """Return a target for a file that needs no other files."""

    def attack(folder: Path, content: bytes) -> Any:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        return read(folder / name)

    return Target(lambda _: examples, attack)


def folder_target(write_folder: Callable[[Path], Any], name: str, read: Callable[[Path], Any]) -> Target:
    """Return a target for one file of the folder that `write_folder` writes."""

    def examples(folder: Path) -> list[bytes]:
        write_folder(folder)
        return [(folder / name).read_bytes()]

    def attack(folder: Path, content: bytes) -> Any:
        (folder / name).write_bytes(content)
        return read(folder)

    return Target(examples, attack)


# ---------------------------------------------------------------- corpora

_PAIRS = messages(0)[:40]
_LINES = "".join(f"{german}\n" for _, german in _PAIRS).encode()
_TSV = "".join(f"{english}\t{german}\n" for english, german in _PAIRS).encode()
_TMX = (
    '<?xml version="1.0" encoding="UTF-8"?><tmx version="1.4"><body>'
    + "".join(
        f'<tu><tuv xml:lang="en-US"><seg>{a} <ph>1</ph></seg></tuv>'
        f'<tuv xml:lang="de"><seg><hi>{b}</hi></seg></tuv></tu>'
        for a, b in _PAIRS
    )
    + "</body></tmx>"
).encode()
_XLIFF = (
    '<xliff version="1.2"><file source-language="en-US" target-language="de"><body>'
    + "".join(
        f'<trans-unit id="1"><source>{a} <x id="1"/></source>'
        f'<target state="final"><g id="2">{b}</g></target></trans-unit>'
        for a, b in _PAIRS
    )
    + "</body></file></xliff>"
).encode()
_XLIFF_2 = (
    '<xliff version="2.0" srcLang="en" trgLang="de" xmlns="urn:oasis:names:tc:xliff:document:2.0"><file id="f">'
    + "".join(
        f'<unit id="1"><segment state="final"><source>{a}</source><target><pc id="2">{b}</pc></target></segment></unit>'
        for a, b in _PAIRS
    )
    + "</file></xliff>"
).encode()
_JSONL = "".join(f"{json.dumps({'en': a, 'de': b})}\n" for a, b in _PAIRS).encode()
_OPUS = "".join(f"{json.dumps({'translation': {'en': a, 'de': b}})}\n" for a, b in _PAIRS).encode()


def _catalog(binary: bool) -> bytes:
    catalog = polib.POFile()
    catalog.metadata = {"Content-Type": "text/plain; charset=utf-8", "Plural-Forms": "nplurals=2; plural=(n != 1);"}
    for english, german in _PAIRS[:12]:
        catalog.append(polib.POEntry(msgid=english, msgstr=german, msgctxt="x", comment='Default: "a"'))
    catalog.append(polib.POEntry(msgid="%d file", msgid_plural="%d files", msgstr_plural={0: "Datei", 1: "Dateien"}))
    return catalog.to_binary() if binary else str(catalog).encode()


def _wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("p/de/LC_MESSAGES/x.po", _catalog(False))
        archive.writestr("p/de/LC_MESSAGES/x.mo", _catalog(True))
        archive.writestr("p/__init__.py", "")
    return buffer.getvalue()


def _parquet(table: dict[str, Any], compression: str = "zstd") -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(table), buffer, compression=compression)
    return buffer.getvalue()


def corpus(kind: str, name: str, *examples: bytes) -> Target:
    """Return a target for a corpus of English and German in one file."""
    is_parallel = kind in ("tsv", "moses")
    languages = {"text": ["de"], "tsv": ["en", "de"], "moses": ["en", "de"]}.get(kind, [])
    path = ["x", "y"] if kind == "moses" else "x"
    source = CorpusSource.parse({"name": "x", "format": kind, "path": path, "languages": languages})

    def read(path: Path) -> Any:
        paths = [path]
        if kind == "moses":
            (path.parent / "x.en").write_bytes(_TSV)
            paths = [path.parent / "x.en", path]
        elif not is_parallel and kind == "gettext" and path.suffix != ".whl":
            paths = [path.parents[2]]  # the folder of the catalogs
        return [row for row in formats.read_rows(source, ["en", "de"], "en", paths) if row.dropped]

    return file_target(name, list(examples), read)


_SIDES = {"en": [english for english, _ in _PAIRS], "de": [german for _, german in _PAIRS]}
TARGETS |= {
    "text": corpus("text", "x.txt", _LINES, b"\xef\xbb\xbfa\r\nb"),
    "gz": corpus("text", "x.txt.gz", gzip.compress(_LINES, mtime=0)),
    "xz": corpus("text", "x.txt.xz", lzma.compress(_LINES)),
    "zst": corpus("text", "x.txt.zst", zstandard.compress(_LINES)),
    "bz2": corpus("text", "x.txt.bz2", bz2.compress(_LINES)),
    "lz4": corpus("text", "x.txt.lz4", pa.compress(_LINES, "lz4", asbytes=True)),
    "tsv": corpus("tsv", "x.tsv", _TSV),
    "moses": corpus("moses", "x.de", _LINES),
    "tmx": corpus("tmx", "x.tmx", _TMX),
    "xliff": corpus("xliff", "x.xlf", _XLIFF, _XLIFF_2),
    "jsonl": corpus("jsonl", "x.jsonl", _JSONL, _OPUS),
    "parquet": corpus(
        "parquet", "x.parquet", _parquet(_SIDES), _parquet(_SIDES, "none"),
        _parquet({"en": pa.array(_SIDES["en"]).dictionary_encode(), "de": pa.array(_SIDES["de"], pa.large_string())}),
    ),
    "po": corpus("gettext", "c/de/LC_MESSAGES/x.po", _catalog(False)),
    "mo": corpus("gettext", "c/de/LC_MESSAGES/x.mo", _catalog(True)),
    "wheel": corpus("gettext", "x.whl", _wheel()),
}  # fmt: skip

# ---------------------------------------------------------------- data of tasks

_ROWS = pd.DataFrame(
    [
        {"text": text, "label": english.split()[0], "language": language, "split": "test" if number % 4 else "train"}
        for number, (english, german) in enumerate(_PAIRS[:16])
        for language, text in (("en", english), ("de", german))
    ]
)


def _read_table(path: Path) -> Any:
    return read_labelled(ClassificationConfig(data=str(path)), None)


def _read_questions(path: Path) -> Any:
    return read_squad(path), read_training([str(path)])


def _read_reserved(path: Path) -> int:
    return sum(len(text) for text in evaluation_sets.read_texts(path))


_IOB = "".join(f"{word}\t{'B-PER' if word.istitle() else 'O'}\n" for word in _LINES.decode().split()[:60]) + "\n"


def _write_questions(folder: Path) -> None:
    write_squad(folder / "x.en.json", riddles(6, 1))


TARGETS |= {
    "labelled-csv": file_target("train.csv", [_ROWS.to_csv(index=False).encode()], _read_table),
    "labelled-tsv": file_target("x-en.tsv", [_ROWS.to_csv(index=False, sep="\t").encode()], _read_table),
    "labelled-parquet": file_target("x.parquet", [_parquet(_ROWS.to_dict("list"))], _read_table),
    "squad": folder_target(_write_questions, "x.en.json", lambda folder: _read_questions(folder / "x.en.json")),
    "aligned": file_target("a/en-de.tsv", [_TSV], lambda path: read_aligned(path.parent, "en")),
    "aligned-lines": file_target("a/t.de-en.de", [_LINES], lambda path: _read_both_sides(path)),
    "held-out": file_target(
        "c/held_out/en-de/x.parquet",
        [_parquet({"source": _SIDES["en"], "target": _SIDES["de"]})],
        lambda path: read_aligned(path.parents[2], "en"),
    ),
    "entities": file_target(
        "train-en.tsv", [_IOB.encode()], lambda path: read_tagged(NamedEntitiesConfig(data=str(path)))
    ),
    "reserved-json": file_target(
        "x.json", [json.dumps({"data": [{"context": _SIDES["de"]}]}).encode()], _read_reserved
    ),
    "reserved-jsonl": file_target(
        "x.jsonl", ["".join(json.dumps([x]) + "\n" for x in _SIDES["de"]).encode()], _read_reserved
    ),
    "reserved-csv": file_target("x.csv", [_ROWS.to_csv(index=False).encode()], _read_reserved),
    "reserved-lines": file_target("x.tsv", [_TSV, _IOB.encode()], _read_reserved),
    "reserved-parquet": file_target(
        "x.parquet",
        [_parquet(_SIDES), _parquet({"text": [{"en": a, "de": [b]} for a, b in _PAIRS]})],
        _read_reserved,
    ),
}


def _read_both_sides(path: Path) -> Any:
    path.with_name("t.de-en.en").write_text("".join(f"{english}\n" for english, _ in _PAIRS))
    return read_aligned(path.parent, "en")


# ---------------------------------------------------------------- configs


def _config(name: str) -> bytes:
    return (ROOT / "configs" / name).read_bytes()


def _plan_suite(path: Path) -> Any:
    return trials.plan(run_file.load_config(SuiteConfig, path))


def _read_cluster(path: Path) -> Any:
    cluster = run_file.load_config(ClusterFile, path)
    has_placeholder = "0" * 64 in cluster.image
    return cluster if has_placeholder else cluster.make_parameters()


def _plan_variants(path: Path) -> Any:
    return variants.plan_trials(run_file.load(ROOT / "configs/base.yaml"), path, [], [1, 2])


def _read_override(path: Path) -> Any:
    return run_file.load(ROOT / "configs/demo.yaml", [path.read_bytes().decode(errors="replace")])


def _write_config_as_json(folder: Path) -> None:
    """Write a config as JSON, which is valid YAML, so that a mutation can change single values."""
    path = write_config(folder)
    values = run_file.load(path).model_dump(mode="json", exclude_none=True)
    path.write_text(json.dumps(values))


TARGETS |= {
    "run-config": file_target("x.yaml", [_config("demo.yaml"), _config("base.yaml")], run_file.load),
    "run-values": folder_target(
        _write_config_as_json, "toy.yaml", lambda folder: run_file.load(folder / "toy.yaml")
    ),
    "suite-config": file_target("x.yaml", [_config("suite.yaml")], _plan_suite),
    "cluster-config": file_target("x.yaml", [_config("cluster.yaml")], _read_cluster),
    "variants": file_target("x.yaml", [_config("ablations.yaml")], _plan_variants),
    "override": file_target(
        "x", [b"pretraining.optimization.steps=100", b"preparation.languages=[en, de]"], _read_override
    ),
}  # fmt: skip


# ---------------------------------------------------------------- models and tokenizers

_MODEL_WORDS = sorted({word for pair in _PAIRS for word in " ".join(pair).split()})


def _write_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    save_model(folder, words=_MODEL_WORDS, hidden_size=16, intermediate_size=32)
    save_file({"projection": torch.eye(16)}, folder / pretrained.PROJECTION)


def _embed(folder: Path) -> Any:
    """Compute vectors as `infoxlm embed` does."""
    directories.check_model(folder)
    model, tokenizer = any_encoder.load_encoder(folder, "cpu")
    space = any_encoder.read_contrast_settings(model.config)
    any_encoder.describe(model)
    if space:
        projection = any_encoder.load_projection(folder, model)
    inputs = tokenizer(["Open the new page", "x"], padding=True, truncation=True, max_length=16, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**{name: inputs[name] for name in ("input_ids", "attention_mask")}, output_hidden_states=True)
    return hidden.hidden_states[-1] @ projection if space else hidden


def _start_training(folder: Path) -> Any:
    """Load a model as a training does that starts from it."""
    directories.check_model(folder)
    size = pretrained.read_encoder_size(folder)
    return pretrained.load_weights(InfoXLM(size, 1, "mean", True), folder)


def model(name: str, read: Callable[[Path], Any]) -> Target:
    """Return a target for one file of a model."""

    def examples(folder: Path) -> list[bytes]:
        _write_model(folder / "model")
        return [(folder / "model" / name).read_bytes()]

    def attack(folder: Path, content: bytes) -> Any:
        (folder / "model" / name).write_bytes(content)
        return read(folder / "model")

    return Target(examples, attack, slow=True)


def _write_corpus(folder: Path) -> None:
    write_corpus(folder, {"de": _SIDES["de"], "en": _SIDES["en"]}, {"en-de": _PAIRS})


def _train_tokenizer(folder: Path) -> list[bytes]:
    corpus_folder = folder / "corpus"
    _write_corpus(corpus_folder)
    return [tokenization._train_model(TokenizationConfig(vocabulary_size=60, processes=1), corpus_folder)]


def _import_tokenizer(folder: Path, content: bytes) -> Any:
    (folder / "x.model").write_bytes(content)
    model_content = tokenization._read_model(folder / "x.model")
    directory = folder / "tokenizer"
    directory.mkdir(exist_ok=True)
    tokenizers.write_fast(model_content, directory)
    with tokenizers.reading("x"):
        return tokenizers.load_fast(directory)("Öffne die neue Seite")


def _write_checkpoint(folder: Path) -> list[bytes]:
    torch.manual_seed(0)
    infoxlm_checkpoint(folder / "model.pt", model_tensors())
    return [(folder / "model.pt").read_bytes()]


def _import_checkpoint(folder: Path, content: bytes) -> Any:
    (folder / "model.pt").write_bytes(content)
    shutil.rmtree(folder / "imported", ignore_errors=True)
    return fairseq.convert(folder / "model.pt", folder / "imported")


TARGETS |= {
    "model-config": model("config.json", _embed),
    "model-start": model("config.json", _start_training),
    "model-weights": model("model.safetensors", _embed),
    "start-weights": model("model.safetensors", _start_training),
    "projection": model(pretrained.PROJECTION, _embed),
    "start-projection": model(pretrained.PROJECTION, _start_training),
    "tokenizer": model("tokenizer.json", _embed),
    "tokenizer-config": model("tokenizer_config.json", _embed),
    "sentencepiece": Target(_train_tokenizer, _import_tokenizer, slow=True),
    "fairseq": Target(_write_checkpoint, _import_checkpoint, slow=True),
}


def attack(name: str, folder: Path, content: bytes) -> errors.InfoXLMError | None:
    """Read a file with this content; return the `InfoXLMError` that the reader raises, or None.

    Raises:
        AssertionError: the error is an `InfoXLMError` without a subclass, or its message has several lines.
        Exception: any other error of the reader.
    """
    try:
        TARGETS[name].read(folder, content)
    except errors.InfoXLMError as error:
        assert type(error) is not errors.InfoXLMError, f"the error has no class of its own: {error}"
        assert "\n" not in str(error), f"the message has several lines: {str(error)!r:.300}"
        return error
    return None
