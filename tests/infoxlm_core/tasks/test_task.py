"""What all tasks share: names of metrics, data by role, and the settings on which training depends."""

import json
import math
from pathlib import Path

import pytest
from transformers import XLMRobertaConfig

from infoxlm_core.stages.finetuning import finetune
from infoxlm_core.tasks import TASKS
from infoxlm_core.tasks.scores import Scores
from tests.toys.scores import answered, labelled, retrieved
from tests.toys.text import messages

ANSWERING_DATA = {"train": ["t"], "test": ["q"]}


@pytest.mark.parametrize(
    ("name", "settings", "scores", "metrics"),
    [
        ("classification", {}, labelled(0.8, 0.6), "dev transfer_gap mean en de fr"),
        ("classification", {}, labelled(0.8, math.nan), "dev en fr"),  # values that are not finite are left out
        ("question_answering", ANSWERING_DATA, answered(0.5),
         "dev transfer_gap f1 exact_match f1/en f1/zh exact_match/en exact_match/zh"),
        ("retrieval", {"data": "x"}, retrieved(0.7), "xx_en en_xx mean best_layer deu afr gle "
         "cls-last/xx_en cls-last/en_xx cls-last/mean cls-last/layer"),
    ],
)  # fmt: skip
def test_metrics_have_documented_names(name, settings, scores, metrics):
    task = TASKS[name]

    value_by_metric = task.name_metrics(Scores.from_dict(scores), task.settings.parse(settings), "prefix")

    assert set(value_by_metric) == {f"prefix/{metric}" for metric in metrics.split()}


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("classification", {"head_dropout": 0.1, "dropout": 0.0}, False),  # one draw per example on the main process
        ("classification", {"head_dropout": 0.0, "dropout": 0.1}, True),
        ("question_answering", ANSWERING_DATA | {"dropout": 0.0}, False),
        ("retrieval", {"data": "x"}, False),
        ("named_entities", {"data": "x", "dropout": 0.0}, True),  # each worker draws for its own tokens
        ("named_entities", {"data": "x", "dropout": 0.0, "head_dropout": 0.0}, False),
    ],
)
def test_results_depend_on_workers_only_if_workers_draw_dropout(tmp_path, name, settings, expected):
    (tmp_path / "config.json").write_text(json.dumps(XLMRobertaConfig().to_dict()))
    task = TASKS[name]

    assert task.depends_on_workers(task.settings.parse(settings), tmp_path) is expected


def test_training_inputs_are_the_settings_and_data_without_those_of_tests():
    task = TASKS["classification"]
    training_settings = task.settings.parse({"data": ["a", "b"]})
    settings = task.settings.parse({"data": ["a", "b"], "translated_test": ["c"]})
    mixed_settings = task.settings.parse({"data": ["a", "b"], "mixed": True})

    assert task.list_data(settings) == {"data": ["a", "b"], "translated_test": ["c"]}
    assert task.select_training_inputs(mixed_settings) == (training_settings, {"data": ["a", "b"]})
    assert task.select_training_inputs(settings) == (training_settings, {"data": ["a", "b"]})


def test_paths_are_localised_and_left_out_of_artifact_keys():
    task = TASKS["classification"]
    settings = task.settings.parse({"data": ["a", "b"], "translated_test": ["c"]})

    local_settings = task.localise(settings, str.upper)

    assert local_settings.data == ("A", "B")
    assert local_settings.translated_test == ("C",)
    assert task.without_data(local_settings) == task.without_data(settings)
    assert task.localise(task.settings(), str.upper).data is None
    assert "translated_test" not in task.settings().result_fields()  # keys of earlier results have no such field


def test_the_example_task_of_the_documentation_works(encoder, tmp_path, monkeypatch):
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

    accuracy = scores.mean["accuracy"]
    assert 0 < accuracy < 1
    assert scores.counts == {"en": 40}
    assert task.name_metrics(scores, settings, "cola") == {"cola/mean": accuracy, "cola/en": accuracy}
