"""What is fuzzed: each reader of what comes from outside, as a function of the bytes of one file.

A target writes valid files into a folder and gives the content of one of them (`examples`); `read` puts other content
in its place and reads all as the product does. Where a manifest would tell of the damage first, it is made to fit
(`fitting`): what is left then is what somebody may forge who can write the store.
"""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pandas as pd
import polib
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import zstandard
from safetensors.torch import save_file
from transformers import XLMRobertaConfig, XLMRobertaForSequenceClassification

from components.adapters import lease
from components.adapters.mlflow import promotion
from components.platform import artifacts, costs, job, runtime, training_runs
from components.platform.training_runs import RemoteRun
from components.settings.cluster import ClusterFile
from infoxlm_core import errors, manifests, outside, run_file
from infoxlm_core.config import CorpusSource, SelectionConfig, TokenizationConfig
from infoxlm_core.corpora import evaluation_sets, formats
from infoxlm_core.data import masking, shards
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.model.huggingface import any_encoder, directories, fairseq, pretrained, tokenizers
from infoxlm_core.results import evidence, trials
from infoxlm_core.results.suite_config import SuiteConfig
from infoxlm_core.stages import tokenization
from infoxlm_core.tasks import reference_vectors
from infoxlm_core.tasks.classification.held_out import read_test_set
from infoxlm_core.tasks.classification.settings import ClassificationConfig
from infoxlm_core.tasks.classification.table import read_labelled
from infoxlm_core.tasks.named_entities.files import read_tagged
from infoxlm_core.tasks.named_entities.settings import NamedEntitiesConfig
from infoxlm_core.tasks.question_answering.files import read_squad, read_training
from infoxlm_core.tasks.retrieval.files import read_aligned
from infoxlm_core.training import state, tracker
from infoxlm_core.training.checkpoints import Checkpoint, Checkpoints
from infoxlm_core.training.finetuning import selection
from infoxlm_core.training.finetuning.best_checkpoints import BestCheckpoints
from infoxlm_core.training.fingerprint import Fingerprint
from pipelines import local
from pipelines import trials as variants
from tests.toys.corpus import write_corpus
from tests.toys.fairseq import infoxlm_checkpoint, model_tensors
from tests.toys.models import save_model
from tests.toys.pretraining import write_shards
from tests.toys.questions import riddles, write_squad
from tests.toys.run import write_config
from tests.toys.text import messages

ROOT = Path(__file__).parents[2]


class Target(NamedTuple):
    """One reader."""

    examples: Callable[[Path], list[bytes]]
    """Writes what else it needs into a folder; valid contents of the file that is damaged."""

    read: Callable[[Path, bytes], Any]
    """Reads the folder with this content in the place of that file."""

    slow: bool = False
    """Takes tens of milliseconds a time."""


TARGETS: dict[str, Target] = {}


def a_file(name: str, examples: list[bytes], read: Callable[[Path], Any]) -> Target:
    """A file that is read alone."""

    def attack(folder: Path, content: bytes) -> Any:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        return read(folder / name)

    return Target(lambda _: examples, attack)


def one_of(
    make: Callable[[Path], Any], name: str, read: Callable[[Path], Any], fitting: str = "", slow: bool = False
) -> Target:
    """One file of a directory; `fitting` is the kind of the manifest that is written anew."""

    def examples(folder: Path) -> list[bytes]:
        make(folder)
        return [(folder / name).read_bytes()]

    def attack(folder: Path, content: bytes) -> Any:
        (folder / name).write_bytes(content)
        if fitting:
            facts = json.loads((folder / manifests.NAME).read_text())["facts"]
            manifests.write(folder, fitting, facts)
        return read(folder)

    return Target(examples, attack, slow)


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


def _catalog(binary: bool) -> bytes:
    catalog = polib.POFile()
    catalog.metadata = {"Content-Type": "text/plain; charset=utf-8", "Plural-Forms": "nplurals=2; plural=(n != 1);"}
    for english, german in _PAIRS[:12]:
        catalog.append(polib.POEntry(msgid=english, msgstr=german, msgctxt="x", comment='Default: "a"'))
    catalog.append(polib.POEntry(msgid="%d file", msgid_plural="%d files", msgstr_plural={0: "Datei", 1: "Dateien"}))
    return catalog.to_binary() if binary else str(catalog).encode()


