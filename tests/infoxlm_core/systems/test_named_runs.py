"""The paper's runs by name: their numbers are those of its tables, and the differences from the released code exist."""

import json
import re
from functools import reduce
from pathlib import Path

import pytest

from infoxlm_core import run_file
from infoxlm_core.config import StageConfig
from infoxlm_core.errors import ConfigError

ROOT = Path(__file__).parents[3]
DIFFERENCES = ROOT / "docs/paper-and-release.md"
# InfoXLM's paper where it has a number, else its authors' code
COMMON = """
preparation: {monolingual_from_pairs: false}
tokenization: {vocabulary_size: 250002}
pretraining:
  system: infoxlm
  model: {max_tokens: 512, dropout: 0.0}
  objectives: {mlm: 1.0, tlm: 1.0, xlco: 1.0, weighting: mean, mask_ratio: 0.15}
  contrast: {queue_size: 131072, momentum: 0.999, momentum_schedule: constant, temperature: 0.25, normalise: false,
             pooling: cls, mixup: 1.0}
  batches: {global_batch_size: 2048, block_tokens: 512, alpha: 0.7}
  optimization: {warmup_steps: 10000, schedule: linear, betas: [0.9, 0.98], epsilon: 1.0e-6, weight_decay: 0.01,
                 decay: all, clip_norm: 1.0}
  checkpoints: {every: 5000}
  seed: 1
finetuning:
  {batch_size: 32, max_tokens: 256, dropout: 0.1, head_dropout: 0.1, optimization: {steps: 122720, weight_decay: 0.0}}
"""  # ten epochs of the 392,702 pairs of XNLI
BASE = """
tokenization: {model: FacebookAI/xlm-roberta-base}
pretraining:
  model: {start: FacebookAI/xlm-roberta-base, layers: 12, hidden: 768, ffn: 3072, heads: 12}
  contrast: {layer: 8}
  optimization: {steps: 150000, learning_rate: 2.0e-4}
finetuning: {optimization: {learning_rate: 7.0e-6, warmup_steps: 12500}}
"""
LARGE = """
tokenization: {model: FacebookAI/xlm-roberta-large}
pretraining:
  model: {start: FacebookAI/xlm-roberta-large, layers: 24, hidden: 1024, ffn: 4096, heads: 16}
  contrast: {layer: 12}
  optimization: {steps: 200000, learning_rate: 1.0e-4}
finetuning: {optimization: {learning_rate: 5.0e-6, warmup_steps: 5000}}
"""
RUNS = {"base": BASE, "large": LARGE, "base15": BASE.replace("150000", "100000")}


def select_fields(values: dict, expected: dict) -> dict:
    """Return the fields of nested values that `expected` has."""
    selected = {}
    for name, expected_value in expected.items():
        is_section = isinstance(expected_value, dict)
        selected[name] = select_fields(values[name], expected_value) if is_section else values[name]
    return selected


@pytest.mark.parametrize("section", ["common", "own"])
@pytest.mark.parametrize("name", RUNS)
def test_numbers_of_a_named_run_are_those_of_the_paper(name, section):
    expected = run_file.yaml.safe_load(COMMON if section == "common" else RUNS[name])

    run = json.loads(run_file.load(ROOT / f"configs/{name}.yaml").model_dump_json())

    assert select_fields(run, expected) == expected


def test_languages_and_pairs_are_those_of_the_papers_tables():
    languages = {name: run_file.load(ROOT / f"configs/{name}.yaml").preparation.languages for name in RUNS}

    assert " ".join(languages["base15"]) == "en ar bg de el es fr hi ru sw th tr ur vi zh"
    assert len(languages["base"]) == 87
    assert languages["base"] == languages["large"]
    assert set(languages["base15"]) <= set(languages["base"])


def read_differences() -> list[tuple[str, str, str]]:
    """Return (field, released value, our value) of every row of the table that names a config field."""
    rows = []
    for line in DIFFERENCES.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[1].startswith("`"):
            rows.append((cells[1].strip("`"), cells[3], cells[4]))
    return rows


def value_of(config: StageConfig, field: str) -> object:
    return reduce(getattr, field.split("."), config)


def load_base(**overrides: object) -> StageConfig:
    """Return the run `base` with some fields changed."""
    return run_file.load(ROOT / "configs/base.yaml", tuple(f"{field}={value}" for field, value in overrides.items()))


@pytest.mark.parametrize(("field", "released", "ours"), read_differences())
def test_every_difference_from_the_release_names_a_field_and_values_that_exist(field, released, ours):
    [our_value] = re.findall(r"`([^`]+)`", ours)
    assert run_file.yaml.safe_load(our_value) == value_of(load_base(), field)
    for value in re.findall(r"`([^`]+)`", released):
        load_base(**{field: value})
    with pytest.raises(ConfigError):
        load_base(**{field: "no-such-value"})


def test_overrides_that_reproduce_the_release_are_those_of_the_table():
    [block] = re.findall(r"```yaml\n(.*?)```", DIFFERENCES.read_text(encoding="utf-8"), re.DOTALL)
    overrides = {}
    for section, fields in run_file.yaml.safe_load(block)["pretraining"].items():
        overrides |= {f"pretraining.{section}.{name}": value for name, value in fields.items()}
    differences = {}
    for field, released, ours in read_differences():
        values = re.findall(r"`([^`]+)`", released)
        if values and values[0] != ours.strip("`"):
            differences[field] = run_file.yaml.safe_load(values[0])

    run = load_base(**{field: json.dumps(value) for field, value in overrides.items()})

    assert run.pretraining.contrast.momentum == 0.9999
    del overrides["pretraining.batches.micro_batch_size"]  # the table has only what changes results
    assert overrides == differences
