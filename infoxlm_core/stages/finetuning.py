"""Stage: encoder + examples of a task -> a model of the task, the one that a rule of selection chooses.

All tasks are the same training: every example once an epoch, an evaluation on the development sets every so often. What
the examples are, and how a model is scored on the development sets, says the task.
"""

import hashlib
import json
import logging
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
    """Fine-tune an encoder in Hugging Face format on a task; every worker calls this.

    `corpus` is the prepared one whose labelled set is used if a config of classification names no data. `output` gets
    the model, its tokenizer, `selection.json`, `metrics.jsonl` and, of classification, `test.parquet`; `run` gets
    checkpoints: the same directory continues the same run. `track` and `remote` are those of `pretrain`. Returns the
    last step's figures, `steps`, and `examples`, how many there were to learn from.

    Raises:
        InputError: data or encoder are not usable, or the rule of selection lacks development sets.
        CorpusTooSmall: no text to train on, or fewer than two labels.
    """
    task = read_training(config, encoder, corpus)
    selection.check(config.selection.rule, task.source, task.development)
    module = task_models.create(encoder, task.head, task.labels, config.dropout, task.head_dropout, config.seed)
    optimization = schedule(config, len(task.examples))
    best = BestCheckpoints(run, config.selection, task.source)
    fingerprint = fingerprint_of(config, encoder, task)
    learned, all_words = active_vocabulary.limit(module.to(distributed.device()), task, optimization.weight_decay)
    learner = TaskLearner(config, module, learned, optimization.steps, best)
    logger.info("fine-tuning on %d examples, %d steps", len(task.examples), optimization.steps)
    with run_directory(run, fingerprint, config.checkpoints, track, remote) as (checkpoints, tracker):
        found = loop.train(learner, optimization, checkpoints, tracker, config.log_every, learner.observe)
        distributed.on_first(lambda: export(learner, encoder, run, output, all_words))
    return found | {"steps": optimization.steps, "examples": len(task.examples)}


def read_training(config: RecipeConfig, encoder: Path, corpus: Path | None) -> Training:
    """Read and tokenise what a config names."""
    return task_of(config).training(config, encoder, corpus)


def fingerprint_of(config: RecipeConfig, encoder: Path, learned: Training) -> Fingerprint:
    """What a checkpoint belongs to: the content of data, wherever they lie, and no setting that only tests read."""
    settings, data = task_of(config).training_part(config)
    by_role = {role: manifests.digest(digest_inputs(paths)) for role, paths in data.items()}  # development sets, too
    inputs = {"encoder": pretrained.digest_of(encoder), "examples": digest_of(learned), **by_role}
    return Fingerprint.of(settings, manifests.FINETUNING, inputs)


def digest_of(task: Training) -> str:
    """What a resumed run must find again: training examples, their answers, the languages of its development sets."""
    found = hashlib.sha256(json.dumps([task.head.name, task.labels, task.development]).encode())
    for array in (task.examples.ids, task.examples.types, task.examples.lengths, task.targets):
        found.update(np.ascontiguousarray(array).data)  # as it is stored: gigabytes are not copied
    return f"sha256:{found.hexdigest()}"


def schedule(config: RecipeConfig, examples: int) -> OptimizationConfig:
    """Steps and warm-up: as they are, or of so many epochs."""
    if config.epochs is None:
        return config.optimization
    steps = -(-config.epochs * examples // config.batch_size)
    warmup = min(int(config.warmup_share * steps), steps - 1)
    return config.optimization.model_copy(update={"steps": steps, "warmup_steps": warmup})


def export(
    learner: TaskLearner, encoder: Path, run: Path, output: Path, all_words: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Write the model, or models, that the rule chose; the module then holds the last of them."""
    config, module, best = learner.config.selection, learner.module, learner.best
    evaluations = best.evaluations()
    chosen = best.choose(evaluations, learner.steps)
    for step in dict.fromkeys(chosen.values()):
        directory = selection.directory_of(output, chosen, step)
        if config.rule != "last":
            best.load(module, step)
        with all_words():
            task_models.export(module, encoder, directory)
        logger.info("exported the model after step %d to %s", step, directory)
    selection.write(output, config.rule, evaluations, chosen)
    learner.task.write_beside(output)
    export_curves(run, output)
