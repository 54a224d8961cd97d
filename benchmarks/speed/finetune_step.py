"""Fine-tune a classifier of sentence pairs: our step beside transformers' Trainer.

Lengths follow the percentiles of XNLI's English development set in XLM-R tokens: on average 25.4 tokens per premise
and 12.5 per hypothesis. A batch of 32 random pairs contains 39 % padding. The text comes from message catalogs.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding

from benchmarks.speed import corpus, inputs, ours, peers, trainer
from benchmarks.speed.harness import OURS, Case, Round, compute_differences, gradient_of, measure, require_equal
from infoxlm_core.data.examples import from_lists
from infoxlm_core.data.shards import open_shards
from infoxlm_core.data.vocabulary import BOS, EOS
from infoxlm_core.model import task_models
from infoxlm_core.model.encoder import Encoder, EncoderSize, initialise
from infoxlm_core.model.huggingface import pretrained, tokenizers
from infoxlm_core.tasks.classification.task import HEAD, ClassificationConfig
from infoxlm_core.training.finetuning import active_vocabulary
from infoxlm_core.training.finetuning.best_checkpoints import BestCheckpoints
from infoxlm_core.training.finetuning.task_learner import TaskLearner, Training

BATCH = 32
PAIRS = 6_400  # a multiple of BATCH
LABELS = ("contradiction", "entailment", "neutral")
PERCENTS = (0, 1, 5, 25, 50, 75, 95, 99, 100)
PREMISE = (5, 6, 9, 16, 24, 34, 46, 54, 62)  # lengths in tokens at these percentiles
HYPOTHESIS = (4, 5, 6, 9, 12, 15, 21, 26, 31)
CONFIG = ClassificationConfig.parse({
    "batch_size": BATCH, "micro_batch_size": BATCH, "dropout": 0.0, "head_dropout": 0.0,
    "optimization": {"warmup_steps": 0, "learning_rate": 1e-5},
})  # fmt: skip


def run(quick: bool) -> list[Case]:
    """Measure vocabularies of 32,000 and 250,002 words."""
    path = corpus.make_shards()
    text = np.concatenate([table.read_text().tokens for table in open_shards(path).mono["en"]])
    text = text[text != EOS].astype(np.int64)
    rounds, steps = (1, 2) if quick else (7, 4)
    vocabularies = ["32k"] if quick else list(inputs.VOCABULARIES)
    return [compare_steps(text, path / "tokenizer", name, rounds, steps) for name in vocabularies]


def compare_steps(
    text: np.ndarray, tokenizer: Path, vocabulary: str, rounds: int, steps: int, size: dict[str, int] | None = None
) -> Case:
    """Check that our step and the Trainer have equal losses and gradients, then time `steps` steps per round."""
    words = inputs.VOCABULARIES[vocabulary]
    task = make_task(text)
    model, peer = make_models(size or {}, words, tokenizer)
    lengths = task.examples.lengths.reshape(-1, BATCH)
    padded_lengths = lengths.max(axis=1)  # length of all pairs in a batch after padding
    padding = float(1 - lengths.sum() / (BATCH * padded_lengths).sum())
    name = f"finetune_step, {vocabulary}"
    case = Case(name, {"steps a round": steps, "pairs a step": BATCH, "words": words, "padding": padding})
    case.about = {OURS: "TaskLearner.batches and train_step, packed; last layer on <s> only, words that occur"}
    case.equality["Trainer"] = require_equal(name, "Trainer", compare_gradients(model, task, peer))
    # The Trainer trains all words, so compare gradients before limiting our vocabulary to the words that occur.
    limited_task, _ = active_vocabulary.limit_words(model, task, CONFIG.optimization.weight_decay)
    rounds_of_ours = ours.TrainingRounds(make_learner(model, limited_task), CONFIG.optimization, steps)
    variants = {OURS: rounds_of_ours.run, **make_trainers(case, peer, task, tokenizer, steps)}
    return measure(case, variants, rounds)


def make_learner(model: task_models.TaskModel, task: Training) -> TaskLearner:
    """Make our learner. It takes `BestCheckpoints`, but the benchmark saves none."""
    return TaskLearner(CONFIG, model, task, CONFIG.optimization.steps, BestCheckpoints(Path(), CONFIG.selection, "en"))


def make_trainers(case: Case, peer: nn.Module, task: Training, tokenizer: Path, steps: int) -> dict[str, Round]:
    """Make variants of the Trainer with random batches and with batches of similar lengths."""
    rows = []
    for index, label in enumerate(task.targets):
        rows.append({"input_ids": task.examples.take([index]).ids.tolist(), "labels": int(label)})
    collate = DataCollatorWithPadding(tokenizers.load_fast(tokenizer))
    variants: dict[str, Round] = {}
    for name, sampling in (("Trainer", "random"), ("Trainer, group_by_length", "group_by_length")):
        # No weight decay, as in CONFIG; AdamW's default is 0.01.
        variants[name] = trainer.TrainerRounds(peer, rows, collate, sampling, BATCH, steps, weight_decay=0.0).run
        case.about[name] = (
            f"transformers Trainer, {sampling}, padded to the longest, sdpa, dropout 0, fused AdamW; text "
            "tokenized before"
        )
    return variants


def make_task(text: np.ndarray) -> Training:
    """Make sentence pairs for classification from consecutive tokens of the text, with random labels."""
    rng = np.random.default_rng(inputs.SEED)
    premise_lengths = draw_lengths(rng, PAIRS, PREMISE)
    hypothesis_lengths = draw_lengths(rng, PAIRS, HYPOTHESIS)
    text = np.resize(text, int(premise_lengths.sum() + hypothesis_lengths.sum()))  # repeats the text if it is short
    rows = []
    start = 0
    for premise_length, hypothesis_length in zip(premise_lengths, hypothesis_lengths, strict=True):
        premise_end = start + premise_length
        end = premise_end + hypothesis_length
        premise = text[start:premise_end].tolist()
        hypothesis = text[premise_end:end].tolist()
        rows.append([BOS, *premise, EOS, EOS, *hypothesis, EOS])
        start = end
    return Training(HEAD, from_lists(rows), rng.integers(0, len(LABELS), PAIRS), LABELS)


def draw_lengths(rng: np.random.Generator, count: int, percentiles: tuple[int, ...]) -> np.ndarray:
    """Draw lengths from the distribution with the given values at `PERCENTS`."""
    return np.interp(100 * rng.random(count), PERCENTS, percentiles).round().astype(int)


def make_models(size: dict[str, int], words: int, tokenizer: Path) -> tuple[task_models.SequenceModel, nn.Module]:
    """Make our classifier with noise on its weights, and Hugging Face's classifier with the same weights."""
    id_by_label = {label: number for number, label in enumerate(LABELS)}
    shape = EncoderSize.from_config(inputs.make_config(size).model, words)
    config = pretrained.make_hugging_face_config(shape, id2label=dict(enumerate(LABELS)), label2id=id_by_label)
    model = task_models.SequenceModel(Encoder(shape), config, HEAD)
    initialise(model, inputs.SEED)
    inputs.add_noise(model, inputs.SEED)
    with tempfile.TemporaryDirectory() as directory:
        task_models.export(model, tokenizer, Path(directory))
        peer = AutoModelForSequenceClassification.from_pretrained(
            directory, attn_implementation="sdpa", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
    peer.get_parameter(pretrained.TYPE_ROW).requires_grad_(False)  # our position embeddings include this row
    return model, peer


def compare_gradients(model: task_models.SequenceModel, task: Training, peer: nn.Module) -> dict[str, float]:
    """Compute the relative differences of loss and gradient on one batch. Clear both gradients afterwards."""
    learner = make_learner(model, task)
    (batch,) = learner.batches(0)
    loss, _ = learner.losses(batch, {"classification": 1 / BATCH})  # the mean, as in transformers
    loss.backward()
    ids = inputs.pad(batch.ids, batch.lengths)
    mask = inputs.pad(torch.ones_like(batch.ids), batch.lengths, 0)
    peer_loss = peer(input_ids=ids, attention_mask=mask, labels=batch.targets).loss
    peer_loss.backward()
    gradient = {}
    for name, parameter in model.named_parameters():
        gradient[pretrained.to_hugging_face_name(name, model.name_rules)] = gradient_of(parameter)
    peer_gradient = {name: p.grad for name, p in peer.named_parameters() if p.grad is not None}
    relative = compute_differences(
        float(loss.detach()), gradient, float(peer_loss.detach()), peer_gradient, ignored=peers.ZERO_GRADIENTS
    )
    model.zero_grad(set_to_none=True)
    peer.zero_grad(set_to_none=True)
    return relative
