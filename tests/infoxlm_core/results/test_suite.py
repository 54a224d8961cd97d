"""A suite: what is planned, what is refused before anything starts, what is chosen and averaged, names of metrics."""

import json
import math
import re
from statistics import stdev

import pytest

from infoxlm_core.errors import ConfigError, InputError
from infoxlm_core.results import suite
from infoxlm_core.results.suite import points, summary
from infoxlm_core.results.suite_config import SuiteConfig
from infoxlm_core.tasks import TASKS
from tests.toy_questions import riddles, write_squad
from tests.toy_scores import ANSWERING, CLASSIFICATION, RATES, RETRIEVAL, answered, config, labelled, retrieved


def test_a_point_is_a_model_a_task_a_place_in_the_grid_and_a_seed():
    planned = suite.plan(
        config(("ours", "peer"), words=CLASSIFICATION | {"grid": RATES, "seeds": [3, 5]}, pairs=RETRIEVAL)
    )

    assert [item["point"]["name"] for item in planned] == [
        "ours words learning_rate=1e-05 seed 3", "ours words learning_rate=1e-05 seed 5",
        "ours words learning_rate=2e-05 seed 3", "ours words learning_rate=2e-05 seed 5",
        "peer words learning_rate=1e-05 seed 3", "peer words learning_rate=1e-05 seed 5",
        "peer words learning_rate=2e-05 seed 3", "peer words learning_rate=2e-05 seed 5",
        "ours pairs", "peer pairs",
    ]  # fmt: skip
    assert planned[0]["source"] == planned[3]["source"] == "/models/ours"
    assert planned[5]["settings"]["seed"] == 5
    assert planned[5]["settings"]["optimization"]["learning_rate"] == 1e-5


@pytest.mark.parametrize("task", [CLASSIFICATION, ANSWERING, RETRIEVAL])
def test_the_settings_of_a_point_are_read_back_as_they_were(task):
    (item,) = suite.plan(config(words=task))

    assert suite.read_settings(item["settings"]) == config(words=task).tasks["words"].settings


def test_a_grid_changes_one_field_of_a_section_and_leaves_its_neighbours():
    optimization = {"steps": 77, "warmup_steps": 7, "learning_rate": 1.0}
    task = {"settings": CLASSIFICATION["settings"] | {"optimization": optimization}, "grid": RATES}

    found = [suite.read_settings(item["settings"]).optimization for item in suite.plan(config(words=task))]

    assert [(o.steps, o.warmup_steps, o.learning_rate) for o in found] == [(77, 7, 1e-5), (77, 7, 2e-5)]


def test_there_is_no_none_in_a_point_for_kfp_has_no_word_for_it():
    assert "null" not in json.dumps(suite.plan(config(words=CLASSIFICATION, riddles=ANSWERING, pairs=RETRIEVAL)))


def test_numbers_that_kfp_made_floats_of_give_the_same_names():
    task = ANSWERING | {"grid": {"batch_size": [16, 32], "epochs": [2]}, "seeds": [1]}
    floats = ANSWERING | {"grid": {"batch_size": [16.0, 32.0], "epochs": [2.0]}, "seeds": [1.0]}

    assert suite.plan(config(words=task)) == suite.plan(config(words=floats))


