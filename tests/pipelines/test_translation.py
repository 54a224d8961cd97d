"""A translator is trained, registered and used, and a sweep compares several initial weights."""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from infoxlm_core import run_file
from infoxlm_core.errors import ConfigError
from pipelines import trials
from pipelines.cli.app import CONFIGS
from tests.helpers.commands import infoxlm, only
from tests.pipelines.commands import assert_refused, invoke
from tests.toys.run import write_translation_config

DEMO = CONFIGS / "translation.yaml"


@dataclass(frozen=True)
class Finished:
    """A command that has run in a process of its own."""

    process: subprocess.CompletedProcess
    config: Path
    store: Path


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Finished:
    """Train a translator from random weights and one from the language model, both at the same time."""
    folder = tmp_path_factory.mktemp("translation")
    config, store, variants = write_translation_config(folder), folder / "store", folder / "variants.yaml"
    random_weights = {"translation": {"encoder": "random", "decoder": "random"}}
    variants.write_text(yaml.safe_dump({"random": random_weights, "MLM": {}}, sort_keys=False))
    command = ["ablate", str(config), "--variants", str(variants), "--seeds", "1", "--store", str(store)]
    return Finished(infoxlm(*command), config, store)


@pytest.fixture(scope="module")
def registered(sweep, tmp_path_factory) -> Finished:
    """Train the translator MLM of the sweep again, in a Ray worker, from the same text and language model; register it.

    The artifacts of the sweep except its translators are copied to another store.
    """
    store = tmp_path_factory.mktemp("registered") / "store"
    for kind in ("corpus", "shards", "pretrained"):
        shutil.copytree(sweep.store / kind, store / kind)

    process = infoxlm("run", str(sweep.config), "--store", str(store), "--set", "num_workers=1")

    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return Finished(process, sweep.config, store)


@pytest.mark.slow
def test_registered_translator_translates_as_its_directory_does(registered):
    name = run_file.load(registered.config).registration.name
    directory = only(registered.store, "translator/*/translator")
    sentences = ["Delete the folder", "Open the calendar"]

    process = infoxlm(
        "translate", f"models:/{name}@champion", "--to", "de", "--store", str(registered.store), *sentences
    )
    translations = invoke("translate", directory, "--to", "de", *sentences).stdout.splitlines()

    assert "infoxlm translate --to de" in registered.process.stdout
    assert f"models:/{name}/1 is candidate and champion" in registered.process.stdout
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == translations
    assert len(translations) == 2
    assert all(translations)
    refused = invoke("translate", directory, "--to", "fr", "Open")
    assert_refused(refused, "the model translates between en and de, not into fr")


@pytest.mark.slow
def test_ray_worker_trains_the_same_translator_as_the_step_itself(registered, sweep):
    translator = only(registered.store, "translator/*/translator")
    translator_of_sweep = sweep.store / translator.relative_to(registered.store)

    assert len(list(sweep.store.glob("translator/*/translator"))) == 2
    weights = [path / "model.safetensors" for path in (translator, translator_of_sweep)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.slow
def test_evaluation_excludes_the_pairs_that_chose_the_best_weights(registered):
    evaluation = only(registered.store, "translations/*/scores.json").parent
    scores = json.loads((evaluation / "scores.json").read_text())
    facts = json.loads((evaluation / "manifest.json").read_text())["facts"]
    corpus = json.loads(only(registered.store, "corpus/*/manifest.json").read_text())

    assert len(scores["directions"]["en-de"]["references"]) == corpus["facts"]["held_out_pairs"] - 20
    assert set(scores["directions"]) == {"en-de", "de-en"}
    assert facts["translation/bleu/en-de"] == scores["directions"]["en-de"]["bleu"]
    assert [step for step, _ in scores["curve"]["en-de"]] == [40, 80]


@pytest.mark.slow
def test_sweep_shows_its_translators_beside_the_table_of_the_paper(sweep):
    assert sweep.process.returncode == 0, sweep.process.stdout[-3000:] + sweep.process.stderr[-3000:]
    page = only(sweep.store, "comparison/*/comparison.md").read_text()
    html = only(sweep.store, "comparison/*/comparison.html").read_text()

    rows = [line for line in page.splitlines() if line.startswith("| MLM")]
    assert any("33.4" in row and "34.3" in row and "[1]" in row for row in rows)
    assert any(row.endswith("| ours   |") for row in rows)
    for text in ("XLM (Lample and Conneau 2019), Table 2", "tok:13a", "paired bootstrap"):
        assert text in page
    assert html.count("<img") >= 2  # a curve for each direction
    assert len(list(sweep.store.glob("pretrained/*/manifest.json"))) == 1  # both variants share it


def test_variants_change_the_sections_of_both_trainings():
    planned = trials.plan_trials(run_file.load(DEMO), CONFIGS / "initialisations.yaml", (), (1, 2))

    trial_by_variant = {item["trial"]["variant"]: item for item in planned}
    assert len(planned) == 8
    assert list(trial_by_variant) == ["random", "embeddings", "CLM", "MLM"]
    assert trial_by_variant["random"]["translation"]["encoder"] == "random"
    assert trial_by_variant["CLM"]["pretraining"]["objectives"]["clm"] == 1
    assert trial_by_variant["MLM"]["pretraining"] == trial_by_variant["random"]["pretraining"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pretraining.system=bert", "must be xlm to train a translator"),
        ("translation.languages=[en, de]", "de is not in preparation.languages"),
        ("num_workers=2", "must not exceed translation.virtual_shards"),
    ],
)
def test_contradictory_settings_are_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        run_file.load(DEMO, (override,))
