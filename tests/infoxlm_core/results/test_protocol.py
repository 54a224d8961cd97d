"""How a task was measured, beside how the paper did it."""

from infoxlm_core.results import protocol
from infoxlm_core.tasks.scores import Scores
from tests.toys.scores import ANSWERING, CLASSIFICATION, RATES, RETRIEVAL, config, labelled, retrieved


def compare(task: dict, counts: dict[str, int], scores: dict) -> dict[str, tuple[str, str]]:
    facts = protocol.compare_protocol(config(it=task).tasks["it"], counts, [Scores.from_dict(scores)])
    return {fact.what: (fact.ours, fact.paper) for fact in facts}


def test_our_protocol_stands_beside_the_papers():
    task = CLASSIFICATION | {"grid": RATES, "seeds": [1, 2], "table": "xnli"}

    facts = compare(task, {"en": 10, "de": 12}, labelled(0.8, 0.7))

    assert facts == {
        "test set": ("10 to 12 rows in each of 2 languages", "5,010 rows in each of 15 languages"),
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
