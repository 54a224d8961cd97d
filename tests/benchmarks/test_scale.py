"""The benchmark of the preparation counts rows, requests and time."""

import json

from benchmarks import scale


def test_only_copies_without_a_mark_are_duplicates():
    texts = [scale.mark("Save your changes", copy, is_marked=copy % 5 > 0) for copy in range(100)]

    assert len(set(texts)) == 81  # 80 marked copies and the text itself


def test_the_cost_of_every_phase_is_measured(tmp_path):
    texts = [
        "The settings of this folder were saved.",
        "Another program has changed the file.",
        "The settings of this folder were saved.",
    ]
    lines = [json.dumps({"text": text, "language": "en"}) for text in texts]
    (tmp_path / "en-0.jsonl").write_text("\n".join(lines) + "\n")

    result = scale.run_ours(tmp_path, 0, "")

    assert result["kept"] == 2
    assert list(result["phases"]) == ["read", "clean", "unite", "offer", "reduce", "write"]
    for name, phase in result["phases"].items():
        assert phase["tasks"] == 1 and phase["puts"] >= 1, name
    assert len(list(scale.describe_phases(3, result))) == 6
