"""Stage finetune: an encoder and a task's examples -> the model that the selection rule chooses.

All tasks share a training loop. It uses every example once per epoch and regularly evaluates the model on the
development sets. The task provides the examples and the scores.
"""

import hashlib
import json
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from infoxlm_core import manifests
from infoxlm_core.config import OptimizationConfig, RecipeConfig
from infoxlm_core.model import task_models
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.tasks import task_of
from infoxlm_core.training import distributed, loop
from infoxlm_core.training.checkpoints import RemoteCheckpoints
from infoxlm_core.training.finetuning import active_vocabulary, selection
from infoxlm_core.training.finetuning.best_checkpoints import BestCheckpoints
from infoxlm_core.training.finetuning.task_learner import TaskLearner, Training
from infoxlm_core.training.fingerprint import Fingerprint, digest_inputs
from infoxlm_core.training.run import export_curves, run_directory
from infoxlm_core.training.tracker import FileTracker, Tracker

logger = logging.getLogger(__name__)


def finetune(
    config: RecipeConfig,
    encoder: Path,
    corpus: Path | None,
    output: Path,
    run: Path,
    track: Callable[[Path], Tracker] = FileTracker,
    remote: RemoteCheckpoints | None = None,
) -> dict[str, Any]:
    """Fine-tune an encoder in Hugging Face format on a task. Every worker calls this function.

    Args:
        config: task settings.
        encoder: a Hugging Face directory.
        corpus: a prepared corpus with labelled text, for a config without data paths.
        output: directory for the model, its tokenizer, `selection.json`, `metrics.jsonl` and, for classification,
            `test.parquet`.
        run: directory for checkpoints. A run resumes if its directory is reused.
        track: factory for the tracker, given the path of the curves.
        remote: remote checkpoint storage if the machines share no disk.

    Returns:
        The metrics of the last step, and the numbers of `steps` and training `examples`.

    Raises:
        InputError: the data or encoder is unusable, or the selection rule lacks development sets.
        CorpusTooSmall: there is no training text, or fewer than two labels.
    """
    with distributed.sharing_errors():  # the files of one machine may be damaged or unavailable
        training = read_training(config, encoder, corpus)
        selection.check_dev_languages(config.selection.rule, training.source_language, training.dev_languages)
        module = task_models.create(
            encoder, training.head, training.labels, config.dropout, training.head_dropout, config.seed
        ).to(distributed.device())
        fingerprint = _make_fingerprint(config, encoder, training)
    optimization = choose_steps(config, len(training.examples))
    best_checkpoints = BestCheckpoints(run, config.selection, training.source_language)
    # To save memory and time, train only the embeddings of tokens that occur in the examples.
    limited_training, restore_embeddings = active_vocabulary.limit_words(module, training, optimization.weight_decay)
    learner = TaskLearner(config, module, limited_training, optimization.steps, best_checkpoints)
    logger.info("fine-tuning on %d examples, %d steps", len(training.examples), optimization.steps)
    with run_directory(run, fingerprint, config.checkpoints, track, remote) as (checkpoints, tracker):
        metrics = loop.train(learner, optimization, checkpoints, tracker, config.log_every, learner.observe)
        distributed.on_first(lambda: _export(learner, encoder, run, output, restore_embeddings))
    return metrics | {"steps": optimization.steps, "examples": len(training.examples)}


def read_training(config: RecipeConfig, encoder: Path, corpus: Path | None) -> Training:
    """Read and tokenise the training examples of a task."""
    return task_of(config).read_training(config, encoder, corpus)


def choose_steps(config: RecipeConfig, num_examples: int) -> OptimizationConfig:
    """Return the optimization settings. `epochs`, if set, determines the number of steps and warm-up steps."""
    if config.epochs is None:
        return config.optimization
    steps = math.ceil(config.epochs * num_examples / config.batch_size)
    warmup_steps = min(int(config.warmup_share * steps), steps - 1)  # at least one step follows the warm-up
    return config.optimization.model_copy(update={"steps": steps, "warmup_steps": warmup_steps})


def _make_fingerprint(config: RecipeConfig, encoder: Path, training: Training) -> Fingerprint:
    """Return the fingerprint of the settings and data that must not change when a run resumes."""
    settings, data = task_of(config).select_training_inputs(config)
    # The fingerprint includes development sets, because they decide which step is exported.
    inputs = {"encoder": pretrained.digest_weights(encoder), "examples": digest_training(training)}
    for role, paths in data.items():
        inputs[role] = manifests.digest(digest_inputs(paths))
    return Fingerprint.of(settings, manifests.FINETUNING, inputs)


def digest_training(training: Training) -> str:
    """Return a digest of the training examples, their targets and the development languages."""
    digest = hashlib.sha256(json.dumps([training.head.name, training.labels, training.dev_languages]).encode())
    examples = training.examples
    for array in (examples.ids, examples.types, examples.lengths, training.targets):
        digest.update(np.ascontiguousarray(array).data)  # tobytes() would copy gigabytes
    return f"sha256:{digest.hexdigest()}"


def _export(
    learner: TaskLearner,
    encoder: Path,
    run: Path,
    output: Path,
    restore_embeddings: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Write the models that the selection rule chooses, with their development scores.

    Loading the chosen weights overwrites the learner's module, so training cannot continue afterwards.
    `restore_embeddings` returns a context in which the module has the embeddings of all tokens.
    """
    rule = learner.config.selection.rule
    evaluations = learner.best_checkpoints.read_evaluations()
    chosen_steps = learner.best_checkpoints.choose(evaluations, learner.steps)
    for step in dict.fromkeys(chosen_steps.values()):  # several languages may share a step
        directory = selection.directory_of(output, chosen_steps, step)
        if rule != "last":  # with "last", the module already holds the chosen weights
            learner.best_checkpoints.load(learner.module, step)
        with restore_embeddings():
            task_models.export(learner.module, encoder, directory)
        logger.info("exported the model after step %d to %s", step, directory)
    selection.write(output, rule, evaluations, chosen_steps)
    learner.task.write_extra_files(output)
    export_curves(run, output)
