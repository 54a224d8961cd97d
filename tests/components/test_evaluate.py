"""The component that evaluates, called as KFP calls it, in runs that have no labelled text."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from kfp import dsl

from components.evaluate import evaluate
from components.finetune import finetune
from components.platform import artifacts
from infoxlm_core import manifests

OUTPUTS = {"scores": dsl.Artifact, "report": dsl.HTML, "model_card": dsl.Markdown, "metrics": dsl.Metrics}


def build_corpus(output: Path) -> None:
    words = [f"{first} {second}" for first in "abcdefgh" for second in "ijklmnop"]
    for kind in ("held_out", "pairs"):
        (output / kind / "en-de").mkdir(parents=True)
        pq.write_table(pa.table({"source": words, "target": words}), output / kind / "en-de/memory.parquet")


def test_a_run_without_labelled_text_is_evaluated_without_classification(tiny_encoders, tmp_path, monkeypatch, bucket):
    monkeypatch.setenv("INFOXLM_TRACKER", "none")
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "pod1"))
    store = "s3://models/store"

    def build_encoder(output):
        for path in tiny_encoders["first"].iterdir():
            (output / path.name).write_bytes(path.read_bytes())
        return {"steps": 0}

    built = {
        "corpus": artifacts.get_or_build(store, "corpus", "0" * 16, build_corpus),
        "encoder": artifacts.get_or_build(store, "pretrained", "0" * 16, build_encoder),
    }
    given = {name: dsl.Artifact(name=name, uri=str(tmp_path / name)) for name in (*built, "classifier")}
    for name, directory in built.items():
        artifacts.publish(given[name], directory)
    outputs = {name: kind(name=name, uri=str(tmp_path / name)) for name, kind in OUTPUTS.items()}

    finetune.python_func(config={}, num_workers=0, store=store, metrics=dsl.Metrics(uri=str(tmp_path / "m")), **given)
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "pod2"))
    evaluate.python_func(config={"retrieval_pairs": 20, "perplexity_sentences": 5}, store=store, **given, **outputs)

    figures = manifests.load(artifacts.resolve(outputs["scores"])[0])["facts"]
    assert {"retrieval/served", "perplexity/mean"} <= set(figures)
    assert not any(name.startswith("classification/") for name in figures)
    assert "lassification" not in (tmp_path / "report").read_text() + (tmp_path / "model_card").read_text()


def test_the_report_of_an_adapted_encoder_names_its_start(tiny_encoders, tmp_path, monkeypatch):
    monkeypatch.setenv("INFOXLM_TRACKER", "none")
    store = str(tmp_path / "store")
    origin = {"base_model": "intfloat/multilingual-e5-small"}

    def build_pretrained(output):
        for name, facts in (("encoder", {"steps": 9, "origin": origin}), ("start", {"steps": 0})):
            shutil.copytree(tiny_encoders["first"], output / name)
            manifests.write(output / name, "encoder", facts, {"model.start": "sha256:0"})

    pretrained = artifacts.get_or_build(store, "pretrained", "0" * 16, build_pretrained)
    classifier = artifacts.get_or_build(store, "classifier", "0" * 16, lambda _: {"steps": 0, "examples": 0})
    directories = {
        "corpus": artifacts.get_or_build(store, "corpus", "0" * 16, build_corpus),
        "encoder": pretrained / "encoder",
        "start": pretrained / "start",
        "classifier": classifier,
        "classifier_of_start": classifier,
    }
    inputs = {name: dsl.Artifact(name=name, uri=str(tmp_path / name)) for name in directories}
    for name, directory in directories.items():
        artifacts.publish(inputs[name], directory)
    outputs = {name: kind(name=name, uri=str(tmp_path / name)) for name, kind in OUTPUTS.items()}

    evaluate.python_func(config={"retrieval_pairs": 20, "perplexity_sentences": 5}, store=store, **inputs, **outputs)

    assert "<h1>multilingual-e5-small, adapted: how well" in (tmp_path / "report").read_text()
    figures = manifests.load(artifacts.resolve(outputs["scores"])[0])["facts"]
    assert {"retrieval/served", "start/retrieval/served"} <= set(figures)
