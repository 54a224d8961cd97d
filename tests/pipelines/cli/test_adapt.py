"""`infoxlm adapt` on a toy: the encoder learns the translations, and the result is exported."""

import re
from pathlib import Path

import numpy as np
import pytest
from transformers import BertConfig, BertModel
from typer.testing import CliRunner

from infoxlm_core.tasks import embedding
from pipelines.cli import app
from tests.helpers.commands import infoxlm
from tests.toys.models import save_tokenizer
from tests.toys.text import messages, write_catalogs


def save_start(directory: Path) -> Path:
    """Write a BERT with random weights that knows all words of the toy messages."""
    words = {word for language in (0, 1) for pair in messages(language) for text in pair for word in text.split()}
    tokenizer = save_tokenizer(directory, sorted(words))
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=256, pad_token_id=1, **sizes)
    BertModel(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> Path:
    """Return the folder of a finished adaptation, with the output of the command in `stdout`."""
    folder = tmp_path_factory.mktemp("adapt")
    start = save_start(folder / "start")
    catalogs = write_catalogs(folder / "text", {"memory": 1000, "general": 200})
    guard = folder / "guard"
    guard.mkdir()
    for number, language in enumerate(("de", "fr")):
        general = messages(number)[:100]
        (guard / f"general.en-{language}.en").write_text("\n".join(english for english, _ in general))
        (guard / f"general.en-{language}.{language}").write_text("\n".join(translation for _, translation in general))
    arguments = ["--pairs", str(catalogs / "memory"), "--languages", "en,de,fr", "--guard", str(guard)]
    arguments += ["--config", str(folder / "adapt.yaml"), "--output", str(folder / "adapted")]
    arguments += ["--store", str(folder / "store")]
    # A start with random weights must learn more than a public encoder.
    for override in ("model.frozen=none", "optimization.learning_rate=0.003", "optimization.steps=150"):
        arguments += ["--set", f"pretraining.{override}"]
    arguments += ["--set", "preparation.held_out_share=0.1"]

    done = infoxlm("adapt", str(start), *arguments)

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (folder / "stdout").write_text(done.stdout)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_adapted_encoder_is_better_than_its_start_and_champion(adapted):
    summary = (adapted / "stdout").read_text()

    scores = re.search(r"^retrieval/served +([0-9.]+) +start +([0-9.]+)$", summary, re.MULTILINE)
    assert scores is not None, summary
    assert float(scores[1]) > float(scores[2]) + 0.2
    assert re.search(r"^version +models:/adapted/1 is candidate and champion: ", summary, re.MULTILINE)
    assert not re.search(r"classification/", summary)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_export_has_the_class_of_the_start_and_the_vectors_of_the_registered_model(adapted):
    texts = [english for english, _ in messages(0)[:5]]

    exported = embedding.embed_sentences(adapted / "adapted", texts)
    registered = infoxlm("embed", "--vectors", "--store", str(adapted / "store"), "models:/adapted@champion", *texts)

    vectors = np.array([line.strip("[]").split(", ") for line in registered.stdout.splitlines()], float)
    assert BertModel.from_pretrained(adapted / "adapted").config.num_hidden_layers == 2
    np.testing.assert_allclose(exported, vectors, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--languages", "en"], "--languages 'en': give at least two language codes"),
        (["--languages", "en,de", "--to", "tensorflow"], "'tensorflow' is not a format"),
        (["--languages", "en,de", "--output", str(Path(__file__).parent)], "exists: give a new directory"),
    ],
)
def test_an_option_that_would_fail_after_the_training_is_refused_before_it(options, problem, tmp_path):
    result = CliRunner().invoke(app, ["adapt", "s", "--pairs", "p.tmx", "--store", str(tmp_path / "store"), *options])

    assert (result.exit_code, problem in result.stderr) == (2, True), result.stderr
    assert not (tmp_path / "store").exists()
