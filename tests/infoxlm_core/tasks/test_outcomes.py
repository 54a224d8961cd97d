"""Question by question: the same question has the same name, and every question a row."""

import pandas as pd
import torch

from infoxlm_core.tasks import outcomes


def test_a_sentence_asked_in_two_languages_is_one_question_with_a_row_for_each_direction():
    pairs = {"de": [("Save", "Speichern"), ("Open", "Öffnen")], "fr": [("Save", "Enregistrer")]}
    right = {code: {way: torch.ones(len(rows), dtype=torch.bool) for way in ("from_pivot", "to_pivot")}
             for code, rows in pairs.items()}  # fmt: skip
    unshared = {"de": torch.tensor([True, False]), "fr": torch.tensor([True])}

    table = outcomes.of_retrieval(pairs, {"best": right}, unshared)

    assert list(table["language"]) == ["de", "de", "de", "de", "fr", "fr"]
    assert table.groupby("question")["language"].nunique().tolist() in ([1, 2], [2, 1])
    assert table["unshared"].sum() == 4 and table["right"].all()


def test_the_same_labelled_row_twice_is_two_questions():
    rows = pd.DataFrame({"text": ["a", "a"], "label": ["x", "x"], "language": ["en", "en"], "predicted": ["x", "y"]})

    table = outcomes.of_classification(rows)

    assert table["question"].nunique() == 2
    assert table["right"].tolist() == [True, False]
