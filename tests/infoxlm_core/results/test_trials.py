"""The trials of a suite: how they are planned, and what is refused before any of them starts."""

import json
import re

import pytest

from infoxlm_core.errors import ConfigError, InputError
from infoxlm_core.results import trials
from infoxlm_core.results.suite_config import SuiteConfig
from infoxlm_core.results.trials import Trial
from tests.toys.questions import riddles, write_squad
from tests.toys.scores import ANSWERING, CLASSIFICATION, RATES, RETRIEVAL, config


def test_trials_are_all_combinations_of_model_grid_point_and_seed():
    planned = trials.plan(
        config(("ours", "peer"), words=CLASSIFICATION | {"grid": RATES, "seeds": [3, 5]}, pairs=RETRIEVAL)
    )

    assert [item.trial.name for item in planned] == [
        "ours words learning_rate=1e-05 seed 3", "ours words learning_rate=1e-05 seed 5",
        "ours words learning_rate=2e-05 seed 3", "ours words learning_rate=2e-05 seed 5",
        "peer words learning_rate=1e-05 seed 3", "peer words learning_rate=1e-05 seed 5",
        "peer words learning_rate=2e-05 seed 3", "peer words learning_rate=2e-05 seed 5",
        "ours pairs", "peer pairs",
    ]  # fmt: skip
    assert planned[3].source == "/models/ours"
    assert planned[5].settings.seed == 5
    assert planned[5].settings.optimization.learning_rate == 1e-5


@pytest.mark.parametrize("task", [CLASSIFICATION, ANSWERING, RETRIEVAL])
def test_settings_of_a_trial_survive_kubeflow_which_has_no_none(task):
    planned = config(words=task)
    [item] = trials.plan(planned)

    values = json.dumps(item.to_dict())

    assert "null" not in values
    assert trials.read_settings(json.loads(values)["settings"]) == planned.tasks["words"].settings


def test_trial_is_equal_after_kubeflow_turned_its_numbers_into_floats():
    [item] = trials.plan(config(words=ANSWERING | {"grid": {"batch_size": [16]}, "seeds": [3]}))
    point = item.to_dict()["point"]

    assert Trial.parse(point | {"seed": 3.0, "grid": {"batch_size": 16.0}}) == item.trial
    assert Trial.parse({"variant": "full", "seed": 2.0, "what": "all"}) == Trial("full seed 2", "full", 2, what="all")


def test_plan_is_equal_after_kubeflow_turned_numbers_of_the_suite_into_floats():
    task = ANSWERING | {"grid": {"batch_size": [16, 32], "epochs": [2]}, "seeds": [1]}
    task_with_floats = ANSWERING | {"grid": {"batch_size": [16.0, 32.0], "epochs": [2.0]}, "seeds": [1.0]}

    assert trials.plan(config(words=task)) == trials.plan(config(words=task_with_floats))


def test_grid_changes_only_its_field_of_a_section():
    optimization = {"steps": 77, "warmup_steps": 7, "learning_rate": 1.0}
    task = {"settings": CLASSIFICATION["settings"] | {"optimization": optimization}, "grid": RATES}

    planned = trials.plan(config(words=task))

    sections = [item.settings.optimization for item in planned]
    assert [(section.steps, section.warmup_steps, section.learning_rate) for section in sections] == [
        (77, 7, 1e-5), (77, 7, 2e-5),
    ]  # fmt: skip


def test_task_takes_from_an_earlier_one_what_it_does_not_set():
    first = {"settings": CLASSIFICATION["settings"] | {"optimization": {"steps": 7777}}, "grid": RATES, "table": "xnli"}
    second = {"like": "first", "settings": {"optimization": {"warmup_steps": 7}}, "seeds": [4]}

    suite = config(first=first, second=second)

    task = suite.tasks["second"]
    assert (task.grid, task.table, task.seeds) == (suite.tasks["first"].grid, "xnli", (4,))
    assert (task.settings.optimization.steps, task.settings.optimization.warmup_steps) == (7777, 7)


@pytest.mark.parametrize("name", ["second", "third", "later"])
def test_task_like_one_that_is_not_before_it_is_refused(name):
    with pytest.raises(ConfigError, match=f"tasks.second.like: no task '{name}' before this one"):
        config(first=CLASSIFICATION, second={"like": name}, later=CLASSIFICATION)


def test_models_and_tasks_keep_their_order_in_lists():
    suite = config(("zebra", "apple", "m"), words=CLASSIFICATION, a={"like": "words", "seeds": [4]})

    lists = suite.listed()

    assert [item["name"] for item in lists["models"]] == ["zebra", "apple", "m"]
    assert SuiteConfig.parse(lists) == suite
    assert list(SuiteConfig.parse(lists).tasks) == ["words", "a"]
    with pytest.raises(ConfigError, match="every item of the list needs a unique name"):
        SuiteConfig.parse(lists | {"models": [{"name": "a", "source": "x"}, {"name": "a", "source": "y"}]})


