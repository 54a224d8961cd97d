"""The benchmark of the preparation counts rows and CPU time."""

import json

from benchmarks import scale


def test_only_copies_without_a_mark_are_duplicates():
    texts = [scale.mark("Save your changes", copy, is_marked=copy % 5 > 0) for copy in range(100)]

    assert len(set(texts)) == 81  # 80 marked copies and the text itself


def test_preparation_is_measured(tmp_path):
    texts = [
        "The settings of this folder were saved.",
        "Another program has changed the file.",
        "The settings of this folder were saved.",
    ]
    lines = [json.dumps({"text": text, "language": "en"}) for text in texts]
    (tmp_path / "en-0.jsonl").write_text("\n".join(lines) + "\n")

    result = scale.run_ours(tmp_path, 0, "")

    assert result["kept"] == 2
    assert result["phases"] == 6  # not those of test sets and labelled text, which the config lacks
    assert result["tasks"] > 0
    assert result["task_memory"] > 1
