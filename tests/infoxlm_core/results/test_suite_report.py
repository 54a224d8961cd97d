"""A suite's report: what is said of the protocol, which published rows stand beside ours, what is written."""

import csv
import json
import math

import pytest

from infoxlm_core import languages
from infoxlm_core.results import published, suite
from infoxlm_core.results.suite import protocol, tables
from tests.toy_scores import ANSWERING, CLASSIFICATION, RETRIEVAL, answered, config, labelled, retrieved

PAPER = {
    "settings": CLASSIFICATION["settings"] | {
        "selection": {"rule": "joint"}, "optimization": {"steps": 122_720, "warmup_steps": 12_500}
    },
    "grid": {"optimization.learning_rate": [5e-6, 7e-6, 1e-5]}, "seeds": [1, 2, 3, 4, 5], "table": "xnli",
}  # fmt: skip


def differences(task: dict, count: int, training: dict) -> list[str]:
    measure = config(xnli=task).tasks["xnli"]
    columns = published.tables()["xnli"].columns
    facts = protocol.compare_protocol(measure, dict.fromkeys(columns, count), [labelled(0.8, 0.7, training=training)])
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

    assert test["ours"] == "2,490 rows in each of 2 languages: so many have its development sets"


def answers(trained_on: list[str], examples: int = 90_000, **settings) -> list[str]:
    """What differs from the paper when MLQA is measured so."""
    settings = ANSWERING["settings"] | {"normaliser": "mlqa"} | settings
    grid = {"optimization.learning_rate": [2e-5, 3e-5, 5e-5], "epochs": [2, 3, 4], "batch_size": [16, 32]}
    measure = config(
        mlqa={"settings": settings, "grid": grid, "seeds": [1, 2, 3, 4, 5], "table": "mlqa"}
    ).tasks["mlqa"]  # fmt: skip
    scores = answered(0.5) | {"training": {"steps": 9, "examples": examples}, "trained_on": trained_on}
    return protocol.find_differences(protocol.compare_protocol(measure, protocol.MLQA_TEST, [scores]))


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
    (table,) = tables.build(suite.summarise(planned, {"ours xnli seed 1": labelled(0.8, 0.7)}))["xnli"]
    assert [line.model for line in table.published].count("InfoXLM") == count


@pytest.mark.parametrize(("group", "same"), [("14", True), ("22", True), ("36", True)])
def test_each_of_the_papers_two_groups_of_languages_is_its_own_test_set(group, same):
    measure = config(it=RETRIEVAL | {"table": "tatoeba"}).tasks["it"]
    counts = {code: protocol.TATOEBA[code] for code in languages.GROUPS[group]}

    assert protocol.compare_protocol(measure, counts, [])[0]["same"] is same
    (missing, *_) = counts
    del counts[missing]
    assert protocol.compare_protocol(measure, counts, [])[0]["same"] is (group == "36")  # the other group is whole