def test_suite_can_be_restricted_to_some_tasks():
    suite = config(words=CLASSIFICATION, pairs=RETRIEVAL)

    assert list(suite.choose(["pairs"]).tasks) == ["pairs"]
    assert suite.choose([]) == suite
    with pytest.raises(ConfigError, match=r"no task 'pears'\. Choose from words, pairs"):
        suite.choose(["pears"])


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (CLASSIFICATION | {"grid": {"optimization.learningrate": [1]}},
         "tasks.it.settings.optimization.learningrate: unknown name; known are betas, "),
        (CLASSIFICATION | {"grid": {"lr": [1]}}, "tasks.it.settings.lr: unknown name; known are batch_size, "),
        (CLASSIFICATION | {"grid": {"seed": [1, 2]}},
         "tasks.it.grid.seed is not a field of a grid. Use seeds or settings.task."),
        (CLASSIFICATION | {"grid": {"batch_size": [0]}}, "tasks.it.settings.batch_size: Input should be greater than"),
        (CLASSIFICATION | {"grid": {"batch_size": [8, 8]}}, "tasks.it.grid.batch_size [8, 8] has a value twice."),
        (CLASSIFICATION | {"seeds": [1, 1]}, "tasks.it.seeds [1, 1] has a seed twice."),
        ({"settings": {"task": "classification"}}, "tasks.it.settings.data: a suite has no corpus"),
        (RETRIEVAL | {"seeds": [1, 2]}, "tasks.it: retrieval trains nothing. Leave out grid and seeds."),
        (RETRIEVAL | {"grid": {"margin": [0, 1]}}, "tasks.it: retrieval trains nothing. Leave out grid and seeds."),
        ({"settings": ANSWERING["settings"] | {"dev": []}, "grid": RATES},
         "tasks.it.grid: 2 points, but no development sets to choose by. Give settings.dev"),
    ],
)  # fmt: skip
def test_task_that_cannot_be_planned_is_refused_with_its_field(task, message):
    with pytest.raises(ConfigError) as error:
        trials.plan(config(it=task))

    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_models_with_equal_metric_names_are_refused():
    with pytest.raises(ConfigError, match="The models XLM_R and xlm-r would have the same metric names"):
        trials.plan(config(("XLM_R", "xlm-r"), words=CLASSIFICATION))


def test_grid_fields_with_the_same_last_name_are_described_in_full():
    assert trials.describe_grid_point({"a.x": 1, "b.x": 2}) == "a.x=1 b.x=2"


def check_task(values: dict, message: str | None) -> None:
    """Check the sets of a task, and expect an error with this message if there is one."""
    task = config(it=values).tasks["it"]
    if message is None:
        trials.check("it", task, task.settings)
        return
    with pytest.raises(InputError, match=re.escape("tasks.it: ") + ".*" + re.escape(message)):
        trials.check("it", task, task.settings)


@pytest.mark.parametrize(("grid", "message"), [(RATES, "data.csv: no dev rows. Add rows with this split"), ({}, None)])
def test_grid_needs_a_development_set(tmp_path, grid, message):
    rows = ["text,label,language,split", "a,x,en,train", "b,y,en,train", "c,y,de,test"]
    (tmp_path / "data.csv").write_text("\n".join(rows) + "\n")

    check_task({"settings": {"task": "classification", "data": str(tmp_path / "data.csv")}, "grid": grid}, message)


def test_missing_test_set_is_refused_before_any_training():
    check_task(RETRIEVAL, "aligned: no such directory")


LABELLED_FILES = {
    "train-en.tsv": "a b yes\nc d no\n", "dev-en.tsv": "a b yes\n", "dev-de.tsv": "a b no\n",
    "test-en.tsv": "e f yes\ng h no\n", "test-de.tsv": "i j yes\nk l no\n",
}  # fmt: skip


@pytest.mark.parametrize(
    ("files", "settings", "message"),
    [
        ({}, {"selection": {"rule": "source"}, "mixed": True}, None),
        ({"dev-en.tsv": None}, {"selection": {"rule": "source"}},
         "selection.rule source needs a development set in en"),
        ({"dev-en.tsv": "a b ja\n"}, {}, "dev: 1 of 2 rows have a label ('ja')"),
        ({"test-de.tsv": "a b ja\n"}, {}, "test: 1 of 3 rows have a label ('ja')"),
        ({"train-en.tsv": "a b yes\n"}, {}, "all train rows have the label 'yes'"),
        ({"test-de.tsv": "i j yes\n"}, {"mixed": True}, "needs the same test in every language"),
        ({"train-en.tsv": None, "train-de.tsv": "a b yes\n"}, {}, "no train rows in en. Add rows with this split"),
        ({"train-de.tsv": "a set of a language that is not trained on is not read\n"}, {}, None),
    ],
)  # fmt: skip
def test_labelled_text_that_would_fail_after_training_is_refused(tmp_path, files, settings, message):
    for name, text in (LABELLED_FILES | files).items():
        if text:
            is_table = text.count(" ") < 5
            (tmp_path / name).write_text(text.replace(" ", "\t") if is_table else text)

    values = {"task": "classification", "data": str(tmp_path), "text_pair": "text_pair"} | settings
    check_task({"settings": values}, message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"selection": {"rule": "joint"}}, None),
        ({"selection": {"rule": "source"}}, "selection.rule source needs a development set in en; available: de"),
        ({"normaliser": "mlqa"}, "language 'ru' is not one of MLQA's"),
    ],
)
def test_questions_that_would_fail_after_training_are_refused(tmp_path, settings, message):
    paths = {}
    for role, language in (("train", "en"), ("dev", "de"), ("test", "ru")):
        paths[role] = [str(write_squad(tmp_path / f"{role}.{language}.json", riddles(2, 1)))]

    check_task({"settings": {"task": "question_answering", **paths} | settings}, message)