def _wheel() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("p/de/LC_MESSAGES/x.po", _catalog(False))
        archive.writestr("p/de/LC_MESSAGES/x.mo", _catalog(True))
        archive.writestr("p/__init__.py", "")
    return packed.getvalue()


def _parquet(table: dict[str, Any], compression: str = "zstd") -> bytes:
    packed = io.BytesIO()
    pq.write_table(pa.table(table), packed, compression=compression)
    return packed.getvalue()


def corpus(kind: str, name: str, *examples: bytes) -> Target:
    """A corpus of English and German in one file."""
    pair = kind in ("tsv", "moses")
    said = {"text": ["de"], "tsv": ["en", "de"], "moses": ["en", "de"]}.get(kind, [])
    values: dict[str, Any] = {"name": "x", "format": kind, "path": "x", "languages": said}
    source = CorpusSource.parse(values | ({"path": ["x", "y"]} if kind == "moses" else {}))

    def read(path: Path) -> Any:
        paths = [path]
        if kind == "moses":
            (path.parent / "x.en").write_bytes(_TSV)
            paths = [path.parent / "x.en", path]
        root = path.parents[2] if kind == "gettext" and path.suffix != ".whl" else path
        return [row for row in formats.read(source, ["en", "de"], "en", [root] if not pair else paths) if row.dropped]

    return a_file(name, list(examples), read)


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


def _labelled(path: Path) -> Any:
    return read_labelled(ClassificationConfig(data=str(path)), None)


def _squad(path: Path) -> Any:
    return read_squad(path), read_training([str(path)])


def _reserved(path: Path) -> int:
    return sum(len(text) for text in evaluation_sets.read(path))


_IOB = "".join(f"{word}\t{'B-PER' if word.istitle() else 'O'}\n" for word in _LINES.decode().split()[:60]) + "\n"


def _write_questions(folder: Path) -> None:
    write_squad(folder / "x.en.json", riddles(6, 1))


def _write_classifier(folder: Path) -> None:
    names = {0: "Open", 1: "Delete"}
    config = XLMRobertaConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, id2label=names,
        label2id={name: number for number, name in names.items()},
    )  # fmt: skip
    XLMRobertaForSequenceClassification(config).save_pretrained(folder)
    _ROWS.to_parquet(folder / "test.parquet")


TARGETS |= {
    "labelled-csv": a_file("train.csv", [_ROWS.to_csv(index=False).encode()], _labelled),
    "labelled-tsv": a_file("x-en.tsv", [_ROWS.to_csv(index=False, sep="\t").encode()], _labelled),
    "labelled-parquet": a_file("x.parquet", [_parquet(_ROWS.to_dict("list"))], _labelled),
    "squad": one_of(_write_questions, "x.en.json", lambda folder: _squad(folder / "x.en.json")),
    "aligned": a_file("a/en-de.tsv", [_TSV], lambda path: read_aligned(path.parent, "en")),
    "aligned-lines": a_file("a/t.de-en.de", [_LINES], lambda path: _both_sides(path)),
    "held-out": a_file(
        "c/held_out/en-de/x.parquet",
        [_parquet({"source": _SIDES["en"], "target": _SIDES["de"]})],
        lambda path: read_aligned(path.parents[2], "en"),
    ),
    "entities": a_file("train-en.tsv", [_IOB.encode()], lambda path: read_tagged(NamedEntitiesConfig(data=str(path)))),
    "test-set": one_of(_write_classifier, "test.parquet", read_test_set),
    "reserved-json": a_file("x.json", [json.dumps({"data": [{"context": _SIDES["de"]}]}).encode()], _reserved),
    "reserved-jsonl": a_file("x.jsonl", ["".join(json.dumps([x]) + "\n" for x in _SIDES["de"]).encode()], _reserved),
    "reserved-csv": a_file("x.csv", [_ROWS.to_csv(index=False).encode()], _reserved),
    "reserved-lines": a_file("x.tsv", [_TSV, _IOB.encode()], _reserved),
    "reserved-parquet": a_file(
        "x.parquet", [_parquet(_SIDES), _parquet({"text": [{"en": a, "de": [b]} for a, b in _PAIRS]})], _reserved
    ),
}


