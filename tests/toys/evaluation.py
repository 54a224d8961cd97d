"""Write the output of an evaluation with known scores."""

import json
from pathlib import Path

import pandas as pd

from infoxlm_core.results import evidence

CARD = "---\nlanguage: [de, en]\nlicense: mit\n---\n# A tiny encoder\n\nIt knows 26 words.\n"


def evaluated(directory: Path, score: float, questions: int = 400, test: str = "one") -> Path:
    """Write an evaluation in which the first `score` of the questions in each of two languages are answered."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = [
        ("retrieval", place, language, direction, f"{test}-{number}", False, number < round(score * questions))
        for place in ("served", "best")
        for language in ("de", "fr")
        for direction in ("from_pivot", "to_pivot")
        for number in range(questions)
    ]
    evidence.write(directory / evidence.FILE, {"InfoXLM": [pd.DataFrame(rows, columns=list(evidence.COLUMNS[1:]))]})
    (directory / "scores.json").write_text(json.dumps({"model": "InfoXLM", "pivot": "en", "test_set": "sha256:t"}))
    (directory / "model_card.md").write_text(CARD)
    return directory
