"""Text that is kept for evaluation is found again in training text."""

import pytest

from infoxlm_core.config import PreparationConfig
from infoxlm_core.corpora import tables
from infoxlm_core.corpora.fingerprints import keys
from infoxlm_core.corpora.reserved import Reserved, check_leaks
from infoxlm_core.errors import EvaluationLeak

CORPORA = [{"name": name, "format": "tsv", "path": f"{name}.tsv", "languages": ["en", "de"]} for name in "abc"]
CONFIG = PreparationConfig.parse(
    {"languages": ["en", "de"], "corpora": CORPORA, "held_out": ["c"], "labelled_share": 1.0}
)
PAIR = ["Open the file of the archive", "Öffne die Datei der Ablage"]


def noted(*rows: tuple[str, list[str]]) -> Reserved:
    reserved = Reserved()
    for corpus, texts in rows:
        reserved.add_row(texts, keys(texts), corpus, CONFIG)
    return reserved.finalise()


def reason(reserved: Reserved, *texts: str) -> str | None:
    return reserved.reason(keys(texts))


def test_a_held_out_sentence_is_recognised_in_any_case_and_on_either_side():
    reserved = noted(("c", PAIR))

    assert reason(reserved, PAIR[0].upper()) == "held_out"
    assert reason(reserved, PAIR[1]) == "held_out"
    assert reason(reserved, "Something else altogether") is None


def test_a_message_of_one_corpus_is_a_labelled_test_and_one_of_two_has_no_label():
    assert reason(noted(("a", PAIR)), *PAIR) == "labelled"
    assert reason(noted(("a", PAIR), ("b", PAIR)), *PAIR) is None


@pytest.mark.item("B05")
def test_training_text_that_holds_a_held_out_sentence_is_refused_with_its_row(tmp_path):
    with tables.Tables(tmp_path, tables.of_text("text")) as made:
        made.add("mono/en/a.parquet", ("Something else altogether",))
        made.add("mono/en/a.parquet", (PAIR[0],))

    check_leaks(tmp_path, Reserved())
    with pytest.raises(EvaluationLeak, match=r"a\.parquet row 2 is reserved for evaluation \(held_out\): 'Open the"):
        check_leaks(tmp_path, noted(("c", PAIR)))