def _both_sides(path: Path) -> Any:
    path.with_name("t.de-en.en").write_text("".join(f"{english}\n" for english, _ in _PAIRS))
    return read_aligned(path.parent, "en")


# ---------------------------------------------------------------- configs


def _config(name: str) -> bytes:
    return (ROOT / "configs" / name).read_bytes()


def _suite(path: Path) -> Any:
    return trials.plan(run_file.load_as(SuiteConfig, path))


def _cluster(path: Path) -> Any:
    found = run_file.load_as(ClusterFile, path)
    return found if "0" * 64 in found.image else found.parameters()


def _variants(path: Path) -> Any:
    return variants.plan(run_file.load(ROOT / "configs/base.yaml"), path, [], [1, 2])


def _override(path: Path) -> Any:
    return run_file.load(ROOT / "configs/demo.yaml", [path.read_bytes().decode(errors="replace")])


def _as_json(folder: Path) -> None:
    """JSON is YAML, too: so its values can be changed one by one."""
    path = write_config(folder)
    found = run_file.load(path).model_dump(mode="json", exclude_none=True)
    path.write_text(json.dumps(found))


TARGETS |= {
    "run-config": a_file("x.yaml", [_config("demo.yaml"), _config("base.yaml")], run_file.load),
    "run-values": one_of(_as_json, "toy.yaml", lambda folder: run_file.load(folder / "toy.yaml")),
    "suite-config": a_file("x.yaml", [_config("suite.yaml")], _suite),
    "cluster-config": a_file("x.yaml", [_config("cluster.yaml")], _cluster),
    "variants": a_file("x.yaml", [_config("ablations.yaml")], _variants),
    "override": a_file("x", [b"pretraining.optimization.steps=100", b"preparation.languages=[en, de]"], _override),
}  # fmt: skip


# ---------------------------------------------------------------- artifacts and shards


def _write_corpus(folder: Path) -> None:
    write_corpus(folder, {"de": _SIDES["de"], "en": _SIDES["en"]}, {"en-de": _PAIRS})


def _read_corpus(folder: Path) -> Any:
    found = manifests.read(folder, "corpus", made_with="prepare_corpus")
    return found, list(tokenization._texts(folder, "de"))


def _forged(content: bytes, kind: str, folder: Path) -> None:
    """Write a manifest whose digest and seal fit whatever it says."""
    try:
        said = {name: value for name, value in json.loads(content).items() if name != "seal"}
        said["digest"] = manifests.digest({"kind": said["kind"], "files": said["files"], "facts": said["facts"]})
        content = json.dumps(said | {"seal": manifests.digest(said)}).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    (folder / manifests.NAME).write_bytes(content)


def _forged_manifest(folder: Path, content: bytes) -> Any:
    _forged(content, "corpus", folder)
    return manifests.read(folder, "corpus", made_with="prepare_corpus")


def _corpus_manifest(folder: Path) -> list[bytes]:
    _write_corpus(folder)
    return [(folder / manifests.NAME).read_bytes()]


def _write_shards(folder: Path) -> None:
    write_shards(folder, {"one": 20})


def _read_shards(folder: Path) -> Any:
    found = shards.open_shards(folder)
    for tables in found.mono.values():
        for table in tables:
            shards.make_blocks(table, 24)
    return found.vocabulary_size


def _forged_facts(folder: Path, content: bytes) -> Any:
    try:
        facts = json.loads(content)
    except (ValueError, RecursionError):
        facts = None
    with contextlib.suppress(UnicodeEncodeError):  # half a character, which cannot be forged either
        manifests.write(folder, "shards", facts)
    return _read_shards(folder)


def _facts(folder: Path) -> list[bytes]:
    _write_shards(folder)
    return [json.dumps(manifests.load(folder)["facts"]).encode()]


TARGETS |= {
    "manifest": one_of(_write_corpus, manifests.NAME, _read_corpus),
    "manifest-forged": Target(_corpus_manifest, _forged_manifest),
    "corpus-forged": one_of(_write_corpus, "mono/de/toy.parquet", _read_corpus, "corpus"),
    "facts-forged": Target(_facts, _forged_facts),
    "offsets-forged": one_of(_write_shards, "mono/de/one.offsets", _read_shards, "shards"),
    "tokens-forged": one_of(_write_shards, "pairs/en-de/one.source.tokens", _read_shards, "shards"),
}

