"""Settings with which a classifier learns the table of the fixture `data` in 60 steps."""

from pathlib import Path

from infoxlm_core.tasks.classification.settings import ClassificationConfig


def config(data: Path, **changes) -> ClassificationConfig:
    optimization = {"steps": 60, "learning_rate": 0.01, "warmup_steps": 5, "weight_decay": 0.0}
    return ClassificationConfig.parse(
        {"data": str(data), "max_tokens": 30, "dropout": 0.0, "optimization": optimization,
         "checkpoints": {"every": 20}, "log_every": 1} | changes
    )  # fmt: skip
