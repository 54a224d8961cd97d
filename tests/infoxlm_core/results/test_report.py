"""How an evaluated run is described, and the counts of a cleaning report."""

from infoxlm_core.corpora.datasets import Dataset
from infoxlm_core.results import report

ENCODER = {"layers": 3, "hidden": 128, "vocabulary": 12_000, "parameters": 2_200_000}
SCORES = {"model": "InfoXLM", "models": {"InfoXLM": {"encoder": ENCODER}, "untrained": {"encoder": ENCODER}}}
METRICS = {"retrieval/served": 0.43598, "untrained/retrieval/served": 0.189, "retrieval/served/de": 0.5}
CORPORA = [
    Dataset("mail", "1", held_out=False, languages=("de", "en")),
    Dataset("exam", "2", held_out=True, languages=("en",)),
]


def test_description_of_a_run_has_model_text_headlines_and_links():
    text = report.describe_run(SCORES, METRICS, CORPORA, "evaluation")

    assert "**InfoXLM**, 3 layers of 128, 2,200,000 parameters, 12,000 pieces of vocabulary." in text
    assert "Trained on mail, in de, en. Evaluated on exam, in en." in text
    assert "| retrieval/served | 0.436 | 0.189 |" in text
    assert "served/de" not in text
    assert "[Report](artifact:evaluation/report.html)" in text


def test_description_of_a_classifier_without_encoder_and_corpora_has_only_its_headlines():
    scores = {"model": "classifier", "models": {"classifier": {"encoder": {}}}}

    text = report.describe_run(scores, {"classification/mean": 0.5}, [], "evaluation")

    assert text.startswith("**classifier**\n\n")
    assert "Trained" not in text
    assert "| classification/mean | 0.5 |" in text


def test_lines_of_a_cleaning_report_are_summed_by_corpus_kind_and_reason():
    file = {"corpus": "web", "kind": "pairs", "file": "web.tsv", "read": 10, "kept": 7, "dropped": {"too_short": 3}}

    counts = report.count_lines({"files": [file | {"language": "de"}, file | {"language": "zh"}]})

    assert counts["by_corpus"] == {("web", "pairs"): {"read": 20, "kept": 14, "too_short": 6}}
    assert counts["by_kind"] == {"pairs": {"read": 20, "kept": 14, "too_short": 6}}
    assert counts["kept"] == {"de": {"pairs": 7}, "zh": {"pairs": 7}}
