"""The component that evaluates, called as KFP calls it, in a run without labelled text."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from kfp import dsl

from components.evaluate import evaluate
from components.finetune import finetune
from components.platform import artifacts
from infoxlm_core import manifests

STORE = "s3://models/store"


def build_corpus(output: Path) -> None:
    """Write held-out and training pairs without labels."""
    words = [f"{first} {second}" for first in "abcdefgh" for second in "ijklmnop"]
    for kind in ("held_out", "pairs"):
        (output / kind / "en-de").mkdir(parents=True)
        pq.write_table(pa.table({"source": words, "target": words}), output / kind / "en-de/memory.parquet")


def test_adapted_encoder_is_evaluated_beside_its_start(tiny_encoders, tmp_path, monkeypatch, bucket):
    monkeypatch.setenv("INFOXLM_TRACKER", "none")
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "first pod"))
    origin = {"base_model": "intfloat/multilingual-e5-small"}

    def build_pretrained(output):
        for name, facts in (("encoder", {"steps": 9, "origin": origin}), ("start", {"steps": 0})):
            shutil.copytree(tiny_encoders["first"], output / name)
            manifests.write(output / name, "encoder", facts, {"model.start": "sha256:0"})

    pretrained = artifacts.get_or_build(STORE, "pretrained", "0" * 16, build_pretrained)
    corpus = artifacts.get_or_build(STORE, "corpus", "0" * 16, build_corpus)
    inputs = {}
    for name, directory in (("corpus", corpus), ("encoder", pretrained / "encoder"), ("start", pretrained / "start")):
        inputs[name] = dsl.Artifact(name=name, uri=str(tmp_path / name))
        artifacts.publish(inputs[name], directory)
    classifier = dsl.Model(name="classifier", uri=str(tmp_path / "classifier"))
    kinds = {"scores": dsl.Artifact, "report": dsl.HTML, "model_card": dsl.Markdown, "metrics": dsl.Metrics}
    outputs = {name: kind(name=name, uri=str(tmp_path / name)) for name, kind in kinds.items()}

    finetune.python_func(
        config={},
        num_workers=0,
        store=STORE,
        encoder=inputs["encoder"],
        corpus=inputs["corpus"],
        classifier=classifier,
        metrics=dsl.Metrics(uri=str(tmp_path / "metrics of finetune")),
    )
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "second pod"))
    config = {"retrieval_pairs": 20, "perplexity_sentences": 5}
    classifiers = {"classifier": classifier, "classifier_of_start": classifier}
    evaluate.python_func(config=config, store=STORE, **inputs, **classifiers, **outputs)

    figures = manifests.load(artifacts.resolve(outputs["scores"])[0])["facts"]
    assert {"retrieval/served", "perplexity/mean", "start/retrieval/served"} <= set(figures)
    report = (tmp_path / "report").read_text()
    assert "<h1>multilingual-e5-small, adapted: how well" in report
    # There is no labelled text, so nothing is classified.
    assert not any(name.startswith("classification/") for name in figures)
    assert "lassification" not in report + (tmp_path / "model_card").read_text()
