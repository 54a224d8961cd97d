"""The planned trials of an ablation, the variants that are refused, and an ablation with a variant that diverges."""

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from infoxlm_core import run_file
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.errors import ConfigError
from pipelines import trials
from pipelines.cli.app import CONFIGS
from tests.helpers.commands import infoxlm, only, runs_of
from tests.pipelines.commands import assert_refused, invoke
from tests.toys.run import write_config

VARIANTS = CONFIGS / "ablations.yaml"


@pytest.fixture(scope="module")
def demo() -> run_file.RunConfig:
    return run_file.load(CONFIGS / "demo.yaml")


def test_seed_of_each_trial_is_in_its_settings(demo):
    planned = trials.plan_trials(demo, VARIANTS, ("full", "-XLCO"), (3, 5))

    variants_and_seeds = [
        (item["trial"]["variant"], item["trial"]["seed"], item["pretraining"]["seed"]) for item in planned
    ]
    assert variants_and_seeds == [("full", 3, 3), ("-XLCO", 3, 3), ("full", 5, 5), ("-XLCO", 5, 5)]


def test_variant_can_be_chosen_by_its_alias(demo):
    planned = trials.plan_trials(demo, VARIANTS, ("MLM", "MLM+TLM", "full"), (1,))

    assert [item["trial"]["variant"] for item in planned] == ["full", "-XLCO", "-TLM-XLCO"]
    assert planned[-1]["trial"]["what"] == "MLM only"


def test_alias_does_not_hide_the_variant_of_this_name():
    variants = {"a": {"also": "b"}, "b": {"objectives": {"xlco": 0}}}

    assert list(trials.choose_variants(variants, ["b"], VARIANTS)) == ["b"]


@pytest.mark.item("A27")
def test_each_ablation_of_the_paper_changes_settings_of_one_config(demo):
    planned = trials.plan_trials(demo, VARIANTS, (), (1,))
    configs = {item["trial"]["variant"]: PretrainingConfig.parse(item["pretraining"]) for item in planned}

    weights = {name: (c.objectives.mlm, c.objectives.tlm, c.objectives.xlco) for name, c in configs.items()}
    assert weights == {
        "full": (1, 1, 1), "-Universal": (1, 1, 1), "-XLCO": (1, 1, 0), "-TLM-XLCO": (1, 0, 0), "-TLM": (1, 0, 1),
        "-TLM:universal": (1, 0, 1), "-TLM-Mixup": (1, 0, 1), "-TLM-Momentum": (1, 0, 1),
    }  # fmt: skip
    for name in ("full", "-TLM:universal"):
        assert configs[name].contrast.layer == 2
    for name in ("-TLM", "-TLM-Mixup", "-TLM-Momentum", "-Universal"):
        assert configs[name].contrast.layer == "last"
    assert configs["-TLM-Mixup"].contrast.mixup == 0
    assert configs["-TLM-Momentum"].contrast.momentum == 0
    assert configs["full"] == demo.pretraining


def test_forty_trials_fit_into_one_process_argument(demo):
    planned = trials.plan_trials(demo, VARIANTS, (), (1, 2, 3, 4, 5))

    assert len(planned) == 40
    assert len(json.dumps(planned)) < 64 * 1024


@pytest.mark.parametrize(
    ("variants", "only", "message"),
    [
        ("a: {}", ("b",), "has no variant 'b'. Choose from a"),
        ("a: {objectives: {xlc: 0}}", (), "variant a: pretraining.objectives.xlc: unknown name; known are"),
        ("a: {contrast: 3}", (), "variant a: pretraining.contrast: Input should be"),
        ("a: {translation: {encoder: random}}", (), "variant a: the variant changes the section translation, but"),
        ("a: {seed: 5}", (), "variant a: the variant sets a seed, but each trial has its own"),
        ("a: {also: [b]}", ("b",), "has also ['b']. Give text."),
        ("a: {translation: random}", (), "has translation 'random'. Give a mapping."),
        ("a: {}\nb: {what: the same}", (), "are the same with this config. Choose one"),
        ("a/b: {}", (), "variant 'a/b'. Use letters, digits and"),
        ("", (), "expected a mapping from names to variants"),
    ],
)
def test_invalid_variant_is_refused_in_one_line(demo, tmp_path, variants, only, message):
    (tmp_path / "variants.yaml").write_text(variants)

    with pytest.raises(ConfigError) as refusal:
        trials.plan_trials(demo, tmp_path / "variants.yaml", only, (1,))

    (line,) = str(refusal.value).splitlines()
    assert message in line
    assert "variants.yaml" in line