# Tables and pages


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A suite of three tasks with a failed point, as files."""
    planned = config(
        ("ours", "peer"), xnli=CLASSIFICATION | {"table": "xnli", "seeds": [1, 2]},
        mlqa=ANSWERING | {"table": "mlqa"}, tatoeba=RETRIEVAL | {"table": "tatoeba"},
    )  # fmt: skip
    results = {f"ours xnli seed {seed}": labelled(0.8, 0.6 + seed / 10) for seed in (1, 2)}
    results |= {"ours mlqa seed 1": answered(0.5), "ours tatoeba": retrieved(0.8), "peer tatoeba": retrieved(0.4)}
    output, found = tmp_path_factory.mktemp("suite"), suite.summarise(planned, results)
    suite.write(output, found | {"models": {"ours": "/models/<b>ours", "peer": "/models/peer"}})
    return output, found


def test_published_rows_stand_below_ours_with_rule_and_source(written):
    _, found = written

    (table,) = tables.build(found)["xnli"]

    assert [line.model for line in table.ours] == ["ours"] and table.columns == ("en", "fr", "de")
    infoxlm = next(line for line in table.published if line.model == "InfoXLM")
    assert (infoxlm.rule, infoxlm.cells[0]["mean"]) == (
        "1 (5 runs)",
        pytest.approx(0.864),
    ) and "2007.07834" in infoxlm.source
    assert infoxlm.mean["mean"] == pytest.approx((0.864 + 0.806 + 0.789) / 3)  # over what is shown, not as printed
    assert any("published means are over those shown" in note for note in table.notes)
    assert next(line for line in table.published if line.rule == "N").model == "mBERT"


def test_translate_train_all_stands_beside_its_own_rows():
    languages = list(published.tables()["xnli"].columns)
    settings = CLASSIFICATION["settings"] | {"train_languages": languages}
    planned = config(both={"settings": settings, "table": "xnli"})

    (table,) = tables.build(suite.summarise(planned, {"ours both seed 1": labelled(0.8, 0.7)}))["both"]

    assert [line.model for line in table.published].count("InfoXLM") == 1
    assert next(line for line in table.published if line.model == "InfoXLM").cells[0]["mean"] == pytest.approx(0.861)


def test_retrieval_has_the_papers_two_groups_and_the_others_apart(written):
    _, found = written
    built = {table.name: table for table in tables.build(found)["tatoeba"]}

    assert {name: table.columns for name, table in built.items()} == {
        f"tatoeba-{group}-{direction}": (code,)
        for group, code in (("14", "deu"), ("22", "afr"), ("other", "gle"))
        for direction in ("xx-en", "en-xx")
    }
    first = built["tatoeba-14-xx-en"]
    assert [(line.model, line.detail) for line in first.ours] == [
        ("ours", "mean of tokens, layer 7, best on this set"), ("peer", "mean of tokens, layer 7, best on this set"),
        ("ours", "[CLS], last layer"), ("peer", "[CLS], last layer"),
    ]  # fmt: skip
    assert "the layer was chosen by the scores on these very pairs" in first.notes[0]
    assert first.published and not built["tatoeba-22-en-xx"].published and not built["tatoeba-other-xx-en"].published


def test_everything_is_written_and_the_page_needs_nothing_else(written):
    output, _ = written

    names = {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()}
    assert {"suite.html", "suite.md", "suite.json", "model_card.md", "tables/xnli.csv", "tables/mlqa-f1.csv",
            "figures/tatoeba.png", "figures/xnli.svg", "figures/transfer-gap.png"} <= names  # fmt: skip
    page = (output / "suite.html").read_text()
    assert "<script" not in page and "<link" not in page and 'src="http' not in page
    assert json.loads((output / "suite.json").read_text(), parse_constant=pytest.fail)["model"] == "ours"
    for kind in ("html", "md"):
        text = (output / f"suite.{kind}").read_text()
        assert "peer xnli seed 1, peer xnli seed 2, peer mlqa seed 1" in text and "Not the paper" in text
        assert "XLM-R (reimplemented)" in text and "2007.07834" in text


def test_tables_are_csv_with_shares_and_say_whose_a_row_is(written):
    output, _ = written

    rows = list(csv.DictReader((output / "tables/xnli.csv").open()))

    assert (rows[0]["whose"], rows[0]["model"], rows[0]["de"]) == ("ours", "ours", "0.75")
    assert float(rows[0]["de deviation"]) == pytest.approx(0.1 / math.sqrt(2), rel=1e-5)
    assert {row["whose"] for row in rows[1:]} == {"published"} and all(row["source"] for row in rows[1:])


def test_the_model_card_has_our_numbers_and_nobody_elses(written):
    output, _ = written

    card = (output / "model_card.md").read_text()

    assert card.startswith("## Evaluation") and "68.3 ± 2.4" in card and "75.0 ± 7.1" in card
    assert "mBERT" not in card


def test_a_suite_of_which_nothing_is_finished_is_still_a_page_and_says_so(tmp_path):
    planned = config(xnli=CLASSIFICATION | {"table": "xnli", "seeds": list(range(1, 21))}, pairs=RETRIEVAL)
    suite.write(tmp_path, suite.summarise(planned, {}))

    text = (tmp_path / "suite.md").read_text()
    assert text.count("Nothing is finished.") == 2 and "ours xnli seed 12 and 9 more" in text
    assert "Nothing is finished" in (tmp_path / "suite.html").read_text()


def test_a_table_without_published_rows_has_none():
    (table,) = tables.build(suite.summarise(config(own=CLASSIFICATION), {"ours own seed 1": labelled(0.5, 0.5)}))["own"]

    assert table.published == () and table.notes == ()
