"""Rows of the comparison of systems at toy size, and their learners and exports."""

from pathlib import Path

import yaml

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.shards import Shards
from infoxlm_core.systems.table import SYSTEMS
from infoxlm_core.systems.text_learner import TextLearner
from pipelines.trials import merge
from tests.toys.pretraining import tiny_config

CONFIGS = Path(__file__).parents[2] / "configs"
COMPARED = yaml.safe_load((CONFIGS / "systems.yaml").read_text())
PUBLISHED = yaml.safe_load((CONFIGS / "published-systems.yaml").read_text())
ROWS = COMPARED | PUBLISHED
TINY = tiny_config(model={"ffn": 64}).model_dump()  # 4 * hidden, as in XLM
SIZES = {
    "model": {"start": None, **{name: TINY["model"][name] for name in ("layers", "hidden", "ffn", "heads",
                                                                       "max_tokens")}},
    "batches": TINY["batches"],
    "optimization": {name: TINY["optimization"][name] for name in ("steps", "warmup_steps", "learning_rate")},
}  # fmt: skip


def learner_of(config: PretrainingConfig, shards: Shards) -> TextLearner:
    system = SYSTEMS[config.system]
    return system.create_learner(config, system.build(config, shards), shards)


def export(learner: TextLearner, shards: Shards, directory: Path) -> None:
    SYSTEMS[learner.config.system].export(learner.module, learner.config, shards, directory)


def config_of(row: str, **changes) -> PretrainingConfig:
    """Return a row of the comparison on the tiny config; a row with published sizes gets toy sizes."""
    settings = {name: value for name, value in ROWS[row].items() if name != "what"}
    values = merge(TINY, settings)
    return PretrainingConfig.parse(merge(merge(values, SIZES) if row in PUBLISHED else values, changes))
