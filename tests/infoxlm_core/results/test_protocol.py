"""How a task was measured, beside how the paper did it, and the paper's tasks of configs/suite.yaml on toy files."""

import json
from pathlib import Path

import pandas as pd
import pytest

from infoxlm_core import run_file
from infoxlm_core.results import page, protocol, published, trials
from infoxlm_core.results.suite_config import SuiteConfig
from infoxlm_core.results.summaries.suite import summarise
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
    """Return aspect of the protocol -> our choice and the paper's."""
    facts = protocol.compare_protocol(config(it=task).tasks["it"], counts, [Scores.from_dict(scores)])
    return {fact.what: (fact.ours, fact.paper) for fact in facts}


def test_protocol_of_a_trained_task_is_shown_beside_the_papers():
    task = CLASSIFICATION | {"grid": RATES, "seeds": [1, 2], "table": "xnli"}

    assert compare(task, {"en": 10, "de": 12}, labelled(0.8, 0.7)) == {
        "test set": ("10 to 12 rows in each of 2 languages", "5,010 rows in each of 15 languages"),
        "setting": ("zero-shot", "zero-shot, translate-train-all"),
        "training languages": ("en", "en; translate-train-all: its 15 languages"),
        "training": ("10,000 steps of 40 examples, batches of 32",
                     "10 epochs of 392,702 pairs in each language, batches of 32"),
        "learning rates tried": ("1e-5, 2e-5", "5e-6, 7e-6, 1e-5; large models: 4e-6, 5e-6, 6e-6"),
        "checkpoint (#M)": ("1, last step; grid by joint dev", "1, joint dev"),
        "seeds": ("2", "5"),
    }  # fmt: skip


def test_protocol_lists_the_numbers_of_steps_that_were_tried():
    task = CLASSIFICATION | {"grid": {"optimization.steps": [20_000, 5_000]}}

    facts = compare(task, {"en": 10}, labelled(0.8, 0.7))

    assert facts["training"][0] == "5,000 steps or 20,000 steps of 40 examples, batches of 32"


def test_protocol_of_an_untrained_task_has_no_training():
    facts = compare(RETRIEVAL | {"table": "tatoeba"}, {"deu": 9}, retrieved(0.5))

    assert list(facts) == ["test set", "vectors"]


def test_protocol_of_retrieval_names_the_ratio_margin():
    settings = RETRIEVAL["settings"] | {"vectors": ["mean@7"], "margin": True}
    facts = compare(RETRIEVAL | {"table": "tatoeba", "settings": settings}, {"deu": 9}, retrieved(0.5))

    assert facts["vectors"][0] == "mean@7, compared by ratio margin"  # the paper compares by cosine


def test_protocol_without_a_published_table_has_only_our_choices():
    facts = compare(ANSWERING, {"en": 9}, labelled(0.5, 0.5))

    assert facts["normaliser"] == ("squad", "")


@pytest.fixture(scope="module")
def measured_suite(tmp_path_factory):
    """Measure the XNLI and MLQA of configs/suite.yaml on toy files in the released layouts.

    Returns:
        The summary, the folder of the scores, and the number of trained models.
    """
    folder = tmp_path_factory.mktemp("papers")
    write_xnli(folder / "data")
    write_mlqa(folder / "data")
    (folder / "suite.yaml").write_text(PAPER.read_text().replace("/data/", f"{folder}/data/"))
    changes = [f"models={{toy: {write_model(folder / 'toy')}}}", "tasks.translate-train-all.settings.optimization={}"]
    changes += [f"tasks.xnli.{name}={json.dumps(value)}" for name, value in XNLI.items()]
    changes += [f"tasks.mlqa.{name}={json.dumps(value)}" for name, value in MLQA.items()]
    names = [name for name in run_file.load_config(SuiteConfig, PAPER).tasks if name != "tatoeba"]
    suite = run_file.load_config(SuiteConfig, folder / "suite.yaml", changes).choose(names)
    scores = {}
    models_by_training = {}
    for trial, source, settings in trials.plan(suite):
        trials.check(trial.task, suite.tasks[trial.task], settings)
        training = json.dumps([str(part) for part in task_of(settings).select_training_inputs(settings)])
        tuned = folder / f"tuned/{len(models_by_training)}"
        if training not in models_by_training:
            figures = finetune(settings, Path(source), None, tuned, folder / f"run/{trial.task}")
            models_by_training[training] = tuned, figures
        tuned, figures = models_by_training[training]
        output = folder / "scores" / trial.task
        scores[trial.name] = trials.measure_model(settings, Path(source), tuned, figures, output)
    return summarise(suite, scores), folder / "scores", len(models_by_training)


def test_settings_of_the_papers_are_named_and_translate_test_trains_no_model(measured_suite):
    summary, _, training_count = measured_suite

    assert {name: task.setting for name, task in summary.tasks.items()} == {
        "xnli": "zero-shot", "translate-train-all": "translate-train-all", "translate-test": "translate-test",
        "mlqa": "zero-shot", "mlqa-translate-train-all": "translate-train-all", "mlqa-translate-test": "translate-test",
    }  # fmt: skip
    assert training_count == 4  # translate-test measures the models of zero-shot
    markdown = page.to_markdown(summary)
    assert "- setting: translate-test (InfoXLM paper: zero-shot, translate-train-all)" in markdown
    assert "| RoBERTa large" in markdown.split("\n## Translate-test")[1].split("##")[0]


@pytest.mark.parametrize("task", ["xnli", "translate-train-all", "translate-test"])
def test_cells_of_xnli_are_shares_of_right_predictions(measured_suite, task):
    summary, folder, _ = measured_suite
    rows = pd.read_parquet(folder / task / "predictions.parquet")

    [table] = tabulate_task(task, summary.tasks[task], "toy")

    accuracies = (rows["predicted"] == rows["label"]).groupby(rows["language"]).mean()
    languages = list(published.tables()["xnli"].columns)
    assert [column.name for column in table.columns] == ["mean", *languages]
    assert [cell.mean for cell in table.lines[0].cells] == pytest.approx([accuracies.mean(), *accuracies[languages]])
    texts = {code: rows["text"][rows["language"] == code].tolist() for code in languages}
    is_translated = task == "translate-test"
    assert all((texts[code] == texts["en"]) == is_translated for code in languages[1:])


@pytest.mark.parametrize("task", ["mlqa", "mlqa-translate-train-all", "mlqa-translate-test"])
def test_cells_of_mlqa_are_scores_of_the_answers_in_their_language(measured_suite, task):
    summary, folder, _ = measured_suite
    answers = {path.stem: json.loads(path.read_text()) for path in (folder / task / "predictions").iterdir()}

    tables = tabulate_task(task, summary.tasks[task], "toy")

    languages = list(published.tables()["mlqa/f1"].columns)
    result = summary.tasks[task].models["toy"]
    is_translated = task == "mlqa-translate-test"
    for table, metric in zip(tables, ("f1", "exact_match"), strict=True):
        mean, *scores = [cell.mean for cell in table.lines[0].cells]
        assert [column.name for column in table.columns] == ["mean", *languages]
        assert mean == result.mean[metric].mean
        assert scores == [result.languages[code][metric].mean for code in languages]
        assert (len(set(scores)) == 1) is is_translated
    assert all((answers[code] == answers["en"]) == is_translated for code in languages[1:])
