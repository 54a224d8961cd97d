"""Typed configs, one class per stage. Unknown names are errors, values are validated, and each field's docstring
gives its unit.

Their names are those of the sections of a run's YAML file (`run_file.py`) and of the pipeline's parameters.
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
