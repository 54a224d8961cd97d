"""The store and the endings of components."""

import errno
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from components import runtime
from infoxlm_core import manifests
from infoxlm_core.config import EvaluationConfig, PretrainingConfig
from infoxlm_core.errors import CorpusTooSmall, InputError, ShardCorrupt


def build(output: Path) -> dict:
    (output / "part").mkdir()
    (output / "part" / "file").write_text("content")
    return {"lines": 3}


def test_an_artifact_is_made_once_and_found_again(tmp_path):
    first = runtime.make(str(tmp_path), "corpus", "abc", build)

    again = runtime.make(str(tmp_path), "corpus", "abc", lambda output: pytest.fail("made twice"))

    assert again == first and manifests.read(first, "corpus", "x")["facts"] == {"lines": 3}


def test_a_stage_that_fails_leaves_nothing_behind(tmp_path):
    def fail(output: Path) -> dict:
        build(output)
        raise InputError("no")

    with pytest.raises(InputError):
        runtime.make(str(tmp_path), "corpus", "abc", fail)

    assert list((tmp_path / "corpus").iterdir()) == []


def test_what_a_dead_process_left_half_made_is_swept(tmp_path):
    (tmp_path / "corpus" / ".making-xyz").mkdir(parents=True)
    (tmp_path / "corpus" / ".making-xyz.lock").touch()

    runtime.make(str(tmp_path), "corpus", "abc", build)

    assert [path.name for path in (tmp_path / "corpus").iterdir()] == ["abc"]


def test_what_a_living_process_is_making_stays(tmp_path):
    def look(output: Path) -> dict:
        runtime.make(str(tmp_path), "corpus", "other", build)
        assert output.is_dir()
        return build(output)

    runtime.make(str(tmp_path), "corpus", "abc", look)

    assert {path.name for path in (tmp_path / "corpus").iterdir()} == {"abc", "other"}


def test_the_content_of_a_given_model_belongs_to_the_key(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"a")
    first = runtime.given(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"b")

    assert len(first) == 1 and runtime.given(str(tmp_path)) != first
    assert runtime.given(None) == runtime.given(str(tmp_path / "missing")) == []


def test_the_names_and_contents_of_a_folder_of_data_belong_to_the_key_but_not_where_it_lies(tmp_path):
    for folder, name in (("a", "test.de"), ("b", "test.de"), ("c", "test.fr")):
        (tmp_path / folder / "in").mkdir(parents=True)
        (tmp_path / folder / "in" / name).write_text("text")
    (tmp_path / "d").mkdir()
    first, same, renamed, empty = (runtime.given(str(tmp_path / folder)) for folder in "abcd")

    assert first == same != renamed != empty
    assert runtime.given([str(tmp_path / "a"), str(tmp_path / "c")]) == [*first, *renamed]


def test_of_a_model_what_is_loaded_belongs_to_the_key_and_nothing_else(tmp_path):
    for name in ("model.safetensors", "tokenizer.json", "manifest.json", "README.md"):
        (tmp_path / name).write_text("first")
    before = runtime.given(str(tmp_path))
    for name in ("manifest.json", "README.md"):
        (tmp_path / name).write_text("second")
    assert runtime.given(str(tmp_path)) == before

    (tmp_path / "tokenizer.json").write_text("second")
    assert runtime.given(str(tmp_path)) != before


def test_a_found_artifact_is_verified(tmp_path):
    made = runtime.make(str(tmp_path), "corpus", "abc", build)
    (made / "part/file").write_text("cOntent")

    with pytest.raises(ShardCorrupt, match="sha256"):
        runtime.make(str(tmp_path), "corpus", "abc", build)


def test_the_key_changes_with_config_and_inputs_but_not_with_how_often_to_save():
    config = PretrainingConfig()
    saving = PretrainingConfig(log_every=3, checkpoints={"every": 7})

    assert runtime.key("x", config, "a") == runtime.key("x", saving, "a")
    others = [
        runtime.key("x", config, "b"),
        runtime.key("y", config, "a"),
        runtime.key("x", PretrainingConfig(seed=2), "a"),
    ]
    assert len({runtime.key("x", config, "a"), *others}) == 4


@pytest.mark.parametrize(
    ("error", "code", "name"),
    [
        (CorpusTooSmall("have=0 need=1"), 2, "CorpusTooSmall"),
        (ShardCorrupt("a is missing"), 3, "ShardCorrupt"),
        (OSError(errno.ENOSPC, "No space left on device"), 75, "StorageFull"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 75, "StorageFull"),
        (RuntimeError("surprise"), 70, "InfoXLMError"),
    ],
)
def test_every_ending_has_one_line_and_its_exit_code(tmp_path, capsys, error, code, name):
    with pytest.raises(SystemExit) as ended, runtime.ending_clearly(str(tmp_path), "prepare_corpus"):
        raise error

    assert ended.value.code == code
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert (outcome["stage"], outcome["code"], outcome["class"]) == ("prepare_corpus", code, name)
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"prepare_corpus: {name}: ")


def test_a_published_artifact_is_found_by_the_next_stage(tmp_path):
    made = runtime.make(str(tmp_path), "corpus", "abc", build)
    artifact = SimpleNamespace(path=str(tmp_path / "kfp" / "corpus"), metadata={})

    runtime.publish(artifact, made)

    location, digest = runtime.find(artifact)
    assert location == made and digest == manifests.read(made, "corpus", "x")["digest"] == artifact.metadata["digest"]
    assert runtime.key("x", EvaluationConfig(), digest)
