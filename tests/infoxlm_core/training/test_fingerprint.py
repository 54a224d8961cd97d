"""What may change between two starts of a training, and what may not."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from infoxlm_core.config import PretrainingConfig, StageConfig
from infoxlm_core.errors import ConfigError, ConfigMismatch
from infoxlm_core.training.fingerprint import Fingerprint, digest_inputs, digest_inputs_by_role
from tests.toys.pretraining import tiny_config

INPUTS = {"shards": "sha256:a", "tokenizer": "sha256:t"}


def make_fingerprint(version: int = 1, inputs=INPUTS, recorded=None, **settings) -> Fingerprint:
    fingerprint = Fingerprint.of(tiny_config(**settings), version, inputs)
    return replace(fingerprint, recorded=fingerprint.recorded | (recorded or {}))


def test_changes_of_code_and_workers_are_logged_with_both_values(caplog):
    meta = make_fingerprint(recorded={"code": "sha256:a", "workers": 1}).meta()

    make_fingerprint(recorded={"code": "sha256:b", "workers": 8}).check(meta, "runs/x")

    assert caplog.messages == ["runs/x resumes with changes: code was 'sha256:a', is 'sha256:b'; workers was 1, is 8"]


@pytest.mark.item("F18")
@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({"inputs": INPUTS | {"shards": "sha256:b"}}, "shards was 'sha256:a', is 'sha256:b'"),
        ({"version": 2}, "version was 1, is 2"),
        ({"seed": 3, "objectives": {"tlm": 0.5}}, "objectives.tlm was 1.0, is 0.5; seed was 1, is 3"),
    ],
)
def test_other_data_versions_and_settings_are_refused_with_both_values_and_the_remedies(changes, differences):
    with pytest.raises(ConfigMismatch) as failure:
        make_fingerprint(**changes).check(make_fingerprint().meta(), "store/runs/pretrained-3f")

    assert str(failure.value) == (
        f"store/runs/pretrained-3f was started with other data or settings: {differences}. Change them back, accept "
        "the changes with pretraining.checkpoints.resume: pretrained-3f, or delete store/runs/pretrained-3f to start "
        "over"
    )


def list_other_values(value: Any, annotation: Any) -> list[Any]:
    """Return values that a setting might have instead of its value."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2, value + 1, value / 2, value // 2, 0.5, 0]
    if isinstance(value, tuple):
        return [tuple(part / 2 for part in value)]
    return [choice for choice in get_args(annotation) if isinstance(choice, str)]


def change_each_setting(config: StageConfig, *sections: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each setting, and arguments of `tiny_config` that change only this setting."""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, StageConfig):
            yield from change_each_setting(value, *sections, name)
            continue
        for other_value in list_other_values(value, field.annotation):
            change: Any = {name: other_value}
            for section in reversed(sections):
                change = {section: change}
            try:
                is_changed = tiny_config(**change) != tiny_config()
            except ConfigError:
                continue
            if is_changed:
                yield ".".join((*sections, name)), change
                break


FREE_SETTINGS = ("checkpoints.", "probe.", "log_every", "model.sharded", "model.recompute", "model.compiled")


@pytest.mark.item("F18")
def test_a_change_of_any_setting_that_determines_the_result_is_refused(record_property):
    meta = make_fingerprint().meta()
    changes = dict(change_each_setting(tiny_config()))
    refused = set()
    for name, change in changes.items():
        try:
            make_fingerprint(**change).check(meta, "runs/x")
        except ConfigMismatch as error:
            assert f"was started with other data or settings: {name} was " in str(error)
            assert "; " not in str(error)
            refused.add(name)

    record_property("figure", f"{len(refused)} settings refused")
    assert refused == {name for name in changes if not name.startswith(FREE_SETTINGS)}
    assert len(refused) >= 40
    refused_sections = {name.partition(".")[0] for name in refused} | {"system", "seed"}
    assert PretrainingConfig().result_fields().keys() | {"guard", "tokens"} == refused_sections


def test_the_digest_of_an_input_replaces_its_path():
    first = Fingerprint.of(tiny_config(model={"start": "/a/xlmr"}), 1, {"model.start": "sha256:s"})
    moved = Fingerprint.of(tiny_config(model={"start": "/b/xlmr"}), 1, {"model.start": "sha256:s"})

    assert first.compared == moved.compared
    assert first.compared["model.start"] == "sha256:s"


def write(path: Path, text: str = "text") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_a_missing_input_has_no_digest(tmp_path):
    assert digest_inputs(None) == digest_inputs(str(tmp_path / "missing")) == []


@pytest.mark.parametrize(
    ("files", "input_depth"),
    [
        (("a/b.de.json", "moved/b.de.json", "a/b.es.json"), 2),  # files
        (("x/fr/dev_2k.tsv", "y/fr/dev_2k.tsv", "x/de/dev_2k.tsv"), 3),
        (("x/fr/dev_2k.tsv", "y/fr/dev_2k.tsv", "x/de/dev_2k.tsv"), 2),  # folders named after a language
        (("c/in/test.de", "d/in/test.de", "e/in/test.fr"), 1),  # folders
    ],
)
def test_the_digest_of_data_depends_on_names_that_tell_the_language_but_not_on_the_location(
    tmp_path, files, input_depth
):
    digests = []
    for file in files:
        write(tmp_path / file)
        digests.append(digest_inputs(str(tmp_path.joinpath(*file.split("/")[:input_depth]))))

    first, moved, other_language = digests
    assert first == moved != other_language


def test_the_digest_of_data_depends_on_the_roles_of_files_but_not_on_the_order_of_roles(tmp_path):
    a, b, c = [write(tmp_path / f"{name}.json", name) for name in "abc"]
    digest = digest_inputs_by_role({"train": [a, b], "dev": [c]})

    assert digest == digest_inputs_by_role({"dev": [c], "train": [a, b]})
    assert digest != digest_inputs_by_role({"train": [a], "dev": [b, c]})


@pytest.mark.parametrize(
    ("name", "is_included"),
    [("model.safetensors", True), ("vocab.txt", True), ("tokenizer.json", True), ("steps/4/model.safetensors", True),
     ("1_Pooling/config.json", True), ("onnx/config.json", False), ("manifest.json", False), ("README.md", False)],
)  # fmt: skip
def test_the_digest_of_a_model_includes_only_the_files_that_are_loaded(tmp_path, name, is_included):
    for file in ("model.safetensors", "selection.json", "modules.json", name):
        write(tmp_path / "model" / file, "before")
    digest = digest_inputs(str(tmp_path / "model"))

    write(tmp_path / "model" / name, "after")

    assert (digest_inputs(str(tmp_path / "model")) != digest) == is_included
