"""What all tasks share: scores that are stored and read again, names of metrics, order of languages."""

import json
import math
from pathlib import Path

import pytest
from transformers import XLMRobertaConfig

from infoxlm_core.stages.finetuning import finetune
from infoxlm_core.tasks import TASKS, task_of
from infoxlm_core.tasks.scores import Scores
from tests.toys.scores import answered, labelled, retrieved
from tests.toys.text import messages

STORED = {"classification": labelled(0.8, 0.6), "question_answering": answered(0.5), "retrieval": retrieved(0.7)}
NAMES = {
    "classification": "dev transfer_gap mean en de fr",
    "question_answering": "dev transfer_gap f1 exact_match f1/en f1/zh exact_match/en exact_match/zh",
    "retrieval": "xx_en en_xx mean best_layer deu afr gle cls-last/xx_en cls-last/en_xx cls-last/mean cls-last/layer",
}


@pytest.mark.parametrize("name", STORED)
def test_metrics_have_the_names_that_a_suite_gives_them(name):
    settings = {"data": "x"} if name != "question_answering" else {"train": ["t"], "test": ["q"]}
    task = TASKS[name]

    named = task.name_metrics(Scores.from_dict(STORED[name]), task.settings.parse(settings), "it")

    assert set(named) == {f"it/{metric}" for metric in NAMES[name].split()}


def test_a_task_is_found_by_the_name_in_its_settings():
    assert {name: task.name for name, task in TASKS.items()} == {name: name for name in TASKS}
    assert task_of(TASKS["retrieval"].settings.parse({"data": "x"})) is TASKS["retrieval"]


def test_what_is_no_number_is_no_metric():
    scores = Scores.from_dict(labelled(0.8, math.nan))

    named = TASKS["classification"].name_metrics(scores, TASKS["classification"].settings(), "xnli")

    assert named["xnli/en"] == 0.8 and "xnli/de" not in named and "xnli/within" not in named


@pytest.mark.parametrize(
    ("name", "settings", "depends"),
    [
        ("classification", {"head_dropout": 0.1, "dropout": 0.0}, False),  # drawn by the example, outside
        ("classification", {"head_dropout": 0.0, "dropout": 0.1}, True),
        ("question_answering", {"train": ["t"], "test": ["q"], "dropout": 0.0}, False),
        ("retrieval", {"data": "x"}, False),
        ("named_entities", {"data": "x", "dropout": 0.0}, True),  # drawn for the tokens of a batch
        ("named_entities", {"data": "x", "dropout": 0.0, "head_dropout": 0.0}, False),
    ],
)
def test_only_dropout_that_is_drawn_by_worker_makes_the_workers_part_of_a_result(tmp_path, name, settings, depends):
    (tmp_path / "config.json").write_text(json.dumps(XLMRobertaConfig().to_dict()))
    task = TASKS[name]

    assert task.depends_on_workers(task.settings.parse(settings), tmp_path) is depends


def test_a_task_finds_its_data_by_role_fetches_them_and_leaves_them_out_of_what_names_a_result():
    task = TASKS["classification"]
    settings = task.settings.parse({"data": ["a", "b"], "mixed": True})

    assert task.list_data(settings) == {"data": ["a", "b"]}
    assert task.localise(settings, str.upper).data == ("A", "B")
    assert task.without_data(settings) == task.without_data(settings.model_copy(update={"data": ("c",)}))
    assert task.select_training_inputs(settings)[0] == settings.model_copy(update={"mixed": False})
    assert task.localise(task.settings(), str.upper).data is None
    assert "translated_test" not in settings.result_fields()  # the keys of earlier results have no such field


def test_translations_of_the_test_are_data_that_training_does_not_depend_on():
    task = TASKS["classification"]
    settings = task.settings.parse({"data": ["a"], "translated_test": ["b"]})

    assert task.list_data(settings) == {"data": ["a"], "translated_test": ["b"]}
    assert task.localise(settings, str.upper).translated_test == ("B",)
    assert task.select_training_inputs(settings) == (task.settings.parse({"data": ["a"]}), {"data": ["a"]})


def test_the_task_of_the_document_is_learned_and_measured(encoder, tmp_path, monkeypatch):
    text = (Path(__file__).parents[3] / "docs/extending.md").read_text(encoding="utf-8")
    [code] = [block for block in text.split("```python\n")[1:] if block.startswith("# infoxlm_core/tasks/")]
    names: dict = {}
    exec(code.split("```")[0], names)
    task = names["Acceptability"]()
    monkeypatch.setitem(TASKS, task.name, task)
    lines = [f"{'yes' if number % 2 else 'no'}\t{source}" for number, (source, _) in enumerate(messages(0)[:40])]
    (tmp_path / "cola.tsv").write_text("\n".join(lines))
    values = {"train": str(tmp_path / "cola.tsv"), "test": str(tmp_path / "cola.tsv"), "max_tokens": 30}
    settings = task.settings.parse(values | {"optimization": {"steps": 2, "warmup_steps": 1}})

    task.check(settings, has_grid=False)
    finetune(settings, encoder, None, tmp_path / "tuned", tmp_path / "run")
    scores = task.measure(settings, tmp_path / "tuned", tmp_path / "out")

    assert 0 < scores.mean["accuracy"] < 1 and scores.counts == {"en": 40}
    assert task.name_metrics(scores, settings, "cola") == {f"cola/{x}": scores.mean["accuracy"] for x in ("mean", "en")}