# ---------------------------------------------------------------- trainings

_FINGERPRINT = Fingerprint({"seed": 1}, {"torch": "2"})


def _write_checkpoint(folder: Path) -> None:
    tensors = {
        "model.weight": torch.ones(4, 3),
        "queue": torch.zeros(8, 3),
        "random": torch.zeros(16, dtype=torch.uint8),
    }
    Checkpoints(folder, _FINGERPRINT, 1, 3).save(Checkpoint(2, tensors, {"losses": {"mlm": 1.5}}))


def _read_checkpoint(folder: Path) -> Any:
    return Checkpoints(folder, _FINGERPRINT, 1, 3).load_newest()


def checkpoint(name: str, fitting: bool = False) -> Target:
    """One file of a checkpoint."""
    step = "step=0000000002"
    found = one_of(_write_checkpoint, f"{step}/{name}", _read_checkpoint)

    def attack(folder: Path, content: bytes) -> Any:
        (folder / step / name).write_bytes(content)
        manifests.write(folder / step, "checkpoint", {"step": 2})
        return _read_checkpoint(folder)

    return Target(found.examples, attack) if fitting else found


def _curves(folder: Path) -> None:
    file = tracker.FileTracker(folder / tracker.METRICS)
    for step in range(1, 6):
        file.log(step, {"loss/mlm": 4.0 - step, "dev/mean": 0.5, "dev/de": 0.25, "dev/en": 0.75})
    file.close()


def _read_curves(folder: Path) -> Any:
    file = tracker.FileTracker(folder / tracker.METRICS)
    file.close()
    best = BestCheckpoints(folder, SelectionConfig(rule="each"), "en")
    evaluations = best.evaluations()
    return best.choose(evaluations, 5) if evaluations else None


def _write_best(folder: Path) -> None:
    best = BestCheckpoints(folder, SelectionConfig(rule="joint"), "en")
    best.update(torch.nn.Linear(3, 2), [selection.DevScores(4, {"en": 0.5})])


def _read_best(folder: Path) -> Any:
    return BestCheckpoints(folder, SelectionConfig(rule="joint"), "en").load(torch.nn.Linear(3, 2), 4)


def _forged_best(folder: Path, content: bytes) -> Any:
    path = folder / "kept/0000000004.safetensors"
    path.write_bytes(content)
    entry = {"size": len(content), "sha256": manifests.file_sha256(path)}
    path.with_suffix(".json").write_text(json.dumps(entry))
    return _read_best(folder)


def _learner() -> Any:
    module = torch.nn.Linear(3, 2)
    return SimpleNamespace(module=module, state=dict), torch.optim.AdamW(module.parameters())


def _meta(_: Path) -> list[bytes]:
    learner, optimizer = _learner()
    return [json.dumps(state.snapshot(learner, optimizer, state.Progress(4, 4), {"loss/mlm": 2.0}).meta).encode()]


def _restore(_: Path, content: bytes) -> Any:
    """A checkpoint of which only meta.json was forged, from there into a training."""
    learner, optimizer = _learner()
    meta = outside.parse_json(content, dict[str, Any], "meta.json", "restore it")
    tensors = state.named_tensors(learner, optimizer)
    return state.restore(Checkpoint(4, tensors, meta), learner, optimizer, state.Progress())


def _selection(folder: Path) -> None:
    evaluations = [selection.DevScores(step, {"en": 0.5, "de": step / 10}) for step in (2, 4)]
    selection.write(folder, "each", evaluations, selection.choose(evaluations, "each", "en", 4))


def _read_selection(folder: Path) -> Any:
    choose = selection.directories(folder)
    return [choose(language) for language in ("de", "xx")], selection.development(folder)


_KEPT = "kept/0000000004"
TARGETS |= {
    "checkpoint": checkpoint("state.safetensors"),
    "checkpoint-manifest": checkpoint(manifests.NAME),
    "checkpoint-forged": checkpoint("state.safetensors", fitting=True),
    "meta-forged": checkpoint("meta.json", fitting=True),
    "restore": Target(_meta, _restore),
    "metrics": one_of(_curves, tracker.METRICS, _read_curves),
    "kept": one_of(_write_best, f"{_KEPT}.safetensors", _read_best),
    "kept-entry": one_of(_write_best, f"{_KEPT}.json", _read_best),
    "kept-forged": Target(one_of(_write_best, f"{_KEPT}.safetensors", _read_best).examples, _forged_best),
    "selection": one_of(_selection, selection.FILE, _read_selection),
}

