"""How a task was measured, beside how the paper did it."""

import pytest

from infoxlm_core import languages
from infoxlm_core.results import protocol, published, suite_tables
from infoxlm_core.tasks.scores import Scores
from tests.toys.scores import ANSWERING, CLASSIFICATION, RETRIEVAL, answered, config, labelled, summed

PAPER = {
    "settings": CLASSIFICATION["settings"] | {
        "selection": {"rule": "joint"}, "optimization": {"steps": 122_720, "warmup_steps": 12_500}
    },
    "grid": {"optimization.learning_rate": [5e-6, 7e-6, 1e-5]}, "seeds": [1, 2, 3, 4, 5], "table": "xnli",
}  # fmt: skip


def differences(task: dict, count: int, training: dict) -> list[str]:
    measure = config(xnli=task).tasks["xnli"]
    columns = published.tables()["xnli"].columns
    facts = protocol.compare_protocol(
        measure, dict.fromkeys(columns, count), [Scores.from_dict(labelled(0.8, 0.7, training=training))]
    )
    return protocol.find_differences(facts)


def test_the_papers_own_protocol_has_no_difference():
    assert differences(PAPER, 5010, {"steps": 122_720, "examples": 392_702}) == []


@pytest.mark.parametrize(
    ("change", "count", "training", "said"),
    [
        ({}, 2490, {"steps": 122_720, "examples": 392_702}, ["test set"]),
        ({}, 5010, {"steps": 122_720, "examples": 8_000}, ["training"]),
        ({}, 5010, {"steps": 9_000, "examples": 392_702}, ["training"]),
        ({"seeds": [1]}, 5010, {"steps": 122_720, "examples": 392_702}, ["seeds"]),
        ({"grid": {}}, 5010, {"steps": 122_720, "examples": 392_702}, ["learning rates tried"]),
    ],
)
def test_what_is_not_done_as_in_the_paper_is_named(change, count, training, said):
    assert differences(PAPER | change, count, training) == said


def test_development_sets_that_stand_in_for_test_sets_are_recognised():
    measure = config(xnli=PAPER).tasks["xnli"]

    test, *_ = protocol.compare_protocol(measure, {"en": 2490, "de": 2490}, [])

    assert test.ours == "2,490 rows in each of 2 languages: so many have its development sets"


def answers(trained_on: list[str], examples: int = 90_000, **settings) -> list[str]:
    """What differs from the paper when MLQA is measured so."""
    settings = ANSWERING["settings"] | {"normaliser": "mlqa"} | settings
    grid = {"optimization.learning_rate": [2e-5, 3e-5, 5e-5], "epochs": [2, 3, 4], "batch_size": [16, 32]}
    measure = config(
        mlqa={"settings": settings, "grid": grid, "seeds": [1, 2, 3, 4, 5], "table": "mlqa"}
    ).tasks["mlqa"]  # fmt: skip
    scores = answered(0.5) | {"training": {"steps": 9, "examples": examples}, "trained_on": trained_on}
    asked = published.protocols()["mlqa"]["test"]
    return protocol.find_differences(protocol.compare_protocol(measure, asked, [Scores.from_dict(scores)]))


def test_answers_must_be_learned_from_squad_alone_and_compared_as_mlqa_does():
    assert answers(["en"]) == []
    assert answers(["en", "de"]) == ["training languages"]
    assert answers(["en"], examples=180_000) == ["training"]
    assert answers(["en"], normaliser="squad") == ["normaliser"]


@pytest.mark.parametrize(
    ("languages", "said", "count"),
    [(["en"], [], 1), (["fr"], ["training languages"], 0), (["en", "fr"], ["training languages"], 0)],
)
def test_published_rows_stand_beside_what_was_trained_on_english_or_on_all_languages_alone(languages, said, count):
    settings = PAPER["settings"] | {"train_languages": languages}
    trained = {"steps": 122_720 * len(languages), "examples": 392_702 * len(languages)}

    assert differences(PAPER | {"settings": settings}, 5010, trained) == said
    planned = config(xnli={"settings": settings, "table": "xnli"})
    (table,) = suite_tables.of_suite(summed(planned, {"ours xnli seed 1": labelled(0.8, 0.7)}))["xnli"]
    assert [line.name for line in table.published].count("InfoXLM") == count


@pytest.mark.parametrize(("group", "same"), [("14", True), ("22", True), ("36", True)])
def test_each_of_the_papers_two_groups_of_languages_is_its_own_test_set(group, same):
    measure = config(it=RETRIEVAL | {"table": "tatoeba"}).tasks["it"]
    counts = {code: published.protocols()["tatoeba"]["test"][code] for code in languages.GROUPS[group]}

    assert protocol.compare_protocol(measure, counts, [])[0].same is same
    (missing, *_) = counts
    del counts[missing]
    assert protocol.compare_protocol(measure, counts, [])[0].same is (group == "36")  # the other group is whole
