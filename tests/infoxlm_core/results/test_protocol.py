"""How a task was measured, beside how the paper did it; the settings of the papers by name, to the last cell."""

import json
from pathlib import Path

import pandas as pd
import pytest

from infoxlm_core import run_file
from infoxlm_core.results import page, protocol, published, trials
from infoxlm_core.results.suite_config import SuiteConfig
from infoxlm_core.results.summary import summarise
from infoxlm_core.results.task_tables import tabulate_task
from infoxlm_core.stages.finetuning import finetune
from infoxlm_core.tasks import task_of
from infoxlm_core.tasks.scores import Scores
from tests.toys.benchmarks import write_mlqa, write_xnli
from tests.toys.scores import ANSWERING, CLASSIFICATION, RATES, RETRIEVAL, config, labelled, retrieved
from tests.toys.suite import write_model

PAPER = Path(__file__).parents[3] / "configs/suite.yaml"
XNLI = {
    "seeds": [1], "grid": {}, "settings.max_tokens": 32, "settings.dropout": 0, "settings.selection.every": 15,
    "settings.optimization": {"steps": 30, "warmup_steps": 1, "learning_rate": 0.01},
}  # fmt: skip
MLQA = {
    "seeds": [1], "grid": {}, "settings.max_tokens": 48, "settings.question_tokens": 8, "settings.stride": 8,
    "settings.epochs": 10, "settings.dropout": 0, "settings.optimization": {"learning_rate": 0.01},
}  # fmt: skip


def compare(task: dict, counts: dict[str, int], scores: dict) -> dict[str, tuple[str, str]]:
    facts = protocol.compare_protocol(config(it=task).tasks["it"], counts, [Scores.from_dict(scores)])
    return {fact.what: (fact.ours, fact.paper) for fact in facts}


def test_our_protocol_stands_beside_the_papers():
    task = CLASSIFICATION | {"grid": RATES, "seeds": [1, 2], "table": "xnli"}

    facts = compare(task, {"en": 10, "de": 12}, labelled(0.8, 0.7))

    assert facts == {
        "test set": ("10 to 12 rows in each of 2 languages", "5,010 rows in each of 15 languages"),
        "setting": ("zero-shot", "zero-shot, translate-train-all"),
        "training languages": ("en", "en; translate-train-all: its 15 languages"),
        "training": ("10,000 steps of 40 examples, batches of 32",
                     "10 epochs of 392,702 pairs in each language, batches of 32"),
        "learning rates tried": ("1e-5, 2e-5", "5e-6, 7e-6, 1e-5; large models: 4e-6, 5e-6, 6e-6"),
        "checkpoint (#M)": ("1, last step; grid by joint dev", "1, joint dev"),
        "seeds": ("2", "5"),
    }  # fmt: skip


def test_a_task_that_trains_nothing_has_no_training_and_one_without_a_table_no_paper():
    assert list(compare(RETRIEVAL | {"table": "tatoeba"}, {"deu": 9}, retrieved(0.5))) == ["test set", "vectors"]
    assert compare(ANSWERING, {"en": 9}, labelled(0.5, 0.5))["normaliser"] == ("squad", "")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Measure the XNLI and MLQA of configs/suite.yaml on toy files in the released layouts."""
    folder = tmp_path_factory.mktemp("papers")
    write_xnli(folder / "data")
    write_mlqa(folder / "data")
    (folder / "suite.yaml").write_text(PAPER.read_text().replace("/data/", f"{folder}/data/"))
    changes = [f"models={{toy: {write_model(folder / 'toy')}}}", "tasks.translate-train-all.settings.optimization={}"]
    changes += [f"tasks.xnli.{name}={json.dumps(value)}" for name, value in XNLI.items()]
    changes += [f"tasks.mlqa.{name}={json.dumps(value)}" for name, value in MLQA.items()]
    names = [name for name in run_file.load_as(SuiteConfig, PAPER).tasks if name != "tatoeba"]
    suite = run_file.load_as(SuiteConfig, folder / "suite.yaml", changes).choose(names)
    scores, models_by_training = {}, {}
    for trial, source, settings in trials.plan(suite):
        trials.check(trial.task, suite.tasks[trial.task], settings)
        training = json.dumps([str(part) for part in task_of(settings).select_training_inputs(settings)])
        tuned = folder / f"tuned/{len(models_by_training)}"
        if training not in models_by_training:
            figures = finetune(settings, Path(source), None, tuned, folder / f"run/{trial.task}")
            models_by_training[training] = tuned, figures
        tuned, figures = models_by_training[training]
        output = folder / "scores" / trial.task
        scores[trial.name] = trials.measure(settings, Path(source), tuned, figures, output)
    return summarise(suite, scores), folder / "scores", len(models_by_training)


def test_the_three_settings_of_the_papers_are_lines_of_the_suite_that_the_page_names(measured):
    summary, _, num_trainings = measured

    assert {name: task.setting for name, task in summary.tasks.items()} == {
        "xnli": "zero-shot", "translate-train-all": "translate-train-all", "translate-test": "translate-test",
        "mlqa": "zero-shot", "mlqa-translate-train-all": "translate-train-all", "mlqa-translate-test": "translate-test",
    }  # fmt: skip
    assert num_trainings == 4  # translate-test measures the models of zero-shot
    markdown = page.to_markdown(summary)
    assert "- setting: translate-test (InfoXLM paper: zero-shot, translate-train-all)" in markdown
    assert "| RoBERTa large" in markdown.split("\ntranslate-test: accuracy")[1].split("##")[0]


@pytest.mark.parametrize("task", ["xnli", "translate-train-all", "translate-test"])
def test_every_cell_of_xnli_is_the_share_of_right_predictions(measured, task):
    summary, folder, _ = measured
    rows = pd.read_parquet(folder / task / "predictions.parquet")

    (table,) = tabulate_task(task, summary.tasks[task], "toy")

    right = (rows["predicted"] == rows["label"]).groupby(rows["language"]).mean()
    languages = list(published.tables()["xnli"].columns)
    assert [column.name for column in table.columns] == ["mean", *languages]
    assert [cell.mean for cell in table.lines[0].cells] == pytest.approx([right.mean(), *right[languages]])
    texts = {code: rows["text"][rows["language"] == code].tolist() for code in languages}
    is_translated = task == "translate-test"
    assert all((texts[code] == texts["en"]) == is_translated for code in languages[1:])


@pytest.mark.parametrize("task", ["mlqa", "mlqa-translate-train-all", "mlqa-translate-test"])
def test_every_cell_of_mlqa_is_of_the_answers_in_the_language_of_the_text(measured, task):
    summary, folder, _ = measured
    answers = {path.stem: json.loads(path.read_text()) for path in (folder / task / "predictions").iterdir()}

    f1, exact_match = tabulate_task(task, summary.tasks[task], "toy")

    languages = list(published.tables()["mlqa/f1"].columns)
    result = summary.tasks[task].models["toy"]
    for table, metric in ((f1, "f1"), (exact_match, "exact_match")):
        cells = [cell.mean for cell in table.lines[0].cells]
        assert [column.name for column in table.columns] == ["mean", *languages]
        assert cells == [result.mean[metric].mean, *(result.languages[code][metric].mean for code in languages)]
        is_equal = [cell == cells[1] for cell in cells[2:]]
        assert all(is_equal) if task == "mlqa-translate-test" else len(set(cells)) > 1
    is_translated = task == "mlqa-translate-test"
    assert all((answers[code] == answers["en"]) == is_translated for code in languages[1:])
