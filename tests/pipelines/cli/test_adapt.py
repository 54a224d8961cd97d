"""`infoxlm adapt` on toy translations and real servers improves an encoder, registers it and exports it."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel

from tests.pipelines.commands import assert_refused, invoke
from tests.servers import s3
from tests.toys.exports import train_wordpiece
from tests.toys.text import messages, write_catalogs

STORE = "s3://infoxlm/adapted"
INFOXLM = str(Path(sys.executable).with_name("infoxlm"))


def save_start(directory: Path) -> Path:
    """Write a BERT with random weights, and a WordPiece tokenizer that was trained on the toy messages."""
    texts = [text for language in (0, 1) for pair in messages(language) for text in pair]
    tokenizer = train_wordpiece([*texts, *["query:"] * 10])
    tokenizer.save_pretrained(directory)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=256, pad_token_id=0, **sizes)
    BertModel(config).save_pretrained(directory)
    return directory


@dataclass(frozen=True)
class Adaptation:
    """A finished adaptation on servers."""

    folder: Path
    environment: dict[str, str]
    summary: str

    def run(self, *arguments: str) -> str:
        """Run the command `infoxlm` on the same servers and return its standard output."""
        command = [INFOXLM, *arguments, "--store", STORE]
        process = subprocess.run(command, env=self.environment, cwd=self.folder, capture_output=True, text=True)
        assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
        return process.stdout


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, locked_server, s3_server) -> Adaptation:
    """Adapt a toy encoder to toy translations on S3 and on an MLflow server with accounts."""
    folder = tmp_path_factory.mktemp("adapt")
    start = save_start(folder / "start")
    catalogs = write_catalogs(folder / "text", {"memory": 1000})
    guard = folder / "guard"
    guard.mkdir()
    for number, language in enumerate(("de", "fr")):
        english, translations = zip(*messages(number)[:100], strict=True)
        (guard / f"general.en-{language}.en").write_text("\n".join(english))
        (guard / f"general.en-{language}.{language}").write_text("\n".join(translations))
    arguments = ["--pairs", str(catalogs / "memory"), "--languages", "en,de,fr", "--guard", str(guard)]
    # Not `adapted`: other tests of this server let only the administrator change the models that our configs name.
    arguments += ["--config", "toy-memory.yaml", "--prefix", "query: ", "--set", "preparation.held_out_share=0.1"]
    # Random weights need more training than the defaults, which are for a public encoder.
    for override in ("model.frozen=none", "optimization.learning_rate=0.003", "optimization.steps=150"):
        arguments += ["--set", f"pretraining.{override}"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "AWS_"))}
    servers = locked_server.environment() | s3.environment(s3_server, "canary")
    cache = {"INFOXLM_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    adaptation = Adaptation(folder, inherited | servers | cache, "")

    return replace(adaptation, summary=adaptation.run("adapt", str(start), *arguments))


@pytest.mark.slow
def test_adapted_encoder_is_better_than_its_start_and_becomes_champion(adapted):
    scores = re.search(r"^retrieval/served +([0-9.]+) +start +([0-9.]+)$", adapted.summary, re.MULTILINE)

    assert scores is not None, adapted.summary
    assert float(scores[1]) > float(scores[2]) + 0.2
    assert re.search(r"^version +models:/toy-memory/1 is candidate and champion: ", adapted.summary, re.MULTILINE)
    assert "classification/" not in adapted.summary
    assert "exported    adapted: see adapted/README.md" in adapted.summary


@pytest.mark.slow
def test_transformers_computes_the_vectors_of_the_champion_from_the_export(adapted):
    texts = [english for english, _ in messages(0)[:5]]
    directory = adapted.folder / "adapted"

    model = BertModel.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    batch = tokenizer([f"query: {text}" for text in texts], padding=True, return_tensors="pt")
    with torch.inference_mode():
        tokens = model.eval()(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(2)
    exported = (tokens * mask).sum(dim=1) / mask.sum(dim=1)

    printed = adapted.run("embed", "--vectors", "models:/toy-memory@champion", *texts)
    vectors = np.array([json.loads(line) for line in printed.splitlines()])
    assert type(tokenizer.backend_tokenizer.model).__name__ == "WordPiece"
    np.testing.assert_allclose(exported, vectors, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--languages", "en"], "--languages 'en' is too short. Give at least two language codes"),
        (["--languages", "en,de", "--to", "tensorflow"], "'tensorflow' is not a format"),
        (["--languages", "en,de", "--to", ","], "no format to export: give some of sentence-transformers, onnx"),
        (["--languages", "en,de", "--output", Path(__file__).parent], "exists: give a new directory"),
    ],
)
def test_unusable_option_is_refused_before_the_training(options, message, tmp_path):
    result = invoke("adapt", "s", "--pairs", "p.tmx", "--store", tmp_path / "store", *options)

    assert_refused(result, message)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--languages", "en,xx"], "languages.1: Input should be an ISO 639-1 language code"),
        (["--languages", "en,de", "--guard", "missing"], "missing: no such file or directory"),
        (["--languages", "en,de", "--guard", "start"], "start has no aligned files of en and another language"),
    ],
)
def test_unusable_languages_and_guard_are_refused_before_the_config_is_written(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_start(tmp_path / "start")
    write_catalogs(tmp_path, {"memory": 500})

    result = invoke("adapt", "start", "--pairs", "memory", *options)

    assert_refused(result, message)
    assert not (tmp_path / "adapted.yaml").exists()
