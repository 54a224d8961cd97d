"""The first step of a run: what the others get, and what happens if a setting is wrong."""

import json
import shutil

import pytest

from components.check_settings import check_settings
from components.platform import parameters

SOURCE = {"name": "a", "format": "tsv", "path": "a.tsv", "languages": ["en", "de"]}
GIVEN = {
    "preparation": {"languages": ["en", "de"], "corpora": [SOURCE], "held_out_share": 0.1},
    "tokenization": {},
    "finetuning": {},
    "evaluation": {},
}


def test_every_section_comes_out_with_its_changes(tmp_path):
    overrides = {"pretraining.optimization.steps": 20_000, "evaluation.retrieval_pairs": 7}

    *sections, trials = check_settings.python_func(str(tmp_path), **GIVEN, overrides=overrides)

    prepared, _, pretraining, _, evaluation, *_ = (parameters.resolve(str(tmp_path), one) for one in sections)
    assert (pretraining["optimization"]["steps"], evaluation["retrieval_pairs"]) == (20_000, 7)
    assert prepared["languages"] == ["en", "de"] and trials == []


def test_trials_are_checked_with_their_own_settings_and_not_with_the_defaults(tmp_path):
    short = {"optimization": {"steps": 900, "warmup_steps": 90}, "seed": 3}  # by default the warm-up is longer

    *_, trials = check_settings.python_func(
        str(tmp_path),
        **GIVEN,
        trials=[{"trial": {"variant": "full", "seed": 3, "what": ""}, "pretraining": short}],
        overrides={"pretraining.optimization.steps": 120},
    )

    pretraining = parameters.resolve(str(tmp_path), trials[0]["pretraining"])
    assert pretraining == {"optimization": {"steps": 120, "warmup_steps": 90}, "seed": 3}


def test_a_wrong_setting_ends_the_run_at_once_and_its_reason_is_where_submit_reads_it(tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_ID", "toy-1")

    with pytest.raises(SystemExit) as ended:
        check_settings.python_func(str(tmp_path), **GIVEN, overrides={"evaluation.retrieval_pear": 7})

    said = json.loads((tmp_path / "outcome/toy-1/check_settings.json").read_text())
    assert ended.value.code == 2 and said["class"] == "ConfigError"
    assert "evaluation.retrieval_pear: unknown name; known are" in said["message"]


@pytest.mark.parametrize(
    ("overrides", "change", "message"),
    [
        ({"pretraining.contrast.layer": 3}, {}, "contrast.layer (3) is above the 2 layers of"),
        ({"pretraining.batches.side_tokens": 90}, {}, "sequences of 183 tokens"),
        ({}, {"model_type": "gpt2"}, "config.json: model_type is 'gpt2'"),
        ({"pretraining.system": "bert", "pretraining.objectives": {"tlm": 0, "xlco": 0}}, {}, "not 'bert'"),
        ({}, None, "has neither tokenizer.json nor sentencepiece.bpe.model"),
    ],
)
def test_a_start_that_does_not_fit_is_refused_before_any_text_is_read(
    tiny_encoders, tmp_path, monkeypatch, overrides, change, message
):
    monkeypatch.setenv("RUN_ID", "toy-1")
    start = shutil.copytree(tiny_encoders["first"], tmp_path / "start")
    batches = {"block_tokens": 30, "side_tokens": 30}
    pretraining = {"model": {"start": str(start)}, "contrast": {"layer": 2}, "batches": batches}
    _, tokenization, *_ = check_settings.python_func(str(tmp_path), **GIVEN, pretraining=pretraining)
    assert parameters.resolve(str(tmp_path), tokenization)["model"] == str(start)
    if change is None:
        (start / "tokenizer.json").unlink()
    else:
        settings = json.loads((start / "config.json").read_text())
        (start / "config.json").write_text(json.dumps(settings | change))

    with pytest.raises(SystemExit):
        check_settings.python_func(str(tmp_path), **GIVEN, pretraining=pretraining, overrides=overrides)

    said = json.loads((tmp_path / "outcome/toy-1/check_settings.json").read_text())
    assert message in said["message"]


def test_an_ablation_without_a_tracker_is_refused_before_any_text_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_ID", "toy-1")
    monkeypatch.setenv("INFOXLM_TRACKER", "none")
    trial = {"trial": {"variant": "full", "seed": 3, "what": ""}, "pretraining": {}}

    with pytest.raises(SystemExit):
        check_settings.python_func(str(tmp_path), **GIVEN, trials=[trial])

    said = json.loads((tmp_path / "outcome/toy-1/check_settings.json").read_text())
    assert "a sweep reads its trials from a tracker" in said["message"]


def test_sections_are_read_and_passed_on_by_reference(tmp_path):
    corpora = [SOURCE | {"name": f"a{number}", "path": "x" * 200} for number in range(600)]
    preparation = GIVEN["preparation"] | {"corpora": corpora}
    trials = [{"trial": {"variant": "full", "seed": 3, "what": ""}, "pretraining": {"seed": 3}}]
    sent = parameters.fit(str(tmp_path), GIVEN | {"preparation": preparation, "trials": trials})
    assert set(sent["preparation"]) == {"in_store"}

    *sections, changed = check_settings.python_func(str(tmp_path), **sent)

    assert all(set(section) == {"in_store"} for section in sections)
    assert len(parameters.resolve(str(tmp_path), sections[0])["corpora"]) == 600
    assert changed[0]["trial"] == trials[0]["trial"]
    assert all(set(changed[0][name]) == {"in_store"} for name in ("pretraining", "finetuning", "evaluation"))
