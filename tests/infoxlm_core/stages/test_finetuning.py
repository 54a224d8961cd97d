"""Fine-tuning: learns labels and answers, resumes, refuses what cannot be learned."""

import shutil
import tracemalloc

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DistilBertConfig, DistilBertModel

from infoxlm_core.data.examples import Examples, from_lists
from infoxlm_core.data.sampling import generator
from infoxlm_core.errors import ConfigError, ConfigMismatch, InputError
from infoxlm_core.model import task_models
from infoxlm_core.model.huggingface import tokenizers
from infoxlm_core.stages.finetuning import choose_steps, digest_training, finetune, read_training
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
from tests.toys.finetuning import config


def test_it_learns_the_labels_and_exports_for_transformers(encoder, data, tmp_path):
    finetune(config(data), encoder, None, tmp_path / "out", tmp_path / "run")

    curve = tracker.read(tmp_path / "run" / tracker.METRICS)
    assert sum(values["train/accuracy"] for _, values in curve[-5:]) / 5 > 0.95
    test = pd.read_parquet(tmp_path / "out/test.parquet")
    assert set(test["language"]) == {"en", "de"} and len(test) == 48 * 2
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    english = test[test["language"] == "en"]
    chosen = model(**tokenizer(english["text"].tolist(), padding=True, return_tensors="pt")).logits.argmax(1)
    accuracy = (
        pd.Series([model.config.id2label[i] for i in chosen.tolist()]) == english["label"].reset_index(drop=True)
    ).mean()
    assert accuracy > 0.9


def test_an_interrupted_run_goes_on_from_another_folder_of_the_same_data_but_not_with_other_data(
    encoder, data, tmp_path
):
    def train(folder: str, content: str, **changes) -> list[int]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "table.tsv").write_text(content)
        settings = config(tmp_path / folder / "table.tsv", optimization={"steps": 4, "warmup_steps": 1}, **changes)
        finetune(settings, encoder, None, tmp_path / "out", tmp_path / "run")
        return [step for step, _ in tracker.read(tmp_path / "run" / tracker.METRICS)]

    content = data.read_text().replace("\ttest", "\tdev")
    train("here", content, checkpoints={"every": 2})
    shutil.rmtree(tmp_path / "run/step=0000000004")

    assert train("elsewhere", content, mixed=True) == [1, 2, 3, 4]  # only tests read `mixed`
    with pytest.raises(ConfigMismatch, match="data was 'sha256:"):
        train("changed", content.replace("\tdev", "\ttest"))


def test_an_encoder_of_another_kind_goes_on_after_an_interruption_as_it_would_have(encoder, data, tmp_path):
    """Also between two evaluations on the development sets, for which dropout is off."""
    small = {"vocab_size": 96, "n_layers": 1, "n_heads": 2, "dim": 16, "hidden_dim": 24, "max_position_embeddings": 32}
    DistilBertModel(DistilBertConfig(**small)).save_pretrained(tmp_path / "distilbert")
    tokenizers.copy(encoder, tmp_path / "distilbert", 32)
    table = pd.read_csv(data, sep="\t")
    table.loc[table["split"] == "test", "split"] = "dev"
    table.to_csv(tmp_path / "judged.tsv", sep="\t", index=False)
    settings = config(tmp_path / "judged.tsv", dropout=0.2, checkpoints={"every": 4}, selection={"every": 3},
                      optimization={"steps": 8, "warmup_steps": 2})  # fmt: skip
    for name in "ab":
        finetune(settings, tmp_path / "distilbert", None, tmp_path / name / "out", tmp_path / name / "run")
    (tmp_path / f"b/run/step={8:010d}/manifest.json").unlink()

    finetune(settings, tmp_path / "distilbert", None, tmp_path / "b/out2", tmp_path / "b/run")

    one, same, again = ((tmp_path / out / "model.safetensors").read_bytes() for out in ("a/out", "b/out", "b/out2"))
    assert one == same == again


