"""Write the output of an evaluation with known scores."""

import json
from pathlib import Path

import pandas as pd

from infoxlm_core.results import evidence

CARD = "---\nlanguage: [de, en]\nlicense: mit\n---\n# A tiny encoder\n\nIt knows 26 words.\n"


def evaluated(
    directory: Path, score: float, questions: int = 400, test: str = "one", start: float | None = None
) -> Path:
    """Write an evaluation in which the first `score` of the questions in each of two languages are answered.

    With `start`, the model before the training answers the first `start` of the same questions.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shares = {"InfoXLM": score} if start is None else {"InfoXLM": score, evidence.PUBLIC_START: start}
    outcomes = {model: _tabulate(share, questions, test) for model, share in shares.items()}
    evidence.write(directory / evidence.FILE, outcomes)
    (directory / "scores.json").write_text(json.dumps({"model": "InfoXLM", "pivot": "en", "test_set": "sha256:t"}))
    (directory / "model_card.md").write_text(CARD)
    return directory


def _tabulate(share: float, questions: int, test: str) -> pd.DataFrame:
    rows = [
        ("retrieval", place, language, direction, f"{test}-{number}", False, number < round(share * questions))
        for place in ("served", "best")
        for language in ("de", "fr")
        for direction in ("from_pivot", "to_pivot")
        for number in range(questions)
    ]
    return pd.DataFrame(rows, columns=list(evidence.COLUMNS[1:]))