# ---------------------------------------------------------------- models and tokenizers

_MODEL_WORDS = sorted({word for pair in _PAIRS for word in " ".join(pair).split()})


def _write_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    save_model(folder, words=_MODEL_WORDS, hidden_size=16, intermediate_size=32)
    save_file({"projection": torch.eye(16)}, folder / pretrained.PROJECTION)


def _embed(folder: Path) -> Any:
    """As `infoxlm embed` does."""
    directories.check(folder)
    model, tokenizer = any_encoder.load_encoder(folder, "cpu")
    space = any_encoder.contrast_space(model)
    any_encoder.describe(model)
    if space:
        projection = any_encoder.load_projection(folder, model)
    inputs = tokenizer(["Open the new page", "x"], padding=True, truncation=True, max_length=16, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**{name: inputs[name] for name in ("input_ids", "attention_mask")}, output_hidden_states=True)
    return hidden.hidden_states[-1] @ projection if space else hidden


def _start(folder: Path) -> Any:
    """As pre-training does that starts from a model."""
    directories.check(folder)
    size = pretrained.size_of(folder, pretrained.KINDS)
    return pretrained.load_into(InfoXLM(size, 1, "mean", True), folder)


def model(name: str, read: Callable[[Path], Any]) -> Target:
    """One file of a model."""

    def whole(folder: Path) -> Path:
        return folder / "model"

    def examples(folder: Path) -> list[bytes]:
        _write_model(whole(folder))
        return [(whole(folder) / name).read_bytes()]

    def attack(folder: Path, content: bytes) -> Any:
        (whole(folder) / name).write_bytes(content)
        return read(whole(folder))

    return Target(examples, attack, slow=True)


def _trained(folder: Path) -> list[bytes]:
    corpus_folder = folder / "corpus"
    _write_corpus(corpus_folder)
    return [tokenization._train_model(TokenizationConfig(vocabulary_size=60, processes=1), corpus_folder)]


def _given(folder: Path, content: bytes) -> Any:
    (folder / "x.model").write_bytes(content)
    config = TokenizationConfig(vocabulary_size=60, processes=1, model=str(folder / "x.model"))
    given = tokenization._given_model(config)
    directory = folder / "tokenizer"
    directory.mkdir(exist_ok=True)
    tokenizers.write_fast(given, directory)
    with tokenizers.reading("x"):
        return tokenizers.load_fast(directory)("Öffne die neue Seite")


def _trained_words(folder: Path) -> list[bytes]:
    tokenizers.write_fast(*_trained(folder), folder)
    return [(folder / "tokenizer.json").read_bytes()]


def _read_words(folder: Path, content: bytes) -> Any:
    (folder / "tokenizer.json").write_bytes(content)
    return masking.word_starts(folder, 60)


def _vectors(folder: Path) -> None:
    said = {"layer": 1, "pooling": "mean", "sentences": ["a", "b"], "vectors": [[1.0, 0.5], [0.25, 1.0]]}
    (folder / reference_vectors.FILE).write_text(json.dumps(said))


def _read_vectors(folder: Path) -> Any:
    found = reference_vectors.read(folder)
    return reference_vectors.compare(found, found.vectors, "x") if found.vectors.isfinite().all() else None


def _released(folder: Path) -> list[bytes]:
    torch.manual_seed(0)
    infoxlm_checkpoint(folder / "model.pt", model_tensors())
    return [(folder / "model.pt").read_bytes()]


def _import(folder: Path, content: bytes) -> Any:
    (folder / "model.pt").write_bytes(content)
    shutil.rmtree(folder / "imported", ignore_errors=True)
    return fairseq.convert(folder / "model.pt", folder / "imported")


TARGETS |= {
    "model-config": model("config.json", _embed),
    "model-start": model("config.json", _start),
    "model-weights": model("model.safetensors", _embed),
    "start-weights": model("model.safetensors", _start),
    "projection": model(pretrained.PROJECTION, _embed),
    "start-projection": model(pretrained.PROJECTION, _start),
    "tokenizer": model("tokenizer.json", _embed),
    "tokenizer-config": model("tokenizer_config.json", _embed),
    "word-starts": Target(_trained_words, _read_words),
    "sentencepiece": Target(_trained, _given, slow=True),
    "reference-vectors": one_of(_vectors, reference_vectors.FILE, _read_vectors),
    "fairseq": Target(_released, _import, slow=True),
}