def test_models_and_tasks_keep_their_order_in_lists_since_kfp_forgets_that_of_mappings():
    ordered = config(("zebra", "apple", "m"), words=CLASSIFICATION, a=RETRIEVAL)

    listed = ordered.listed()

    assert [item["name"] for item in listed["models"]] == ["zebra", "apple", "m"]
    assert SuiteConfig.parse(listed) == ordered and list(SuiteConfig.parse(listed).tasks) == ["words", "a"]
    with pytest.raises(ConfigError, match="every item of the list needs a name of its own"):
        SuiteConfig.parse(listed | {"models": [{"name": "a", "source": "x"}, {"name": "a", "source": "y"}]})


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (CLASSIFICATION | {"grid": {"optimization.learningrate": [1]}},
         "tasks.it.grid.optimization.learningrate: unknown name 'learningrate'; known are betas, "),
        (CLASSIFICATION | {"grid": {"lr": [1]}}, "tasks.it.grid.lr: unknown name 'lr'; known are batch_size, "),
        (CLASSIFICATION | {"grid": {"seed": [1, 2]}}, "tasks.it.grid.seed: not here: seeds and settings.task say it"),
        (CLASSIFICATION | {"grid": {"batch_size": [0]}}, "tasks.it.settings.batch_size: Input should be greater than"),
        (CLASSIFICATION | {"grid": {"batch_size": [8, 8]}}, "tasks.it.grid.batch_size: [8, 8] has a value twice"),
        (CLASSIFICATION | {"seeds": [1, 1]}, "tasks.it.seeds: [1, 1] has a seed twice"),
        ({"settings": {"task": "classification"}}, "tasks.it.settings.data: a suite has no corpus of its own"),
        (RETRIEVAL | {"seeds": [1, 2]}, "tasks.it: retrieval trains nothing: leave out grid and seeds"),
        (RETRIEVAL | {"grid": {"margin": [0, 1]}}, "tasks.it: retrieval trains nothing: leave out grid and seeds"),
        ({"settings": ANSWERING["settings"] | {"dev": []}, "grid": RATES},
         "tasks.it.grid: 2 places and no development sets to choose by: give settings.dev, or one place"),
    ],
)  # fmt: skip
def test_a_task_that_cannot_be_planned_is_refused_in_one_line_that_names_the_field(task, said):
    with pytest.raises(ConfigError) as refused:
        suite.plan(config(it=task))

    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_two_models_whose_metrics_would_have_one_name_are_refused():
    with pytest.raises(ConfigError, match="models: XLM_R and xlm-r would have the same metrics: rename one"):
        suite.plan(config(("XLM_R", "xlm-r"), words=CLASSIFICATION))


def test_only_some_tasks_may_be_chosen():
    both = config(words=CLASSIFICATION, pairs=RETRIEVAL)

    assert list(both.choose(["pairs"]).tasks) == ["pairs"] and both.choose([]) == both
    with pytest.raises(ConfigError, match="no task 'pears'; known are words, pairs"):
        both.choose(["pears"])


# What a task reads


def test_a_set_that_is_not_there_or_lacks_what_is_needed_is_refused_before_anything_is_trained(tmp_path):
    rows = ["text,label,language,split", "a,x,en,train", "b,y,en,train", "c,y,de,test"]
    (tmp_path / "data.csv").write_text("\n".join(rows) + "\n")
    settings = {"task": "classification", "data": str(tmp_path / "data.csv")}
    task = config(words={"settings": settings, "grid": RATES}).tasks["words"]

    with pytest.raises(InputError, match=r"tasks\.words: .*data\.csv: no dev rows: add a split"):
        suite.check("words", task, task.settings)
    alone = config(words={"settings": settings}).tasks["words"]
    suite.check("words", alone, alone.settings)
    with pytest.raises(InputError, match=r"tasks\.pairs: .*aligned: no such folder"):
        suite.check("pairs", alone, suite.read_settings(RETRIEVAL["settings"]))


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
        ({"train-en.tsv": "a b yes\n"}, {}, "the train rows have one label alone, 'yes'"),
        ({"test-de.tsv": "i j yes\n"}, {"mixed": True}, "needs the same test in every language"),
        ({"train-en.tsv": None, "train-de.tsv": "a b yes\n"}, {}, "no train rows in en: add a split"),
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
        suite.check("it", task, task.settings)
        return
    with pytest.raises(InputError, match=re.escape("tasks.it: ") + ".*" + re.escape(said)):
        suite.check("it", task, task.settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"selection": {"rule": "joint"}}, None),
        ({"selection": {"rule": "source"}}, "selection.rule source needs a development set in en; there are de"),
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
        suite.check("it", task, task.settings)
        return
    with pytest.raises(InputError, match=re.escape("tasks.it: ") + ".*" + re.escape(said)):
        suite.check("it", task, task.settings)


def test_settings_of_testing_do_not_belong_to_what_was_trained():
    task, settings = TASKS["question_answering"], suite.read_settings(ANSWERING["settings"])
    other = settings.model_copy(update={"test": ("elsewhere",), "mixed": True})

    assert task.training_part(settings) == task.training_part(other)
    assert task.training_part(settings)[1] == {"train": ["t"], "dev": ["d"]}
    assert task.data(settings) == {"train": ["t"], "dev": ["d"], "test": ["q"]}
    assert not TASKS["retrieval"].trained


