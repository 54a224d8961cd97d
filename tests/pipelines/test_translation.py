"""Translation as a user runs it: a translator that is registered and used, and a sweep over its initial weights."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from infoxlm_core import run_file
from infoxlm_core.errors import ConfigError
from pipelines import trials
from pipelines.cli import app
from tests.helpers.commands import infoxlm, only
from tests.toys.run import write_translation_config

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs/translation.yaml"


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> subprocess.CompletedProcess:
    """Train two initialisations at the same time, which share their pre-training."""
    base = tmp_path_factory.mktemp("translation")
    config = write_translation_config(base)
    starts = {"random": {"translation": {"encoder": "random", "decoder": "random"}}, "MLM": {}}
    variants = base / "variants.yaml"
    variants.write_text(yaml.safe_dump(starts, sort_keys=False))
    arguments = ["ablate", str(config), "--variants", str(variants), "--seeds", "1"]
    return infoxlm(*arguments, "--store", str(base / "store"))


@pytest.fixture(scope="module")
def finished(swept) -> Path:
    """Train and register a translator in the store of the sweep; return the store."""
    store = Path(swept.args[swept.args.index("--store") + 1])
    run = infoxlm("run", str(store.parent / "toy-translation.yaml"), "--store", str(store))
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert "infoxlm translate --to de" in run.stdout and "models:/toy/1 is candidate and champion" in run.stdout
    return store


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_new_process_translates_with_the_registered_model_as_this_one_does_with_its_directory(finished):
    registered = only(finished, "mlartifacts/**/model/manifest.json").read_bytes()
    directories = finished.glob("translator/*/translator")
    directory = next(path for path in directories if (path / "manifest.json").read_bytes() == registered)
    sentences = "Delete the folder\nOpen the calendar\n"

    there = infoxlm("translate", "models:/toy@champion", "--to", "de", "--store", str(finished), input=sentences)
    here = CliRunner().invoke(app, ["translate", str(directory), "--to", "de"], input=sentences)
    refused = CliRunner().invoke(app, ["translate", str(directory), "--to", "fr", "Open"])

    assert (there.returncode, here.exit_code) == (0, 0), there.stderr + here.stderr
    translations = here.stdout.splitlines()
    assert there.stdout.splitlines() == translations and len(translations) == 2 and all(translations)
    assert refused.exit_code == 2 and "the model translates between en and de, not into fr" in refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_evaluation_uses_pairs_that_chose_no_weights(finished):
    reports = finished.glob("translations/*/report.md")
    (evaluation,) = (path.parent for path in reports if path.read_text().startswith("# translator"))
    scores = json.loads((evaluation / "scores.json").read_text())
    facts = json.loads((evaluation / "manifest.json").read_text())["facts"]

    held_out = json.loads(only(finished, "corpus/*/manifest.json").read_text())["facts"]["held_out_pairs"]
    assert len(scores["directions"]["en-de"]["references"]) == held_out - 20
    assert set(scores["directions"]) == {"en-de", "de-en"}
    assert facts["translation/bleu/en-de"] == scores["directions"]["en-de"]["bleu"]
    assert [step for step, _ in scores["curve"]["en-de"]] == [80, 160]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_ends_in_the_table_of_the_paper_beside_ours(swept, finished):
    assert swept.returncode == 0, swept.stdout[-3000:] + swept.stderr[-3000:]
    page = only(finished, "comparison/*/comparison.md").read_text()
    html = only(finished, "comparison/*/comparison.html").read_text()

    rows = [line for line in page.splitlines() if line.startswith("| MLM")]
    assert any("33.4" in row and "34.3" in row and "[1]" in row for row in rows)
    assert any(row.endswith("| ours   |") for row in rows)
    assert "XLM (Lample and Conneau 2019), Table 2" in page and "tok:13a" in page and "paired bootstrap" in page
    assert html.count("<img") >= 2  # a curve for each direction
    assert len(list(finished.glob("pretrained/*/manifest.json"))) == 1  # both variants and the run share it
    assert len(list(finished.glob("translator/*/translator"))) == 2  # that of MLM was found again


def test_variants_change_the_sections_of_both_trainings():
    planned = trials.plan(run_file.load(DEMO), ROOT / "configs/initialisations.yaml", (), (1, 2))

    starts = {item["trial"]["variant"]: item for item in planned}
    assert list(starts) == ["random", "embeddings", "CLM", "MLM"] and len(planned) == 8
    assert starts["random"]["translation"]["encoder"] == "random"
    assert starts["CLM"]["pretraining"]["objectives"]["clm"] == 1
    assert starts["MLM"]["pretraining"] == starts["random"]["pretraining"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("pretraining.system=bert", "must be xlm to train a translator"),
        ("translation.languages=[en, de]", "de is not in preparation.languages"),
        ("num_workers=2", "must not exceed translation.virtual_shards"),
        ("translation.encoder=copied", "translation.encoder: Input should be"),
    ],
)
def test_a_run_that_cannot_work_is_refused(change, reason):
    with pytest.raises(ConfigError, match=reason):
        run_file.load(DEMO, (change,))


def test_a_variant_of_translation_needs_a_run_with_a_translator(tmp_path):
    path = tmp_path / "variants.yaml"
    path.write_text("random: {translation: {encoder: random}}")

    with pytest.raises(ConfigError, match="variant random: the run has no section translation, which"):
        trials.plan(run_file.load(ROOT / "configs/demo.yaml"), path, (), (1,))
