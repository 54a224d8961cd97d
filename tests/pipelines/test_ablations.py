"""Ablations: the trials that they plan, refusals before anything starts, and a whole one with a failing variant."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from infoxlm_core import run_file
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.errors import ConfigError
from pipelines import trials
from tests.helpers.commands import infoxlm, only, runs_of
from tests.toys.run import write_config

ROOT = Path(__file__).parents[2]
VARIANTS = ROOT / "configs/ablations.yaml"


@pytest.fixture(scope="module")
def demo() -> run_file.RunConfig:
    return run_file.load(ROOT / "configs/demo.yaml")


def plan(config, tmp_path, text: str | None = None, only=(), seeds=(1,)) -> list[dict]:
    path = VARIANTS
    if text is not None:
        path = tmp_path / "variants.yaml"
        path.write_text(text)
    return trials.plan(config, path, only, seeds)


def test_every_variant_meets_every_seed_and_the_seed_is_in_the_config(demo, tmp_path):
    planned = plan(demo, tmp_path, only=("full", "-XLCO"), seeds=(3, 5))

    pairs = [(item["trial"]["variant"], item["trial"]["seed"], item["pretraining"]["seed"]) for item in planned]
    assert pairs == [("full", 3, 3), ("-XLCO", 3, 3), ("full", 5, 5), ("-XLCO", 5, 5)]


def test_a_variant_may_be_asked_for_by_what_it_is(demo, tmp_path):
    planned = plan(demo, tmp_path, only=("MLM", "MLM+TLM", "full"))

    assert [item["trial"]["variant"] for item in planned] == ["full", "-XLCO", "-TLM-XLCO"]
    assert [item["trial"]["what"] for item in planned][-1] == "MLM only"


@pytest.mark.item("A27")
def test_the_papers_ablations_are_switches_of_one_config(demo, tmp_path):
    found = {item["trial"]["variant"]: PretrainingConfig.parse(item["pretraining"]) for item in plan(demo, tmp_path)}

    on = {name: (c.objectives.mlm, c.objectives.tlm, c.objectives.xlco) for name, c in found.items()}
    assert on["full"] == on["-Universal"] == (1, 1, 1)
    assert on["-XLCO"] == (1, 1, 0) and on["-TLM-XLCO"] == (1, 0, 0)
    assert all(on[name] == (1, 0, 1) for name in ("-TLM", "-TLM:universal", "-TLM-Mixup", "-TLM-Momentum"))
    assert found["full"].contrast.layer == found["-TLM:universal"].contrast.layer == 2
    assert {found[name].contrast.layer for name in ("-TLM", "-TLM-Mixup", "-TLM-Momentum", "-Universal")} == {"last"}
    assert found["-TLM-Mixup"].contrast.mixup == found["-TLM-Momentum"].contrast.momentum == 0
    assert found["full"] == demo.pretraining


def test_forty_trials_fit_into_one_argument_of_a_process(demo, tmp_path):
    planned = plan(demo, tmp_path, seeds=(1, 2, 3, 4, 5))

    assert len(planned) == 40 and len(json.dumps(planned)) < 64 * 1024


@pytest.mark.parametrize(
    ("text", "only", "said"),
    [
        ("a: {}", ("b",), "has no variant 'b'. Choose from a"),
        ("a: {objectives: {xlc: 0}}", (), "variant a: pretraining.objectives.xlc: unknown name; known are"),
        ("a: {objectives: {mlm: 0, tlm: 0, xlco: 0}}", (), "variant a: pretraining.objectives: at least one of"),
        ("a: {contrast: {layer: first}}", (), "variant a: pretraining.contrast.layer: Input should be a valid integer"),
        ("a: {contrast: 3}", (), "variant a: pretraining.contrast: Input should be"),
        ("a: {}\nb: {what: the same}", (), "are the same with this config. Choose one"),
        ("a/b: {}", (), "variant 'a/b'. Use letters, digits and"),
        ("", (), "expected a mapping from names to variants"),
    ],
)
def test_a_bad_variant_is_refused_in_one_line(demo, tmp_path, text, only, said):
    with pytest.raises(ConfigError) as refused:
        plan(demo, tmp_path, text, only)

    assert said in str(refused.value) and "variants.yaml" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("seeds", ["1,1", "", "one", "-1", "1.5"])
def test_bad_seeds_are_refused(seeds):
    with pytest.raises(ConfigError, match="Give different whole numbers, such as 1,2,3"):
        trials.read_seeds(seeds)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> subprocess.CompletedProcess:
    """Run an ablation with a seed that is not the config's; one variant diverges."""
    base = tmp_path_factory.mktemp("ablation")
    config, store, variants = write_config(base), base / "store", base / "variants.yaml"
    variants.write_text(
        yaml.safe_dump(
            {"full": {"what": "everything"}, "broken": {"optimization": {"learning_rate": 1e30}}}, sort_keys=False
        )
    )
    arguments = ["ablate", str(config), "--variants", str(variants), "--seeds", "2", "--store", str(store)]
    arguments += ["--set", "pretraining.optimization.steps=60", "--set", "finetuning.optimization.steps=3"]
    return infoxlm(*arguments)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_ablation_ends_in_one_table_although_a_variant_fails(finished):
    table = finished.stdout[finished.stdout.index("# toy-ablations") :]

    assert finished.returncode == 5, finished.stderr[-3000:]
    assert "pretrain full seed 2: step" in finished.stdout
    assert re.search(r"^\| full +\| \d+\.\d", table, re.MULTILINE)
    assert re.search(r"^\| broken +\| –", table, re.MULTILINE)
    assert "Unfinished trials** are not included: broken seed 2" in table
    assert "TrainingDiverged: pretrain broken seed 2" in finished.stderr.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_trials_are_one_ablation_in_mlflow_with_their_seed(finished, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    store = Path(finished.args[finished.args.index("--store") + 1])
    client, parent, nested = runs_of(store)
    children = {run.data.tags["variant"]: run for run in nested}
    full, broken = children["full"], children["broken"]

    assert (parent.info.run_name, parent.info.status) == ("toy-ablations", "FAILED")
    assert len(nested) == 2 and {run.data.tags["seed"] for run in nested} == {"2"}
    assert {run.data.tags["mlflow.parentRunId"] for run in nested} == {parent.info.run_id}
    assert (full.info.status, broken.info.status) == ("FINISHED", "FAILED")
    params = full.data.params
    assert params["pretraining.seed"] == params["finetuning.seed"] == "2" and params["evaluation.seed"] == "1"
    assert broken.data.params["pretraining.optimization.learning_rate"] == "1e+30"
    curve = client.get_metric_history(full.info.run_id, "loss/xlco")
    assert [point.step for point in curve] == list(range(10, 61, 10))
    compared = json.loads((only(store, "comparison/*") / "comparison.json").read_text())
    assert parent.data.metrics["full/retrieval/served"] == pytest.approx(
        compared["variants"]["full"]["metrics"]["retrieval/served"]["mean"]
    )
    assert len(list(store.glob("corpus/*/manifest.json"))) == len(list(store.glob("shards/*/manifest.json"))) == 1
