"""What may change between two starts of a training, and what may not."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from infoxlm_core.config import PretrainingConfig, StageConfig
from infoxlm_core.errors import ConfigError, ConfigMismatch
from infoxlm_core.training.fingerprint import Fingerprint, digest_inputs, digest_inputs_by_role
from tests.toys.pretraining import tiny_config

INPUTS = {"shards": "sha256:a", "tokenizer": "sha256:t"}


def fingerprint(version: int = 1, inputs=INPUTS, recorded=None, **changes) -> Fingerprint:
    found = Fingerprint.of(tiny_config(**changes), version, inputs)
    return Fingerprint(found.compared, found.recorded | (recorded or {}))


@pytest.mark.parametrize(("name", "before", "now"), [("code", "sha256:a", "sha256:b"), ("workers", 1, 8)])
def test_other_code_libraries_threads_and_workers_are_told_in_one_line_with_both_values(caplog, name, before, now):
    meta = fingerprint(recorded={name: before}).meta()

    fingerprint(recorded={name: now}).check(meta, "runs/x")

    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.messages == [f"runs/x resumes with changes: {name} was {before!r}, is {now!r}"]


@pytest.mark.item("F18")
@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({"inputs": INPUTS | {"shards": "sha256:b"}}, "shards was 'sha256:a', is 'sha256:b'"),
        ({"version": 2}, "version was 1, is 2"),
        ({"seed": 3, "objectives": {"tlm": 0.5}}, "objectives.tlm was 1.0, is 0.5; seed was 1, is 3"),
    ],
)
def test_other_data_tokenizer_and_settings_are_refused_with_both_values_and_the_ways_out(changes, differences):
    with pytest.raises(ConfigMismatch) as refused:
        fingerprint(**changes).check(fingerprint().meta(), "store/runs/pretrained-3f")

    assert str(refused.value) == (
        f"store/runs/pretrained-3f was started with other data or settings: {differences}. Change them back, accept "
        "the changes with checkpoints.resume: pretrained-3f, or delete store/runs/pretrained-3f to start over"
    )


def candidates(value: Any, annotation: Any) -> list[Any]:
    """Other values that a setting might take."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2, value + 1, value / 2, value // 2, 0.5, 0]
    if isinstance(value, tuple):
        return [tuple(part / 2 for part in value)]
    return [other for other in get_args(annotation) if isinstance(other, str)]


def changed(config: StageConfig, *place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each setting below a config by its name, and a valid config where it alone is another."""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, StageConfig):
            yield from changed(value, *place, name)
            continue
        for other in candidates(value, field.annotation):
            change: Any = {name: other}
            for section in reversed(place):
                change = {section: change}
            try:
                found = tiny_config(**change)
            except ConfigError:
                continue
            if found != tiny_config():
                yield ".".join((*place, name)), change
                break


FREE = ("checkpoints.", "probe.", "log_every", "model.sharded", "model.recompute", "model.compiled")


@pytest.mark.item("F18")
def test_every_setting_that_decides_the_result_is_refused_and_named_when_it_is_another(record_property):
    before, refused = fingerprint().meta(), set()
    all_of_them = dict(changed(tiny_config()))
    for name, change in all_of_them.items():
        try:
            fingerprint(**change).check(before, "runs/x")
        except ConfigMismatch as error:
            assert f"was started with other data or settings: {name} was " in str(error) and "; " not in str(error)
            refused.add(name)

    record_property("figure", f"{len(refused)} settings refused")
    assert refused == {name for name in all_of_them if not name.startswith(FREE)} and len(refused) >= 40
    assert PretrainingConfig().result_fields().keys() | {"guard", "tokens"} == {
        "system", "seed", *(name.partition(".")[0] for name in refused)
    }  # fmt: skip


def test_accepted_changes_are_logged(caplog):
    fingerprint(seed=2).check(fingerprint().meta(), "runs/x", accept_changes=True)

    assert caplog.messages == ["runs/x resumes with changes: seed was 1, is 2"]


def test_settings_of_saving_logging_and_probing_may_change(caplog):
    now = fingerprint(checkpoints={"every": 5, "keep": 1, "resume": "x"}, log_every=7, probe={"every": 3})

    now.check(fingerprint().meta(), "runs/x")

    assert not caplog.messages


def test_the_digest_of_an_input_replaces_its_path():
    first, moved = (
        Fingerprint.of(tiny_config(model={"start": path}), 1, {"model.start": "sha256:s"}).compared
        for path in ("/a/xlmr", "/b/xlmr")
    )

    assert first == moved and first["model.start"] == "sha256:s"


def write(path: Path, text: str = "text") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_a_missing_input_has_no_digest(tmp_path):
    assert digest_inputs(None) == digest_inputs(str(tmp_path / "missing")) == []


def test_names_and_contents_of_data_count_but_not_their_location(tmp_path):
    german, moved, spanish = (write(tmp_path / name) for name in ("a/b.de.json", "elsewhere/b.de.json", "a/b.es.json"))
    files = [write(tmp_path / name) for name in ("x/fr/dev_2k.tsv", "y/fr/dev_2k.tsv", "x/de/dev_2k.tsv")]
    nested = [write(tmp_path / name) for name in ("c/in/test.de", "d/in/test.de", "e/in/test.fr")]

    assert digest_inputs(german) == digest_inputs(moved) != digest_inputs(spanish)
    languages = [str(Path(path).parent) for path in files]
    data = [str(Path(path).parents[1]) for path in nested]
    for paths in (files, languages, data):
        first, same, other = map(digest_inputs, paths)
        assert first == same != other


def test_the_same_files_in_other_roles_are_other_inputs(tmp_path):
    a, b, c = (write(tmp_path / f"{name}.json", name) for name in ("one", "two", "three"))

    assert digest_inputs_by_role({"train": [a, b], "dev": [c]}) == digest_inputs_by_role({"dev": [c], "train": [a, b]})
    assert digest_inputs_by_role({"train": [a, b], "dev": [c]}) != digest_inputs_by_role({"train": [a], "dev": [b, c]})


@pytest.mark.parametrize(
    ("name", "counts"),
    [("model.safetensors", True), ("vocab.txt", True), ("tokenizer.json", True), ("steps/4/model.safetensors", True),
     ("manifest.json", False), ("README.md", False)],
)  # fmt: skip
def test_of_a_model_only_the_files_that_are_loaded_count(tmp_path, name, counts):
    for file in ("model.safetensors", "selection.json", name):
        write(tmp_path / "model" / file, "first")
    before = digest_inputs(str(tmp_path / "model"))

    write(tmp_path / "model" / name, "second")

    assert (digest_inputs(str(tmp_path / "model")) != before) == counts