def test_the_order_of_an_epoch_is_drawn_once_and_batches_reach_into_the_next(encoder, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(task_learner, "generator", lambda *key: drawn.append(key) or generator(*key))
    settings = config(tmp_path / "none", batch_size=4)
    task = Training(TASKS["question_answering"].head, from_lists([[number] for number in range(10)]), np.zeros((10, 2)))
    module = task_models.create(encoder, TASKS["question_answering"].head)
    learner = TaskLearner(settings, module, task, 60, BestCheckpoints(tmp_path, settings.selection, "en"))

    seen = torch.cat([learner.batches(step)[0].ids for step in range(5)]).tolist()

    assert seen == [*generator(1, "epoch", 0).permutation(10), *generator(1, "epoch", 1).permutation(10)]
    assert drawn == [(1, "epoch", 0), (1, "epoch", 1)]


@pytest.mark.parametrize(("steps", "compiler"), [(999, ""), (1000, "aot_eager")])
def test_long_trainings_compile_the_encoder_where_layers_are_compiled(encoder, tmp_path, monkeypatch, steps, compiler):
    monkeypatch.setattr(task_learner, "compiler_for", lambda *_: "aot_eager")
    settings, head = config(tmp_path / "none"), TASKS["classification"].head
    task = Training(head, from_lists([[0, 5, 2]] * 4), np.zeros(4), ("a", "b"))

    learner = TaskLearner(
        settings, task_models.create(encoder, head, task.labels), task, steps,
        BestCheckpoints(tmp_path, settings.selection, "en"),
    )  # fmt: skip

    assert learner.module.encoder.compiler == compiler


def test_the_digest_of_millions_of_tokens_copies_none_and_changes_with_any():
    ids = np.arange(1_000_000, dtype=np.int32)
    task = Training(
        TASKS["classification"].head, Examples(ids, np.zeros(len(ids), np.int8), np.array([len(ids)])), np.array([0])
    )

    tracemalloc.start()
    before = digest_training(task)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    ids[123_456] += 1
    assert most < 100_000 and digest_training(task) != before


@pytest.mark.usefixtures("in_fp64")
def test_the_loss_does_not_depend_on_the_workers_or_the_micro_batch_head_dropout_included(
    encoder, data, tmp_path, monkeypatch
):
    def total(workers: int, micro: int) -> float:
        settings = config(data, micro_batch_size=micro, head_dropout=0.3)
        task = read_training(settings, encoder, None)
        model = task_models.create(encoder, task.head, task.labels, head_dropout=0.3)
        learner = TaskLearner(settings, model, task, 60, BestCheckpoints(tmp_path, settings.selection, "en"))
        monkeypatch.setattr(distributed, "world_size", lambda: workers)
        loss = 0.0
        for rank in range(workers):
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
            loss += sum(
                learner.losses(batch, {"classification": 1.0})[1]["classification"].item()
                for batch in learner.batches(5)
            )
        return loss

    expected = total(1, 32)
    assert total(2, 32) == pytest.approx(expected, rel=1e-9) and total(4, 3) == pytest.approx(expected, rel=1e-9)
    with pytest.raises(ConfigError, match=r"33 workers must not exceed finetuning\.batch_size \(32\)"):
        total(33, 32)


@pytest.mark.usefixtures("in_fp64")
def test_the_loss_of_a_reader_is_the_mean_of_the_cross_entropies_of_start_and_end(encoder, tmp_path):
    rng = np.random.default_rng(1)
    rows = [[0, *rng.integers(10, 90, length).tolist(), 2] for length in rng.integers(4, 12, 40)]
    targets = [sorted(rng.integers(0, len(row), 2).tolist()) for row in rows]
    task = Training(TASKS["question_answering"].head, from_lists(rows), np.array(targets))
    settings = AnsweringConfig.parse({"train": ["x"], "test": ["x"], "dropout": 0.0})
    module = task_models.create(encoder, TASKS["question_answering"].head)
    learner = TaskLearner(settings, module, task, 1, BestCheckpoints(tmp_path, settings.selection, "en"))
    logits = task_models.compute_logits(module, task.examples)

    optimizer = make_adamw(module.parameters(), settings.optimization)
    figures = train_step(learner, optimizer, settings.optimization, Progress(), learner.batches(0))[0]

    rows_of_first_batch = generator(1, "epoch", 0).permutation(40)[:32]
    cross_entropies = [F.cross_entropy(logits[row].T, torch.tensor(targets[row])).item() for row in rows_of_first_batch]
    assert figures["loss/question_answering"] == pytest.approx(np.mean(cross_entropies), rel=1e-6)  # logits are fp32


def test_epochs_decide_steps_and_warm_up():
    settings = ClassificationConfig.parse({"epochs": 3, "warmup_share": 0.1, "batch_size": 32})

    found = choose_steps(settings, 1000)

    assert (found.steps, found.warmup_steps) == (94, 9) and found.learning_rate == 7e-6
    assert choose_steps(settings.model_copy(update={"epochs": None}), 1000) == settings.optimization


@pytest.mark.parametrize(
    ("content", "changes", "said"),
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
def test_bad_tables_are_refused_in_one_line(encoder, tmp_path, content, changes, said):
    (tmp_path / "x.csv").write_text(content)

    with pytest.raises(InputError, match=said):
        finetune(config(tmp_path / "x.csv", **changes), encoder, None, tmp_path / "out", tmp_path / "run")
    assert not (tmp_path / "out").exists()
