"""Fine-tuning learns labels and answers, resumes exactly, and refuses data that it cannot learn from."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DistilBertConfig, DistilBertModel

from infoxlm_core.data.examples import from_lists
from infoxlm_core.data.sampling import make_rng
from infoxlm_core.errors import ConfigError, ConfigMismatch, InputError
from infoxlm_core.model import task_models
from infoxlm_core.model.huggingface import tokenizers
from infoxlm_core.stages.finetuning import choose_steps, finetune, read_training
from infoxlm_core.tasks import TASKS
from infoxlm_core.tasks.classification.task import ClassificationConfig
from infoxlm_core.tasks.question_answering.task import AnsweringConfig
from infoxlm_core.training import distributed, tracker
from infoxlm_core.training.finetuning import task_learner
from infoxlm_core.training.finetuning.best_checkpoints import BestCheckpoints
from infoxlm_core.training.finetuning.task_learner import TaskLearner, Training
from infoxlm_core.training.optimizer import make_adamw
from infoxlm_core.training.state import Progress
from infoxlm_core.training.step import train_step
from tests.helpers import workers
from tests.toys.finetuning import config

CLASSIFICATION = TASKS["classification"].head
ANSWERING = TASKS["question_answering"].head


def make_learner(settings, encoder: Path, training: Training, steps: int = 60, **options) -> TaskLearner:
    """Return the learner of a new model. The options are those of `task_models.create`."""
    module = task_models.create(encoder, training.head, training.labels, **options)
    return TaskLearner(
        settings, module, training, steps, BestCheckpoints(encoder.with_name("run"), settings.selection, "en")
    )


def test_classifier_learns_the_labels_and_is_exported_for_transformers(encoder, data, tmp_path):
    finetune(config(data), encoder, None, tmp_path / "out", tmp_path / "run")

    curve = tracker.read(tmp_path / "run" / tracker.METRICS)
    assert sum(values["train/accuracy"] for _, values in curve[-5:]) / 5 > 0.95
    test = pd.read_parquet(tmp_path / "out/test.parquet")
    assert set(test["language"]) == {"en", "de"}
    assert len(test) == 48 * 2
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    english = test[test["language"] == "en"]
    logits = model(**tokenizer(english["text"].tolist(), padding=True, return_tensors="pt")).logits
    labels = [model.config.id2label[index] for index in logits.argmax(1).tolist()]
    assert (english["label"] == labels).mean() > 0.9


def finetune_without_text_on_the_second_worker(rank: int, size: int, port: int, encoder: Path, base: Path) -> None:
    """Fine-tune with a table that only the first worker has. Save the error of each worker."""
    workers.join(rank, size, port)
    distributed.from_first(None)  # connects the workers, so that none would wait for one that has ended
    with pytest.raises(InputError) as failure:
        finetune(config(base / f"disk-{rank}/table.tsv"), encoder, None, base / "out", base / "run")
    (base / f"error-{rank}").write_text(str(failure.value))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_all_workers_end_with_the_error_of_one_that_cannot_read_the_text(encoder, data, tmp_path):
    (tmp_path / "disk-0").mkdir()
    shutil.copy(data, tmp_path / "disk-0/table.tsv")

    workers.start(finetune_without_text_on_the_second_worker, 2, encoder, tmp_path)

    errors = [(tmp_path / f"error-{rank}").read_text() for rank in range(2)]
    assert "disk-1/table.tsv" in errors[0]
    assert errors[1] == errors[0]
    assert not (tmp_path / "run").exists()


def test_run_resumes_with_the_same_data_in_another_folder_but_not_with_other_data(encoder, data, tmp_path):
    def train(folder: str, content: str, **changes) -> list[int]:
        """Train on a table, and return the steps that the run has logged."""
        table = tmp_path / folder / "table.tsv"
        table.parent.mkdir()
        table.write_text(content)
        settings = config(table, optimization={"steps": 4, "warmup_steps": 1}, **changes)
        finetune(settings, encoder, None, tmp_path / "out", tmp_path / "run")
        return [step for step, _ in tracker.read(tmp_path / "run" / tracker.METRICS)]

    content = data.read_text().replace("\ttest", "\tdev")
    train("first", content, checkpoints={"every": 2})
    shutil.rmtree(tmp_path / "run/step=0000000004")

    assert train("second", content, mixed=True) == [1, 2, 3, 4]  # `mixed` affects only the test
    with pytest.raises(ConfigMismatch, match=r"data was 'sha256:.*\. Change them back, or delete .*run to start over"):
        train("changed", content.replace("\tdev", "\ttest"))


def test_interrupted_training_of_another_encoder_with_dropout_ends_with_the_same_weights(encoder, data, tmp_path):
    sizes = {"vocab_size": 96, "n_layers": 1, "n_heads": 2, "dim": 16, "hidden_dim": 24, "max_position_embeddings": 32}
    DistilBertModel(DistilBertConfig(**sizes)).save_pretrained(tmp_path / "distilbert")
    tokenizers.copy(encoder, tmp_path / "distilbert", 32)
    (tmp_path / "table.tsv").write_text(data.read_text().replace("\ttest", "\tdev"))
    # The run is interrupted between two evaluations on the development sets, for which dropout is off.
    settings = config(tmp_path / "table.tsv", dropout=0.2, checkpoints={"every": 4}, selection={"every": 3},
                      optimization={"steps": 8, "warmup_steps": 2})  # fmt: skip

    def train(output: str, run: str) -> bytes:
        finetune(settings, tmp_path / "distilbert", None, tmp_path / output, tmp_path / run)
        return (tmp_path / output / "model.safetensors").read_bytes()

    weights = train("out", "run")
    assert train("repeated", "other run") == weights
    (tmp_path / f"run/step={8:010d}/manifest.json").unlink()
    assert train("resumed", "run") == weights


def test_order_of_an_epoch_is_drawn_once_and_batches_continue_into_the_next_epoch(encoder, tmp_path, monkeypatch):
    drawn_keys = []
    monkeypatch.setattr(task_learner, "make_rng", lambda *key: drawn_keys.append(key) or make_rng(*key))
    training = Training(ANSWERING, from_lists([[number] for number in range(10)]), np.zeros((10, 2)))
    learner = make_learner(config(tmp_path / "none", batch_size=4), encoder, training)

    ids = torch.cat([learner.batches(step)[0].ids for step in range(5)]).tolist()

    assert ids == [*make_rng(1, "epoch", 0).permutation(10), *make_rng(1, "epoch", 1).permutation(10)]
    assert drawn_keys == [(1, "epoch", 0), (1, "epoch", 1)]


@pytest.mark.usefixtures("in_fp64")
def test_loss_does_not_depend_on_workers_or_micro_batches(encoder, data, monkeypatch):
    def compute_loss(workers: int, micro_batch_size: int) -> float:
        settings = config(data, micro_batch_size=micro_batch_size, head_dropout=0.3)
        learner = make_learner(settings, encoder, read_training(settings, encoder, None), head_dropout=0.3)
        monkeypatch.setattr(distributed, "world_size", lambda: workers)
        loss = 0.0
        for rank in range(workers):
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
            for batch in learner.batches(5):
                _, losses = learner.losses(batch, {"classification": 1.0})
                loss += losses["classification"].item()
        return loss

    expected_loss = compute_loss(1, 32)
    assert compute_loss(2, 32) == pytest.approx(expected_loss, rel=1e-9)
    assert compute_loss(4, 3) == pytest.approx(expected_loss, rel=1e-9)
    with pytest.raises(ConfigError, match=r"33 workers must not exceed finetuning\.batch_size \(32\)"):
        compute_loss(33, 32)


@pytest.mark.usefixtures("in_fp64")
def test_loss_of_answers_is_the_mean_cross_entropy_of_start_and_end(encoder):
    rng = np.random.default_rng(1)
    rows = [[0, *rng.integers(10, 90, length).tolist(), 2] for length in rng.integers(4, 12, 40)]
    targets = [sorted(rng.integers(0, len(row), 2).tolist()) for row in rows]
    training = Training(ANSWERING, from_lists(rows), np.array(targets))
    settings = AnsweringConfig.parse({"train": ["x"], "test": ["x"], "dropout": 0.0})
    learner = make_learner(settings, encoder, training, steps=1)
    logits = task_models.compute_logits(learner.module, training.examples)

    optimizer = make_adamw(learner.module.parameters(), settings.optimization)
    figures, *_ = train_step(learner, optimizer, settings.optimization, Progress(), learner.batches(0))

    rows_of_first_batch = make_rng(1, "epoch", 0).permutation(40)[:32]
    cross_entropies = [F.cross_entropy(logits[row].T, torch.tensor(targets[row])).item() for row in rows_of_first_batch]
    assert figures["loss/question_answering"] == pytest.approx(np.mean(cross_entropies), rel=1e-6)  # logits are fp32


def test_epochs_determine_steps_and_warmup():
    settings = ClassificationConfig.parse({"epochs": 3, "warmup_share": 0.1, "batch_size": 32})

    optimization = choose_steps(settings, num_examples=1000)

    assert optimization == settings.optimization.model_copy(update={"steps": 94, "warmup_steps": 9})
    assert choose_steps(settings.model_copy(update={"epochs": None}), 1000) == settings.optimization


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        ("text,label,language\na,b,en\n", {}, "but training needs two labels"),
        ("text,label,language\na,b,de\nc,d,de\n", {}, "Set finetuning.train_languages"),
        (
            "text,label,language,split\na,b,en,train\nc,d,en,train\n",
            {"selection": {"rule": "joint"}},
            "selection.rule joint needs development sets; available: none",
        ),
    ],
)
def test_table_that_cannot_train_a_classifier_is_refused(encoder, tmp_path, content, changes, message):
    (tmp_path / "x.csv").write_text(content)

    with pytest.raises(InputError, match=message):
        finetune(config(tmp_path / "x.csv", **changes), encoder, None, tmp_path / "out", tmp_path / "run")
    assert not (tmp_path / "out").exists()
