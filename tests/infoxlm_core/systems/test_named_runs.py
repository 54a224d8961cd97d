"""The paper's runs by name: every number is that of its tables; and where we differ from the released code."""

import json
import re
from functools import reduce
from pathlib import Path

import pytest

from infoxlm_core import run_file
from infoxlm_core.config import StageConfig
from infoxlm_core.errors import ConfigError

ROOT = Path(__file__).parents[3]
COMMON = {  # InfoXLM's paper where it says so, else its authors' code
    "preparation.monolingual_from_pairs": False,
    "tokenization.vocabulary_size": 250_002,
    "pretraining.system": "infoxlm",
    "pretraining.model.max_tokens": 512,
    "pretraining.model.dropout": 0.0,
    "pretraining.objectives.mlm": 1.0,
    "pretraining.objectives.tlm": 1.0,
    "pretraining.objectives.xlco": 1.0,
    "pretraining.objectives.weighting": "mean",
    "pretraining.objectives.mask_ratio": 0.15,
    "pretraining.contrast.queue_size": 131_072,
    "pretraining.contrast.momentum": 0.999,
    "pretraining.contrast.momentum_schedule": "constant",
    "pretraining.contrast.temperature": 0.25,
    "pretraining.contrast.normalise": False,
    "pretraining.contrast.pooling": "cls",
    "pretraining.contrast.mixup": 1.0,
    "pretraining.batches.global_batch_size": 2048,
    "pretraining.batches.block_tokens": 512,
    "pretraining.batches.alpha": 0.7,
    "pretraining.optimization.warmup_steps": 10_000,
    "pretraining.optimization.schedule": "linear",
    "pretraining.optimization.betas": (0.9, 0.98),
    "pretraining.optimization.epsilon": 1e-6,
    "pretraining.optimization.weight_decay": 0.01,
    "pretraining.optimization.decay": "all",
    "pretraining.optimization.clip_norm": 1.0,
    "pretraining.checkpoints.every": 5_000,
    "pretraining.seed": 1,
    "finetuning.batch_size": 32,
    "finetuning.max_tokens": 256,
    "finetuning.dropout": 0.1,
    "finetuning.head_dropout": 0.1,
    "finetuning.optimization.steps": 10 * -(-392_702 // 32),
    "finetuning.optimization.weight_decay": 0.0,
}
BASE = {
    "pretraining.model.start": "FacebookAI/xlm-roberta-base",
    "tokenization.model": "FacebookAI/xlm-roberta-base",
    "pretraining.model.layers": 12,
    "pretraining.model.hidden": 768,
    "pretraining.model.ffn": 3072,
    "pretraining.model.heads": 12,
    "pretraining.contrast.layer": 8,
    "pretraining.optimization.steps": 150_000,
    "pretraining.optimization.learning_rate": 2e-4,
    "finetuning.optimization.learning_rate": 7e-6,
    "finetuning.optimization.warmup_steps": 12_500,
}
LARGE = {
    "pretraining.model.start": "FacebookAI/xlm-roberta-large",
    "tokenization.model": "FacebookAI/xlm-roberta-large",
    "pretraining.model.layers": 24,
    "pretraining.model.hidden": 1024,
    "pretraining.model.ffn": 4096,
    "pretraining.model.heads": 16,
    "pretraining.contrast.layer": 12,
    "pretraining.optimization.steps": 200_000,
    "pretraining.optimization.learning_rate": 1e-4,
    "finetuning.optimization.learning_rate": 5e-6,
    "finetuning.optimization.warmup_steps": 5_000,
}
RUNS = {"base": BASE, "large": LARGE, "base15": BASE | {"pretraining.optimization.steps": 100_000}}


def value_of(config: StageConfig, field: str) -> object:
    return reduce(getattr, field.split("."), config)


@pytest.mark.parametrize("name", RUNS)
def test_every_number_of_a_named_run_is_the_papers(name):
    run = run_file.load(ROOT / f"configs/{name}.yaml")

    assert {field: value_of(run, field) for field in COMMON | RUNS[name]} == COMMON | RUNS[name]


def test_languages_and_pairs_are_those_of_the_papers_tables():
    languages = {name: run_file.load(ROOT / f"configs/{name}.yaml").preparation.languages for name in RUNS}

    assert " ".join(languages["base15"]) == "en ar bg de el es fr hi ru sw th tr ur vi zh"
    assert len(languages["base"]) == 87 and languages["base"] == languages["large"]
    assert set(languages["base15"]) <= set(languages["base"])


def rows() -> list[tuple[str, str, str]]:
    """(field, released value, our value) of every row of the table that names a config field."""
    text = (ROOT / "docs/paper-and-release.md").read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [(row[1].strip("`"), row[3], row[4]) for row in cells if row[1].startswith("`")]


def accepts(field: str, value: str) -> bool:
    """Whether a field of a run takes a value as written in YAML."""
    try:
        run_file.load(ROOT / "configs/base.yaml", (f"{field}={value}",))
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(("field", "released", "ours"), rows(), ids=[field for field, _, _ in rows()])
def test_every_difference_from_the_release_names_a_field_and_values_that_exist(field, released, ours):
    default = value_of(run_file.load(ROOT / "configs/base.yaml"), field)

    (value,) = re.findall(r"`([^`]+)`", ours)
    assert run_file.yaml.safe_load(value) == default
    for value in re.findall(r"`([^`]+)`", released):
        assert accepts(field, value), value
    assert not accepts(field, "no-such-value")


def test_the_table_covers_every_switch_of_contrast():
    named = {field.rpartition(".")[2] for field, _, _ in rows()}

    assert len(rows()) >= 20
    assert {"weighting", "masking", "enqueue", "temperature", "momentum", "partner", "cross", "corruption"} <= named


def test_the_overrides_that_reproduce_the_release_are_those_of_the_table():
    text = (ROOT / "docs/paper-and-release.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    overrides = run_file.yaml.safe_load(block)["pretraining"]
    said = {f"pretraining.{section}.{name}": value for section, row in overrides.items() for name, value in row.items()}
    differing = {
        field: run_file.yaml.safe_load(values[0])
        for field, released, ours in rows()
        if (values := re.findall(r"`([^`]+)`", released)) and values[0] != ours.strip("`")
    }

    assert {field: value for field, value in said.items() if "micro_batch_size" not in field} == differing
    run = run_file.load(ROOT / "configs/base.yaml", tuple(f"{f}={json.dumps(v)}" for f, v in said.items()))
    assert run.pretraining.contrast.momentum == 0.9999
