"""The first step of a run returns validated settings to the later steps, or ends the run."""

import json
import shutil

import pytest

from components.check_settings import check_settings
from components.platform import parameters

CORPUS = {"name": "a", "format": "tsv", "path": "a.tsv", "languages": ["en", "de"]}
SECTIONS = {
    "preparation": {"languages": ["en", "de"], "corpora": [CORPUS], "held_out_share": 0.1},
    "tokenization": {},
    "finetuning": {},
    "evaluation": {},
}
TRIAL = {"variant": "full", "seed": 3, "what": ""}


def read_error(store, **arguments) -> dict:
    """Call the component, which must fail. Return the error that `infoxlm submit` reads."""
    with pytest.raises(SystemExit):
        check_settings.python_func(str(store), **SECTIONS, **arguments)
    return json.loads((store / "outcome/by-hand/check_settings.json").read_text())


def test_every_section_is_returned_with_its_overrides(tmp_path):
    overrides = {"pretraining.optimization.steps": 20_000, "evaluation.retrieval_pairs": 7}

    *references, trials = check_settings.python_func(str(tmp_path), **SECTIONS, overrides=overrides)

    preparation, _, pretraining, _, evaluation, *_ = (
        parameters.dereference(str(tmp_path), reference) for reference in references
    )
    assert preparation["languages"] == ["en", "de"]
    assert pretraining["optimization"]["steps"] == 20_000
    assert evaluation["retrieval_pairs"] == 7
    assert trials == []


def test_trials_are_validated_with_their_own_settings(tmp_path):
    short = {"optimization": {"steps": 900, "warmup_steps": 90}, "seed": 3}  # by default, the warm-up is longer

    *_, trials = check_settings.python_func(
        str(tmp_path),
        **SECTIONS,
        trials=[{"trial": TRIAL, "pretraining": short}],
        overrides={"pretraining.optimization.steps": 120},
    )

    pretraining = parameters.dereference(str(tmp_path), trials[0]["pretraining"])
    assert pretraining == {"optimization": {"steps": 120, "warmup_steps": 90}, "seed": 3}


def test_wrong_setting_ends_the_run_with_an_error_in_the_store(tmp_path):
    error = read_error(tmp_path, overrides={"evaluation.retrieval_pear": 7})

    assert (error["class"], error["code"]) == ("ConfigError", 2)
    assert "evaluation.retrieval_pear: unknown name; known are" in error["message"]


@pytest.mark.parametrize(
    ("overrides", "config_change", "message"),
    [
        ({"pretraining.contrast.layer": 3}, {}, "contrast.layer (3) is above the 2 layers of"),
        ({"pretraining.batches.side_tokens": 90}, {}, "sequences of 183 tokens"),
        ({}, {"model_type": "gpt2"}, "config.json: model_type is 'gpt2'"),
        ({"pretraining.system": "bert", "pretraining.objectives": {"tlm": 0, "xlco": 0}}, {}, "not 'bert'"),
    ],
)
def test_unsuitable_start_is_refused(tiny_encoders, tmp_path, overrides, config_change, message):
    start = shutil.copytree(tiny_encoders["first"], tmp_path / "start")
    pretraining = {
        "model": {"start": str(start)},
        "contrast": {"layer": 2},
        "batches": {"block_tokens": 30, "side_tokens": 30},
    }
    _, tokenization, *_ = check_settings.python_func(str(tmp_path), **SECTIONS, pretraining=pretraining)
    assert parameters.dereference(str(tmp_path), tokenization)["model"] == str(start)
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps(config | config_change))

    assert message in read_error(tmp_path, pretraining=pretraining, overrides=overrides)["message"]


def test_guard_set_that_cannot_be_measured_is_refused_before_the_training(tmp_path):
    guard = tmp_path / "guard"
    guard.mkdir()
    (guard / "general.en-de.en").write_text("One.\nTwo.\n")
    (guard / "general.en-de.de").write_text("Eins.\n")

    error = read_error(tmp_path, overrides={"evaluation.guard": {"data": str(guard)}})

    assert (error["class"], error["code"]) == ("ParallelMismatch", 2)
    assert "general.en-de.en has 2 lines" in error["message"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "labelled: no such file or directory: give a path"),
        (["notes.txt"], "labelled: no labelled text in this directory"),
        (["train-en.tsv", "dev-de.tsv"], "labelled: no file has rows for the test (finetuning.data). Add one, such as"),
    ],
)
def test_labelled_text_without_files_for_the_test_is_refused_before_the_training(tmp_path, names, message):
    data = tmp_path / "labelled"
    for name in names:
        data.mkdir(exist_ok=True)
        (data / name).write_text("One.\tyes\n")

    error = read_error(tmp_path, overrides={"finetuning.data": str(data)})

    assert (error["class"], error["code"]) == ("InputError", 2)
    assert message in error["message"]
    data.mkdir(exist_ok=True)
    (data / "test-en.tsv").write_text("One.\tyes\n")
    check_settings.python_func(str(tmp_path), **SECTIONS, overrides={"finetuning.data": str(data)})


def test_ablation_without_a_tracker_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("INFOXLM_TRACKER", "none")

    error = read_error(tmp_path, trials=[{"trial": TRIAL, "pretraining": {}}])

    assert "a sweep reads its trials from a tracker" in error["message"]


def test_large_sections_are_read_and_returned_by_reference(tmp_path):
    corpora = [CORPUS | {"name": f"a{number}", "path": "x" * 200} for number in range(600)]
    preparation = SECTIONS["preparation"] | {"corpora": corpora}
    trials = [{"trial": TRIAL, "pretraining": {"seed": 3}}]
    references = parameters.store_if_large(str(tmp_path), SECTIONS | {"preparation": preparation, "trials": trials})
    assert set(references["preparation"]) == {"in_store"}

    *sections, checked_trials = check_settings.python_func(str(tmp_path), **references)

    assert all(set(section) == {"in_store"} for section in sections)
    assert len(parameters.dereference(str(tmp_path), sections[0])["corpora"]) == 600
    assert checked_trials[0]["trial"] == TRIAL
    assert all(set(checked_trials[0][name]) == {"in_store"} for name in ("pretraining", "finetuning", "evaluation"))
