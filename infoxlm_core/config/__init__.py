"""Typed configs, one class for each stage of the pipeline.

Unknown field names are errors, and values are validated. The docstring under a field gives its meaning and unit. The
YAML file of a run (`run_file.py`) and the parameters of the pipeline use the same names.
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
