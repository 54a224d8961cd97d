"""A suite's trials: what is planned, and what is refused before anything starts."""

import json
import re

import pytest

from infoxlm_core.errors import ConfigError, InputError
from infoxlm_core.results import trials
from infoxlm_core.results.suite_config import SuiteConfig
from infoxlm_core.results.trials import Trial
from infoxlm_core.tasks import TASKS
from tests.toys.questions import riddles, write_squad
from tests.toys.scores import ANSWERING, CLASSIFICATION, RATES, RETRIEVAL, config


def test_a_point_is_a_model_a_task_a_place_in_the_grid_and_a_seed():
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
    assert planned[0].source == planned[3].source == "/models/ours"
    assert planned[5].settings.seed == 5
    assert planned[5].settings.optimization.learning_rate == 1e-5


@pytest.mark.parametrize("task", [CLASSIFICATION, ANSWERING, RETRIEVAL])
def test_the_settings_of_a_point_are_read_back_as_they_were(task):
    (item,) = trials.plan(config(words=task))

    assert trials.read_settings(item.to_dict()["settings"]) == config(words=task).tasks["words"].settings


def test_a_grid_changes_one_field_of_a_section_and_leaves_its_neighbours():
    optimization = {"steps": 77, "warmup_steps": 7, "learning_rate": 1.0}
    task = {"settings": CLASSIFICATION["settings"] | {"optimization": optimization}, "grid": RATES}

    found = [item.settings.optimization for item in trials.plan(config(words=task))]

    assert [(o.steps, o.warmup_steps, o.learning_rate) for o in found] == [(77, 7, 1e-5), (77, 7, 2e-5)]


def test_a_task_like_another_has_its_settings_except_those_that_it_sets():
    first = {"settings": CLASSIFICATION["settings"] | {"optimization": {"steps": 7777}}, "grid": RATES, "table": "xnli"}
    second = {"like": "first", "settings": {"optimization": {"warmup_steps": 7}}, "seeds": [4]}

    suite = config(first=first, second=second)

    one, other = suite.tasks["first"], suite.choose(["second"]).tasks["second"]
    assert (other.grid, other.table, other.seeds) == (one.grid, "xnli", (4,))
    assert (other.settings.optimization.steps, other.settings.optimization.warmup_steps) == (7777, 7)
    assert SuiteConfig.parse(suite.listed()) == suite
    for name in ("second", "third", "later"):
        with pytest.raises(ConfigError, match=f"tasks.second.like: no task '{name}' before this one"):
            config(first=first, second=second | {"like": name}, later=first)


def test_there_is_no_none_in_a_point_for_kfp_has_no_word_for_it():
    assert "null" not in json.dumps(
        [item.to_dict() for item in trials.plan(config(words=CLASSIFICATION, riddles=ANSWERING, pairs=RETRIEVAL))]
    )


def test_numbers_that_kfp_made_floats_of_give_the_same_names():
    task = ANSWERING | {"grid": {"batch_size": [16, 32], "epochs": [2]}, "seeds": [1]}
    floats = ANSWERING | {"grid": {"batch_size": [16.0, 32.0], "epochs": [2.0]}, "seeds": [1.0]}

    assert trials.plan(config(words=task)) == trials.plan(config(words=floats))


def test_models_and_tasks_keep_their_order_in_lists_since_kfp_forgets_that_of_mappings():
    ordered = config(("zebra", "apple", "m"), words=CLASSIFICATION, a=RETRIEVAL)

    listed = ordered.listed()

    assert [item["name"] for item in listed["models"]] == ["zebra", "apple", "m"]
    assert SuiteConfig.parse(listed) == ordered and list(SuiteConfig.parse(listed).tasks) == ["words", "a"]
    with pytest.raises(ConfigError, match="every item of the list needs a unique name"):
        SuiteConfig.parse(listed | {"models": [{"name": "a", "source": "x"}, {"name": "a", "source": "y"}]})


