"""The page of a suite, and the part of a model card that it has the numbers for."""

import json

import pytest

from infoxlm_core.results import suite_page
from tests.toys.scores import CLASSIFICATION, RETRIEVAL, config, summed


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


def test_the_model_card_has_our_numbers_and_nobody_elses(written):
    output, _ = written

    card = (output / "model_card.md").read_text()

    assert card.startswith("## Evaluation") and "68.3 ± 2.4" in card and "75.0 ± 7.1" in card
    assert "mBERT" not in card


def test_a_suite_of_which_nothing_is_finished_is_still_a_page_and_says_so(tmp_path):
    planned = config(xnli=CLASSIFICATION | {"table": "xnli", "seeds": list(range(1, 21))}, pairs=RETRIEVAL)
    suite_page.write(tmp_path, summed(planned, {}))

    text = (tmp_path / "suite.md").read_text()
    assert text.count("Nothing is finished.") == 2 and "ours xnli seed 12 and 9 more" in text
    assert "Nothing is finished" in (tmp_path / "suite.html").read_text()
