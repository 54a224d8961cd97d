"""What the soak plans and what it says: that a run is EXACT only if nothing differs."""

import json
import random

import pytest

from benchmarks import soak

EXACT = {"files": {"corpus/0/manifest.json": {"a": "1"}}, "facts": {}, "losses": [["loss", "0x1p0"]],
         "versions": [["sha256:1", ["candidate", "champion"]]]}  # fmt: skip


def test_two_hundred_runs_meet_every_fault_on_both_stores_and_are_planned_alike_each_time():
    plans = [soak.plan(seed) for seed in range(1, 201)]

    assert plans == [soak.plan(seed) for seed in range(1, 201)]
    met = {fault for faults, _, _ in plans for fault in faults}
    assert met >= set(soak.FAULTS) - {"move the clock"}
    assert {store for _, store, _ in plans} == {"S3", "directory"} and {workers for *_, workers in plans} == {0, 2}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"losses": [["loss", "0x1p1"]]}, "other losses"),
        ({"files": {"corpus/0/manifest.json": {"a": "2"}}}, "other files: ['corpus/0/manifest.json']"),
        ({"files": {}}, "other files"),
        ({"versions": []}, "versions []"),
        ({"versions": [["sha256:2", ["candidate", "champion"]]]}, "versions"),
        ({"versions": EXACT["versions"] * 2}, "versions"),
    ],
    ids=str,
)
def test_a_run_that_differs_in_anything_is_not_exact(change, said):
    assert soak.differs(EXACT | change, EXACT).startswith(said) and bool(soak.differs(EXACT | change, EXACT)) == bool(
        said
    )


def test_a_wrong_bit_is_put_into_what_has_a_digest_and_nowhere_else(tmp_path):
    for name in ("runs/r/step=0000000004/meta.json", "corpus/0123456789abcdef/a.parquet", "runs/r/metrics.jsonl"):
        (tmp_path / "store" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "store" / name).write_bytes(bytes(9))

    chosen = {soak.damage(tmp_path, random.Random(seed)) for seed in range(20)}

    assert chosen == {"store/runs/r/step=0000000004/meta.json", "store/corpus/0123456789abcdef/a.parquet"}
    assert (tmp_path / "store/runs/r/metrics.jsonl").read_bytes() == bytes(9)


@pytest.mark.parametrize(("fault", "wrong"), [("SIGTERM", "damaged, and not by us: oh"), ("damage", "")])
def test_what_is_damaged_is_made_again_only_if_the_soak_has_damaged_it(tmp_path, monkeypatch, fault, wrong):
    one = soak.Soak(None, soak.Run(1, "directory", 0, [fault]), tmp_path, tmp_path)
    codes = iter([-9 if fault == "damage" else 75, 3, 0])
    one.run.said = [f"oh {one.store}/corpus/0123456789abcdef"]
    monkeypatch.setattr(one, "attempt", lambda _: next(codes))
    monkeypatch.setattr(one, "wrong", lambda: "")
    monkeypatch.setattr(soak, "damage", lambda *_: "store/a")

    one.until_it_ends()

    assert one.run.wrong.startswith(wrong) and bool(one.run.wrong) == bool(wrong)


def test_the_page_counts_what_happened_and_names_what_was_not_exact(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "RESULTS", tmp_path / "soak.json")
    runs = [soak.Run(1, "S3", 0, ["SIGTERM"], ["SIGTERM at 3.1"], [75, 0], ["asked to stop"], 9.0),
            soak.Run(2, "directory", 2, ["SIGTERM"], ["SIGTERM at 0.2"], [70], ["oh"], 2.0, "ended with 70"),
    ]  # fmt: skip

    soak.write(runs)

    assert soak.read() == runs and len(json.loads(soak.RESULTS.read_text())["runs"]) == 2
    page = (tmp_path / "soak.md").read_text()
    assert "1 of 2 runs ended EXACT" in page and "| SIGTERM | 2 | 1 |" in page
    assert "not EXACT: seed 2, ['SIGTERM at 0.2']: ended with 70" in page