# ---------------------------------------------------------------- small files of the store


def a_note(name: str, said: Any, read: Callable[[Path], Any]) -> Target:
    """A JSON file of the store."""
    return a_file(name, [json.dumps(said).encode()], read)


def _stop(path: Path) -> Any:
    run = RemoteRun(str(path.parent), "holder")
    run._look()
    return run.asked_to_stop()


def _last_run(path: Path) -> Any:
    return local._last(path.parent)


def _pointer(path: Path) -> Any:
    return artifacts.read_pointer(type("Artifact", (), {"path": str(path)}))


def _decision(path: Path) -> Any:
    version = type("Version", (), {"tags": {promotion.DECISION: path.read_bytes().decode(errors="replace")}})
    version.name, version.version = "x", 1
    return promotion._decision(version)


def _scores(path: Path) -> Any:
    found = trials.read_scores(path)
    return found.to_dict()


def _outcomes() -> bytes:
    rows = {name: ["x", "y"] for name in evidence.COLUMNS}
    return _parquet(rows | {"score": [0.5, 1.0]} if "score" in rows else rows)


TARGETS |= {
    "lease": a_note("lease.json", {"holder": "a", "attempt": 3, "beat": 17}, lambda path: lease.read(str(path))),
    "stop": a_file("run/stop", [b"", b"holder"], _stop),
    "outcome": a_note(
        "x.json", {"stage": "pretrain", "code": 5, "class": "TrainingDiverged", "message": "x", "run": "y"},
        lambda path: runtime.parse_outcome(path.read_bytes(), str(path)),
    ),
    "run-json": a_note("run.json", {"run": "demo-1", "config": "x", "status": "RUNNING"}, _last_run),
    "pointer": a_note("artifact", {"location": "s3://b/x", "digest": "sha256:x"}, _pointer),
    "cost": a_note(
        "x.json", {"step": "pretrain", "device": "CPU", "hours": 1.5, "workers": 2},
        lambda path: costs._read_all(str(path.parent), costs.StepCost),
    ),
    "begun": a_note(
        "begun.json", {"pipeline_run": "x", "run": "pretrained-1", "artifact": "1", "fingerprint": {"seed": 1}},
        lambda path: outside.parse_json(path.read_bytes(), training_runs.Begun, path, "delete it"),
    ),
    "work": a_note(
        "work.json",
        {"stage": "pretrain", "store": "s", "kind": "pretrained", "name": "1", "config": {"seed": 1}, "num_workers": 2,
         "artifacts": {"corpus": "s/corpus/1"}, "run": "pretrained-1"},
        lambda path: job._read(str(path)),
    ),
    "decision": a_note("tag", {"what": "promoted", "reason": "x", "figures": {"gain": 1}}, _decision),
    "scores": a_note(
        "scores.json",
        {"task": "retrieval", "languages": {"de": {"top1": 0.5}}, "mean": {"top1": 0.5}, "counts": {"de": 4},
         "test_set": "sha256:x", "source": "en", "training": {"steps": 2}, "trained_on": ["en"], "more": [1]},
        _scores,
    ),
    "judged": a_note(
        "scores.json", {"model": "x", "pivot": "en", "test_set": "y"}, lambda path: evidence.read_scores(path.parent)
    ),
    "evidence": a_file("items.parquet", [_outcomes()], lambda path: evidence.read(path, "x")),
}  # fmt: skip


# ---------------------------------------------------------------- what may come of it


def attack(name: str, folder: Path, content: bytes) -> errors.InfoXLMError | None:
    """Read a content. What may come of it is a result, or an error of ours, which is given; all else is raised.

    Raises:
        AssertionError: the error is of no class of its own, or is not one line.
    """
    try:
        TARGETS[name].read(folder, content)
    except errors.InfoXLMError as error:
        assert type(error) is not errors.InfoXLMError, f"of no class: {error}"
        assert "\n" not in str(error), f"not one line: {str(error)!r:.300}"
        return error
    return None