@pytest.mark.parametrize("seeds", ["1,1", "1,01", "", "1,", "-1", "1.5", "9" * 16, "9" * 5_000])
def test_seeds_that_are_repeated_or_no_whole_numbers_are_refused(seeds):
    with pytest.raises(ConfigError, match="Give different whole numbers, such as 1,2,3"):
        trials.parse_seeds(seeds)


@pytest.mark.parametrize("name", ["pretraining.seed", "finetuning.seed"])
def test_override_of_a_seed_that_each_trial_replaces_is_refused(tmp_path, name):
    result = invoke("ablate", "demo", "--only", "no-variant", "--store", tmp_path, "--set", f"{name}=5")

    assert_refused(result, f"--set '{name}=5' has no effect, because each trial has its own seed. Give --seeds")


@dataclass(frozen=True)
class Ablation:
    """A finished ablation."""

    process: subprocess.CompletedProcess
    store: Path


@pytest.fixture(scope="module")
def ablation(tmp_path_factory) -> Ablation:
    """Run two variants, of which one diverges, with a seed that differs from that of the config."""
    folder = tmp_path_factory.mktemp("ablation")
    config, store, variants = write_config(folder), folder / "store", folder / "variants.yaml"
    diverging = {"optimization": {"learning_rate": 1e30}}
    variants.write_text(yaml.safe_dump({"full": {"what": "everything"}, "broken": diverging}, sort_keys=False))
    command = ["ablate", str(config), "--variants", str(variants), "--seeds", "2", "--store", str(store)]
    command += ["--set", "pretraining.optimization.steps=60", "--set", "finetuning.optimization.steps=3"]
    return Ablation(infoxlm(*command), store)


@pytest.mark.slow
def test_table_has_the_finished_variant_and_names_the_diverged_one(ablation):
    process = ablation.process
    table = process.stdout[process.stdout.index("# toy-ablations") :]

    assert process.returncode == 5, process.stderr[-3000:]
    assert "pretrain full seed 2: step" in process.stdout
    assert re.search(r"^\| full +\| \d+\.\d", table, re.MULTILINE)
    assert re.search(r"^\| broken +\| –", table, re.MULTILINE)
    assert "Unfinished trials** are not included: broken seed 2" in table
    assert "TrainingDiverged: pretrain broken seed 2" in process.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_mlflow_has_a_run_for_each_trial_below_the_run_of_the_ablation(ablation):
    client, parent, trial_runs = runs_of(ablation.store)
    run_by_variant = {run.data.tags["variant"]: run for run in trial_runs}
    full, broken = run_by_variant["full"], run_by_variant["broken"]

    assert (parent.info.run_name, parent.info.status) == ("toy-ablations", "FAILED")
    assert len(trial_runs) == 2
    for run in trial_runs:
        assert (run.data.tags["seed"], run.data.tags["mlflow.parentRunId"]) == ("2", parent.info.run_id)
    assert (full.info.status, broken.info.status) == ("FINISHED", "FAILED")
    seeds = {section: full.data.params[f"{section}.seed"] for section in ("pretraining", "finetuning", "evaluation")}
    assert seeds == {"pretraining": "2", "finetuning": "2", "evaluation": "1"}
    assert broken.data.params["pretraining.optimization.learning_rate"] == "1e+30"
    curve = client.get_metric_history(full.info.run_id, "loss/xlco")
    assert [point.step for point in curve] == list(range(10, 61, 10))
    comparison = json.loads((only(ablation.store, "comparison/*") / "comparison.json").read_text())
    score = comparison["variants"]["full"]["metrics"]["retrieval/served"]["mean"]
    assert parent.data.metrics["full/retrieval/served"] == pytest.approx(score)
    for kind in ("corpus", "shards"):  # the variants share them
        assert len(list(ablation.store.glob(f"{kind}/*/manifest.json"))) == 1
