"""Typed configs, one class for each pipeline stage.

Unknown field names are errors, and values are validated. The docstring under a field gives its meaning and unit. A
run's YAML file (`run_file.py`) and the pipeline parameters use the same names.
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
from infoxlm_core.config.tasks import (
    AlignedSetConfig,
    EvaluationConfig,
    RecipeConfig,
    RegistrationConfig,
    SelectionConfig,
)
from infoxlm_core.config.training import CheckpointsConfig, GuardConfig, OptimizationConfig
