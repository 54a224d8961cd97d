"""What may change between two starts of a training, and what may not."""

import logging
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from infoxlm_core.config import PretrainingConfig, StageConfig
from infoxlm_core.errors import ConfigError, ConfigMismatch
from infoxlm_core.training.fingerprint import Fingerprint
from tests.toys.pretraining import tiny_config

INPUTS = {"shards": "sha256:a", "tokenizer": "sha256:t"}


def fingerprint(version: int = 1, inputs=INPUTS, recorded=None, **changes) -> Fingerprint:
    found = Fingerprint.of(tiny_config(**changes), version, inputs)
    return Fingerprint(found.compared, found.recorded | (recorded or {}))


@pytest.mark.parametrize(
    ("name", "before", "now"),
    [
        ("code", "sha256:a", "sha256:b"),
        ("pyarrow", "25.0.0", "25.0.1"),
        ("threads", 1, 2),
        ("workers", 1, 8),
        ("device", "cpu", "cuda"),
    ],
)
def test_other_code_libraries_threads_and_workers_are_told_in_one_line_with_both_values(caplog, name, before, now):
    meta = fingerprint(recorded={name: before}).meta()

    fingerprint(recorded={name: now}).check(meta, "runs/x")

    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.messages == [f"runs/x goes on with what it did not begin with: {name} was {before!r}, is {now!r}"]


@pytest.mark.item("F18")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"inputs": INPUTS | {"shards": "sha256:b"}}, "shards was 'sha256:a', is 'sha256:b'"),
        ({"inputs": INPUTS | {"tokenizer": "sha256:u"}}, "tokenizer was 'sha256:t', is 'sha256:u'"),
        ({"version": 2}, "version was 1, is 2"),
        ({"seed": 2}, "seed was 1, is 2"),
        ({"batches": {"micro_batch_size": 2}}, "batches.micro_batch_size was 4, is 2"),
        ({"seed": 3, "objectives": {"tlm": 0.5}}, "objectives.tlm was 1.0, is 0.5; seed was 1, is 3"),
    ],
)
def test_other_data_tokenizer_and_settings_are_refused_with_both_values_and_the_ways_out(changes, said):
    with pytest.raises(ConfigMismatch) as refused:
        fingerprint(**changes).check(fingerprint().meta(), "store/runs/pretrained-3f")

    assert str(refused.value) == (
        f"store/runs/pretrained-3f was begun otherwise: {said}: set it back, go on all the same with "
        "checkpoints.resume: pretrained-3f, or remove store/runs/pretrained-3f to start over"
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
            assert f"begun otherwise: {name} was " in str(error) and "; " not in str(error)
            refused.add(name)

    record_property("figure", f"{len(refused)} settings refused")
    assert refused == {name for name in all_of_them if not name.startswith(FREE)} and len(refused) >= 40
    assert PretrainingConfig().result_fields().keys() | {"guard"} == {
        "system", "seed", *(name.partition(".")[0] for name in refused)
    }  # fmt: skip


def test_a_change_that_is_accepted_is_only_told(caplog):
    fingerprint(seed=2).check(fingerprint().meta(), "runs/x", accepted=True)

    assert caplog.messages == ["runs/x goes on with what it did not begin with: seed was 1, is 2"]


def test_a_checkpoint_of_an_older_version_can_be_accepted(caplog):
    older = {"fingerprint": {"seed": 1, "threads": 1}}

    fingerprint().check(older, "runs/x", accepted=True)

    assert "threads was 1, is None" in caplog.text


def test_what_only_says_how_often_to_save_log_and_probe_may_change_without_a_word(caplog):
    now = fingerprint(checkpoints={"every": 5, "keep": 1, "resume": "x"}, log_every=7, probe={"every": 3})

    now.check(fingerprint().meta(), "runs/x")

    assert not caplog.messages


def test_an_input_takes_the_place_of_the_path_that_names_it():
    moved = [
        Fingerprint.of(tiny_config(model={"start": path}), 1, {"model.start": "sha256:s"}).compared
        for path in ("/a/xlmr", "/b/xlmr")
    ]

    assert moved[0] == moved[1] and moved[0]["model.start"] == "sha256:s"