@pytest.mark.parametrize(
    ("task", "said"),
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
def test_a_task_that_cannot_be_planned_is_refused_in_one_line_that_names_the_field(task, said):
    with pytest.raises(ConfigError) as refused:
        trials.plan(config(it=task))

    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_two_models_whose_metrics_would_have_one_name_are_refused():
    with pytest.raises(ConfigError, match="The models XLM_R and xlm-r would have the same metric names"):
        trials.plan(config(("XLM_R", "xlm-r"), words=CLASSIFICATION))


def test_only_some_tasks_may_be_chosen():
    both = config(words=CLASSIFICATION, pairs=RETRIEVAL)

    assert list(both.choose(["pairs"]).tasks) == ["pairs"] and both.choose([]) == both
    with pytest.raises(ConfigError, match=r"no task 'pears'\. Choose from words, pairs"):
        both.choose(["pears"])


def test_a_set_that_is_not_there_or_lacks_what_is_needed_is_refused_before_anything_is_trained(tmp_path):
    rows = ["text,label,language,split", "a,x,en,train", "b,y,en,train", "c,y,de,test"]
    (tmp_path / "data.csv").write_text("\n".join(rows) + "\n")
    settings = {"task": "classification", "data": str(tmp_path / "data.csv")}
    task = config(words={"settings": settings, "grid": RATES}).tasks["words"]

    with pytest.raises(InputError, match=r"tasks\.words: .*data\.csv: no dev rows\. Add a split"):
        trials.check("words", task, task.settings)
    alone = config(words={"settings": settings}).tasks["words"]
    trials.check("words", alone, alone.settings)
    with pytest.raises(InputError, match=r"tasks\.pairs: .*aligned: no such folder"):
        trials.check("pairs", alone, trials.read_settings(RETRIEVAL["settings"]))


LABELLED = {
    "train-en.tsv": "a b yes\nc d no\n", "dev-en.tsv": "a b yes\n", "dev-de.tsv": "a b no\n",
    "test-en.tsv": "e f yes\ng h no\n", "test-de.tsv": "i j yes\nk l no\n",
}  # fmt: skip


@pytest.mark.parametrize(
    ("files", "settings", "said"),
    [
        ({}, {"selection": {"rule": "source"}, "mixed": True}, None),
        (
            {"dev-en.tsv": None},
            {"selection": {"rule": "source"}},
            "selection.rule source needs a development set in en",
        ),
        ({"dev-en.tsv": "a b ja\n"}, {}, "dev: 1 of 2 rows have a label ('ja')"),
        ({"test-de.tsv": "a b ja\n"}, {}, "test: 1 of 3 rows have a label ('ja')"),
        ({"train-en.tsv": "a b yes\n"}, {}, "all train rows have the label 'yes'"),
        ({"test-de.tsv": "i j yes\n"}, {"mixed": True}, "needs the same test in every language"),
        ({"train-en.tsv": None, "train-de.tsv": "a b yes\n"}, {}, "no train rows in en. Add a split"),
        ({"train-de.tsv": "not read: a set of a language that is not learned may be large\n"}, {}, None),
    ],
)
def test_labelled_text_that_would_fail_after_training_is_refused_before(tmp_path, files, settings, said):
    for name, text in (LABELLED | files).items():
        if text:
            (tmp_path / name).write_text(text if text.startswith("not") else text.replace(" ", "\t"))
    settings = {"task": "classification", "data": str(tmp_path), "text_pair": "text_pair"} | settings
    task = config(it={"settings": settings}).tasks["it"]

    if said is None:
        trials.check("it", task, task.settings)
        return
    with pytest.raises(InputError, match=re.escape("tasks.it: ") + ".*" + re.escape(said)):
        trials.check("it", task, task.settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"selection": {"rule": "joint"}}, None),
        ({"selection": {"rule": "source"}}, "selection.rule source needs a development set in en; available: de"),
        ({"normaliser": "mlqa"}, "language 'ru' is not one of MLQA's"),
    ],
)
def test_questions_that_would_fail_after_training_are_refused_before(tmp_path, settings, said):
    paths = {
        role: [str(write_squad(tmp_path / f"{role}.{language}.json", riddles(2, 1)))]
        for role, language in (("train", "en"), ("dev", "de"), ("test", "ru"))
    }
    task = config(it={"settings": {"task": "question_answering", **paths} | settings}).tasks["it"]

    if said is None:
        trials.check("it", task, task.settings)
        return
    with pytest.raises(InputError, match=re.escape("tasks.it: ") + ".*" + re.escape(said)):
        trials.check("it", task, task.settings)


def test_settings_of_testing_do_not_belong_to_what_was_trained():
    task, settings = TASKS["question_answering"], trials.read_settings(ANSWERING["settings"])
    other = settings.model_copy(update={"test": ("elsewhere",), "mixed": True})

    assert task.select_training_inputs(settings) == task.select_training_inputs(other)
    assert task.select_training_inputs(settings)[1] == {"train": ["t"], "dev": ["d"]}
    assert task.list_data(settings) == {"train": ["t"], "dev": ["d"], "test": ["q"]}
    assert not TASKS["retrieval"].trained


def test_grids_of_fields_with_the_same_last_name_are_told_apart():
    assert trials.describe({"a.x": 1, "b.x": 2}) == "a.x=1 b.x=2"


def test_a_trial_is_read_as_it_travelled_through_kfp_which_makes_floats_of_all_numbers():
    (item,) = trials.plan(config(words=ANSWERING | {"grid": {"batch_size": [16]}, "seeds": [3]}))
    point = item.to_dict()["point"]

    assert Trial.parse(point | {"seed": 3.0, "grid": {"batch_size": 16.0}}) == item.trial
    assert Trial.parse({"variant": "full", "seed": 2.0, "what": "all"}) == Trial("full seed 2", "full", 2, what="all")