# What is chosen and averaged


def test_the_place_of_the_grid_is_chosen_by_development_scores_and_never_by_test_scores():
    planned = config(words=CLASSIFICATION | {"grid": RATES, "seeds": [1, 2]})
    results = {
        "ours words learning_rate=1e-05 seed 1": labelled(0.9, 0.9, dev=0.60),
        "ours words learning_rate=1e-05 seed 2": labelled(0.9, 0.9, dev=0.62),
        "ours words learning_rate=2e-05 seed 1": labelled(0.7, 0.6, dev=0.64),
        "ours words learning_rate=2e-05 seed 2": labelled(0.8, 0.6, dev=0.63),
    }

    row = suite.summarise(planned, results)["tasks"]["words"]["models"]["ours"]

    assert row["chosen"]["grid"] == {"optimization.learning_rate": 2e-5}
    assert row["chosen"]["dev"] == pytest.approx(0.635) and row["grid"][0]["dev"] == 0.61
    assert row["languages"]["en"]["accuracy"]["mean"] == pytest.approx(0.75)
    assert row["languages"]["en"]["accuracy"]["deviation"] == pytest.approx(stdev([0.7, 0.8]))
    assert row["transfer_gap"]["accuracy"]["mean"] == pytest.approx((0.7 + 0.8) / 2 - 0.55)


@pytest.mark.parametrize(("rule", "rate"), [("source", 1e-5), ("joint", 2e-5), ("last", 2e-5)])
def test_the_rule_of_the_source_chooses_the_place_too_by_the_source_alone(rule, rate):
    planned = config(words=CLASSIFICATION | {"grid": RATES})
    results = {
        f"ours words learning_rate={name} seed 1": labelled(0.5, 0.5) | {
            "dev": {"languages": {"en": en, "de": de}, "mean": (en + de) / 2},
            "selection": {"rule": rule, "looks": [], "chosen": {"*": 1}},
        }
        for name, en, de in (("1e-05", 0.8, 0.5), ("2e-05", 0.7, 0.7))
    }  # fmt: skip

    found = suite.summarise(planned, results)["tasks"]["words"]

    row = found["models"]["ours"]
    assert row["chosen"]["grid"] == {"optimization.learning_rate": rate}
    assert row["chosen"]["dev"] == pytest.approx(0.65 if rate == 1e-5 else 0.7)  # the metric stays that of points
    said = {"source": "1, dev of the source", "joint": "1, joint dev", "last": "1, last step; grid by joint dev"}
    assert row["rule"] == said[rule]


def test_a_place_with_fewer_finished_seeds_is_not_chosen_and_what_is_missing_is_named():
    planned = config(("ours", "peer"), words=CLASSIFICATION | {"grid": RATES, "seeds": [1, 2]})
    results = {
        "ours words learning_rate=1e-05 seed 1": labelled(0.5, 0.5, dev=0.60),
        "ours words learning_rate=1e-05 seed 2": labelled(0.5, 0.5, dev=0.60),
        "ours words learning_rate=2e-05 seed 2": labelled(0.6, 0.6, dev=0.61),
    }

    found = suite.summarise(planned, results)

    assert found["unfinished"] == [
        "ours words learning_rate=2e-05 seed 1",
        *(f"peer words learning_rate={rate} seed {seed}" for rate in ("1e-05", "2e-05") for seed in (1, 2)),
    ]
    row = found["tasks"]["words"]["models"]["ours"]
    assert row["chosen"]["seeds"] == [1, 2] and row["mean"]["accuracy"]["mean"] == pytest.approx(0.5)
    (note,) = found["tasks"]["words"]["notes"]
    assert note == "ours: learning_rate=2e-05 not in the choice: fewer than 2 seeds are finished."
    assert "peer" not in found["tasks"]["words"]["models"]


def test_without_development_scores_nothing_is_chosen_and_that_is_said():
    planned = config(words=CLASSIFICATION | {"grid": RATES})
    results = {f"ours words learning_rate={r} seed 1": labelled(0.5, 0.5, dev=None) for r in ("1e-05", "2e-05")}

    found = suite.summarise(planned, results)["tasks"]["words"]

    assert not found["models"]
    (note,) = found["notes"]
    assert note.startswith(
        "ours: no development scores (learning_rate=1e-05, learning_rate=2e-05), so nothing is chosen"
    )


