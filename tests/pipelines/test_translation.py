"""Translation as a user runs it: a translator that is registered and used, and a sweep over its initial weights."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from infoxlm_core import run_file
from infoxlm_core.errors import ConfigError
from pipelines import trials
from pipelines.cli import app
from tests.helpers.commands import infoxlm, only
from tests.servers import s3
from tests.toys.run import write_translation_config

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs/translation.yaml"
STORE = "s3://infoxlm/translations"


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


@dataclass(frozen=True)
class Registration:
    """A run that registered a translator: artifacts on S3, MLflow with accounts, training in a Ray worker."""

    environment: dict[str, str]
    summary: str
    artifacts: Path
    """A copy of the store."""

    def infoxlm(self, *arguments: str, **options) -> subprocess.CompletedProcess:
        """Run the command `infoxlm` in a new process on the same servers."""
        command = [Path(sys.executable).with_name("infoxlm"), *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=400, **options)


@pytest.fixture(scope="module")
def registered(swept, locked_server, s3_server, tmp_path_factory) -> Registration:
    """Train and register the translator MLM of the sweep again, on servers and in a Ray worker.

    The run starts from the text and the language model of the sweep, which tests/e2e makes on such servers.
    """
    config = Path(swept.args[2])
    sweep_store = Path(swept.args[-1])
    folder = tmp_path_factory.mktemp("servers")
    bucket = s3.bucket(s3_server, "infoxlm")
    for kind in ("corpus", "shards", "pretrained"):
        for path in sweep_store.glob(f"{kind}/*/**/*"):
            if path.is_file():
                bucket.upload_file(str(path), f"translations/{path.relative_to(sweep_store)}")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "AWS_"))}
    servers = locked_server.environment() | s3.environment(s3_server, "canary")
    cache = {"INFOXLM_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    run = Registration(inherited | servers | cache, "", folder / "store")

    # Other tests of this server let only the administrator change the models that our configs name.
    arguments = ["--set", "num_workers=1", "--set", "registration.name=toy-translator"]
    done = run.infoxlm("run", str(config), "--store", STORE, *arguments)

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for item in bucket.objects.filter(Prefix="translations/"):
        path = folder / item.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(item.get()["Body"].read())
    return replace(run, summary=done.stdout, artifacts=folder / "translations")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_new_process_translates_with_the_registered_model_as_this_one_does_with_its_directory(registered):
    directory = str(only(registered.artifacts, "translator/*/translator"))
    sentences = ["Delete the folder", "Open the calendar"]

    there = registered.infoxlm(
        "translate", "models:/toy-translator@champion", "--to", "de", "--store", STORE, *sentences
    )
    here = CliRunner().invoke(app, ["translate", directory, "--to", "de", *sentences])
    refused = CliRunner().invoke(app, ["translate", directory, "--to", "fr", "Open"])

    assert "infoxlm translate --to de" in registered.summary
    assert "models:/toy-translator/1 is candidate and champion" in registered.summary
    assert there.returncode == here.exit_code == 0, there.stderr
    translations = here.stdout.splitlines()
    assert there.stdout.splitlines() == translations and len(translations) == 2 and all(translations)
    assert refused.exit_code == 2 and "the model translates between en and de, not into fr" in refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_ray_worker_and_servers_give_the_translator_of_a_directory(registered, swept):
    on_servers = only(registered.artifacts, "translator/*/manifest.json")

    in_directory = Path(swept.args[-1]) / "translator" / on_servers.parent.name / "translator/model.safetensors"

    assert in_directory.read_bytes() == (on_servers.parent / "translator/model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_evaluation_uses_pairs_that_chose_no_weights(registered):
    evaluation = only(registered.artifacts, "translations/*/scores.json").parent
    scores = json.loads((evaluation / "scores.json").read_text())
    facts = json.loads((evaluation / "manifest.json").read_text())["facts"]

    held_out = json.loads(only(registered.artifacts, "corpus/*/manifest.json").read_text())["facts"]["held_out_pairs"]
    assert len(scores["directions"]["en-de"]["references"]) == held_out - 20
    assert set(scores["directions"]) == {"en-de", "de-en"}
    assert facts["translation/bleu/en-de"] == scores["directions"]["en-de"]["bleu"]
    assert [step for step, _ in scores["curve"]["en-de"]] == [40, 80]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_ends_in_the_table_of_the_paper_beside_ours(swept):
    assert swept.returncode == 0, swept.stdout[-3000:] + swept.stderr[-3000:]
    store = Path(swept.args[-1])
    page = only(store, "comparison/*/comparison.md").read_text()
    html = only(store, "comparison/*/comparison.html").read_text()

    rows = [line for line in page.splitlines() if line.startswith("| MLM")]
    assert any("33.4" in row and "34.3" in row and "[1]" in row for row in rows)
    assert any(row.endswith("| ours   |") for row in rows)
    assert "XLM (Lample and Conneau 2019), Table 2" in page and "tok:13a" in page and "paired bootstrap" in page
    assert html.count("<img") >= 2  # a curve for each direction
    assert len(list(store.glob("pretrained/*/manifest.json"))) == 1  # both variants share it
    assert len(list(store.glob("translator/*/translator"))) == 2


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
