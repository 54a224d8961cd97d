"""The typed configs, one class a stage. Names are strict, values are checked, the unit stands under each field.

They are the sections of a run's YAML file (`run_file.py`) and the pipeline's parameters, name for name.
"""

from infoxlm_core.config.base import StageConfig
from infoxlm_core.config.corpora import CleaningConfig, CorpusSource, PreparationConfig, TokenizationConfig
from infoxlm_core.config.pretraining import (
    BatchesConfig,
    ContrastConfig,
    ModelConfig,
    ObjectivesConfig,
    PretrainingConfig,
    ProbeConfig,
)
from infoxlm_core.config.tasks import EvaluationConfig, RecipeConfig, RegistrationConfig, SelectionConfig
from infoxlm_core.config.training import CheckpointsConfig, GuardConfig, OptimizationConfig