def test_a_row_says_where_in_the_store_the_model_of_each_seed_is():
    training = {"steps": 10, "examples": 40}
    results = {
        f"ours words seed {seed}": labelled(0.5, 0.5, training=training | {"tuned": f"tuned/{seed}"}) for seed in (1, 2)
    }

    found = suite.summarise(config(words=CLASSIFICATION | {"seeds": [1, 2]}), results)

    assert found["tasks"]["words"]["models"]["ours"]["tuned"] == {1: "tuned/1", 2: "tuned/2"}


def test_models_that_were_asked_other_questions_are_not_compared_silently():
    results = {"ours words seed 1": labelled(0.5, 0.5), "peer words seed 1": labelled(0.5, 0.5, test_set="sha256:2")}

    found = suite.summarise(config(("ours", "peer"), words=CLASSIFICATION), results)

    (note,) = found["tasks"]["words"]["notes"]
    assert note.startswith("Not all points were asked the same questions")


def test_languages_stand_in_the_papers_order_and_others_after_them():
    assert summary.order(["sw", "am", "en", "de", "fr"], "classification") == ["en", "fr", "de", "sw", "am"]
    assert summary.order(["zh", "ko", "de", "es", "en"], "question_answering") == ["en", "es", "de", "zh", "ko"]
    assert summary.order(["gle", "afr", "cmn", "ara"], "retrieval") == ["ara", "cmn", "afr", "gle"]


# Metrics


def test_metrics_have_stable_names_and_other_models_stand_behind_their_own():
    planned = config(("Ours", "XLM_R"), xnli=CLASSIFICATION | {"seeds": [1, 2]}, mlqa=ANSWERING, tatoeba=RETRIEVAL)
    mixed = {"within": 0.6, "across": 0.4, "cells": {}}
    results = {f"Ours xnli seed {seed}": labelled(0.8, 0.6 + seed / 10, mixed=mixed) for seed in (1, 2)}
    results |= {"Ours mlqa seed 1": answered(0.5), "Ours tatoeba": retrieved(0.8), "XLM_R tatoeba": retrieved(0.4, 5)}

    flat = suite.flatten(suite.summarise(planned, results))

    expected = {
        "xnli/mean": (0.8 + 0.75 + 0.5) / 3, "xnli/de": 0.75, "xnli/deviation": 0.1 / 3 / math.sqrt(2),
        "xnli/transfer_gap": 0.8 - 0.625, "xnli/within": 0.6, "xnli/across": 0.4, "xnli/dev": 0.5, "xnli/seeds": 2,
        "mlqa/f1": 0.65, "mlqa/exact_match": 0.325, "mlqa/f1/zh": 0.5, "mlqa/exact_match/en": 0.4,
        "mlqa/transfer_gap": 0.3, "tatoeba/xx_en": 0.8, "tatoeba/en_xx": 0.4, "tatoeba/mean": 0.6,
        "tatoeba/best_layer": 7, "tatoeba/deu": 0.6, "tatoeba/cls-last/xx_en": 0.2, "tatoeba/cls-last/layer": 12,
        "xlm-r/tatoeba/xx_en": 0.4, "xlm-r/tatoeba/best_layer": 5,
    }  # fmt: skip
    assert {name: flat[name] for name in expected} == pytest.approx(expected)
    assert not [name for name in flat if name.startswith("xlm-r/xnli")]
    assert "mlqa/deviation" not in flat and "tatoeba/transfer_gap" not in flat


def test_the_metrics_of_a_point_are_those_of_the_suite():
    planned = config(xnli=CLASSIFICATION, mlqa=ANSWERING, tatoeba=RETRIEVAL)
    results = {
        "ours xnli seed 1": labelled(0.8, 0.6),
        "ours mlqa seed 1": answered(0.5),
        "ours tatoeba": retrieved(0.8),
    }
    flat = suite.flatten(suite.summarise(planned, results))

    for name, scores in results.items():
        of_point = suite.flatten_scores(name.split()[1], scores)
        assert of_point.items() <= flat.items()


def test_grids_of_fields_with_the_same_last_name_are_told_apart():
    assert points.describe({"a.x": 1, "b.x": 2}) == "a.x=1 b.x=2"
