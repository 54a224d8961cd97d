from infoxlm_core.corpora.datasets import Dataset
from infoxlm_core.results import note

ENCODER = {"layers": 3, "hidden": 128, "vocabulary": 12_000, "parameters": 2_200_000}
SCORES = {"model": "InfoXLM", "models": {"InfoXLM": {"encoder": ENCODER}, "untrained": {"encoder": ENCODER}}}
FIGURES = {"retrieval/best": 0.43598, "untrained/retrieval/best": 0.189, "retrieval/best/de": 0.5}
CORPORA = [
    Dataset("mail", "1", held_out=False, languages=("de", "en")),
    Dataset("exam", "2", held_out=True, languages=("en",)),
]


def test_a_note_says_what_on_which_text_how_good_and_where_to_read_on():
    text = note.write(SCORES, FIGURES, CORPORA, "evaluation")

    assert "**InfoXLM**, 3 layers of 128, 2,200,000 parameters, 12,000 pieces of vocabulary." in text
    assert "Trained on mail, in de, en. Evaluated on exam, in en." in text
    assert "| retrieval/best | 0.436 | 0.189 |" in text and "best/de" not in text
    assert "[Report](artifact:evaluation/report.html)" in text


def test_what_is_not_known_is_left_out():
    classifier = {"model": "it", "models": {"it": {"encoder": {}}}}

    text = note.write(classifier, {"classification/mean": 0.5}, [], "evaluation")

    assert text.startswith("**it**\n\n") and "Trained" not in text and "| classification/mean | 0.5 |" in text
