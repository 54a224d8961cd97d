"""The store and the endings of components."""

import errno
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.platform import artifacts, keys, runtime, verification
from infoxlm_core import manifests
from infoxlm_core.config import EvaluationConfig, PretrainingConfig
from infoxlm_core.errors import CorpusTooSmall, DataCorrupt, InputError


def build(output: Path) -> dict:
    (output / "part").mkdir()
    (output / "part" / "file").write_text("content")
    return {"lines": 3}


def test_an_artifact_is_made_once_and_found_again(tmp_path):
    first = artifacts.get_or_build(str(tmp_path), "corpus", "abc", build)

    again = artifacts.get_or_build(str(tmp_path), "corpus", "abc", lambda output: pytest.fail("made twice"))

    assert again == first and manifests.read(first, "corpus", "x")["facts"] == {"lines": 3}


def test_a_stage_that_fails_leaves_nothing_behind(tmp_path):
    def fail(output: Path) -> dict:
        build(output)
        raise InputError("no")

    with pytest.raises(InputError):
        artifacts.get_or_build(str(tmp_path), "corpus", "abc", fail)

    assert list((tmp_path / "corpus").iterdir()) == []


def test_what_a_dead_process_left_half_made_is_swept(tmp_path):
    (tmp_path / "corpus" / ".making-xyz").mkdir(parents=True)
    (tmp_path / "corpus" / ".making-xyz.lock").touch()

    artifacts.get_or_build(str(tmp_path), "corpus", "abc", build)

    assert [path.name for path in (tmp_path / "corpus").iterdir()] == ["abc"]


def test_what_a_living_process_is_making_stays(tmp_path):
    def look(output: Path) -> dict:
        artifacts.get_or_build(str(tmp_path), "corpus", "other", build)
        assert output.is_dir()
        return build(output)

    artifacts.get_or_build(str(tmp_path), "corpus", "abc", look)

    assert {path.name for path in (tmp_path / "corpus").iterdir()} == {"abc", "other"}


def test_the_content_of_a_given_model_belongs_to_the_key(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"a")
    first = keys.digest_inputs(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"b")

    assert len(first) == 1 and keys.digest_inputs(str(tmp_path)) != first
    assert keys.digest_inputs(None) == keys.digest_inputs(str(tmp_path / "missing")) == []


def test_the_names_and_contents_of_a_folder_of_data_belong_to_the_key_but_not_where_it_lies(tmp_path):
    for folder, name in (("a", "test.de"), ("b", "test.de"), ("c", "test.fr")):
        (tmp_path / folder / "in").mkdir(parents=True)
        (tmp_path / folder / "in" / name).write_text("text")
    (tmp_path / "d").mkdir()
    first, same, renamed, empty = (keys.digest_inputs(str(tmp_path / folder)) for folder in "abcd")

    assert first == same and len({*first, *renamed, *empty}) == 3
    assert keys.digest_inputs([str(tmp_path / "a"), str(tmp_path / "c")]) == [*first, *renamed]


def write(path: Path, text: str = "text") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_the_name_of_a_file_and_of_a_languages_folder_belong_to_the_key_but_not_where_they_lie(tmp_path):
    german, moved, spanish = (write(tmp_path / name) for name in ("a/b.de.json", "elsewhere/b.de.json", "a/b.es.json"))
    folders = [write(tmp_path / name) for name in ("x/fr/dev_2k.tsv", "y/fr/dev_2k.tsv", "x/de/dev_2k.tsv")]

    assert keys.digest_inputs(german) == keys.digest_inputs(moved) != keys.digest_inputs(spanish)
    for paths in (folders, [str(Path(path).parent) for path in folders]):
        french, same, other = map(keys.digest_inputs, paths)
        assert french == same != other


def test_the_same_files_in_other_roles_are_other_inputs(tmp_path):
    a, b, c = (write(tmp_path / f"{name}.json", name) for name in ("one", "two", "three"))

    assert keys.digest_inputs_by_role({"train": [a, b], "dev": [c]}) == keys.digest_inputs_by_role(
        {"dev": [c], "train": [a, b]}
    )
    assert keys.digest_inputs_by_role({"train": [a, b], "dev": [c]}) != keys.digest_inputs_by_role(
        {"train": [a], "dev": [b, c]}
    )


@pytest.mark.parametrize("name", ["vocab.txt", "merges.txt", "steps/4/model.safetensors"])
def test_a_models_words_and_its_models_of_single_languages_belong_to_the_key(tmp_path, name):
    for file in ("model.safetensors", "selection.json", name):
        write(tmp_path / "model" / file, "first")
    before = keys.digest_inputs(str(tmp_path / "model"))

    write(tmp_path / "model" / name, "second")

    assert keys.digest_inputs(str(tmp_path / "model")) != before


def test_two_who_need_the_same_make_it_one_after_the_other_and_once(tmp_path):
    made, inside, most = [], [], []

    def need(number: int) -> None:
        with artifacts.exclusive(str(tmp_path), "tuned", "abc"):
            inside.append(number)
            most.append(len(inside))
            artifacts.get_or_build(str(tmp_path), "tuned", "abc", lambda output: made.append(number) or time.sleep(0.2))
            inside.remove(number)

    threads = [threading.Thread(target=need, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(made) == 1 and most == [1, 1, 1]


def test_of_a_model_what_is_loaded_belongs_to_the_key_and_nothing_else(tmp_path):
    for name in ("model.safetensors", "tokenizer.json", "manifest.json", "README.md"):
        (tmp_path / name).write_text("first")
    before = keys.digest_inputs(str(tmp_path))
    for name in ("manifest.json", "README.md"):
        (tmp_path / name).write_text("second")
    assert keys.digest_inputs(str(tmp_path)) == before

    (tmp_path / "tokenizer.json").write_text("second")
    assert keys.digest_inputs(str(tmp_path)) != before


def test_a_found_artifact_is_verified(tmp_path):
    made = artifacts.get_or_build(str(tmp_path), "corpus", "abc", build)
    (made / "part/file").write_text("cOntent")

    with pytest.raises(DataCorrupt, match="sha256"):
        artifacts.get_or_build(str(tmp_path), "corpus", "abc", build)


def test_a_found_artifact_is_hashed_again_only_if_a_file_was_touched(tmp_path, monkeypatch):
    made = artifacts.get_or_build(str(tmp_path), "pretrained", "abc", build)
    hashed: list[Path] = []
    hash_of = manifests.file_sha256
    monkeypatch.setattr(manifests, "file_sha256", lambda path: hashed.append(path) or hash_of(path))

    artifacts.lookup(str(tmp_path), "pretrained", "abc")
    assert hashed == []

    (made / "part/file").touch()
    artifacts.lookup(str(tmp_path), "pretrained", "abc")
    artifacts.lookup(str(tmp_path), "pretrained", "abc")
    assert hashed == [made / "part/file"]


def test_what_is_damaged_without_a_trace_is_found_when_it_is_read(tmp_path):
    made = artifacts.get_or_build(str(tmp_path), "pretrained", "abc", build)
    (made / "part/file").write_text("cOntent")
    verification.note(made, verification.state_of(made))  # as if a disk had flipped a bit: no time changes

    assert artifacts.lookup(str(tmp_path), "pretrained", "abc") == artifacts.locate(str(made), hashed=False) == made
    with pytest.raises(DataCorrupt, match="sha256"):
        artifacts.locate(str(made))


def test_the_key_changes_with_config_and_inputs_but_not_with_how_often_to_save():
    config = PretrainingConfig()
    saving = PretrainingConfig(log_every=3, checkpoints={"every": 7, "resume": "pretrained-3f"})

    assert keys.artifact_key("pretrained", config, "a") == keys.artifact_key("pretrained", saving, "a")
    others = [
        keys.artifact_key("pretrained", config, "b"),
        keys.artifact_key("tuned", config, "a"),
        keys.artifact_key("pretrained", PretrainingConfig(seed=2), "a"),
    ]
    assert len({keys.artifact_key("pretrained", config, "a"), *others}) == 4


def test_the_key_changes_with_the_version_of_its_stage_and_not_with_code_or_libraries(monkeypatch):
    before = keys.artifact_key("corpus", EvaluationConfig(), "a")

    monkeypatch.setattr(manifests, "made_by", lambda: {"code": "sha256:other", "torch": "99"})
    assert keys.artifact_key("corpus", EvaluationConfig(), "a") == before

    monkeypatch.setitem(manifests.VERSIONS, "corpus", manifests.VERSIONS["corpus"] + 1)
    assert keys.artifact_key("corpus", EvaluationConfig(), "a") != before


def test_every_kind_of_artifact_that_is_named_by_what_decides_it_has_a_version():
    assert set(manifests.VERSIONS) == set(artifacts.KINDS) - {"promotion"}  # that is named by an MLflow run


@pytest.mark.parametrize(
    ("error", "code", "name"),
    [
        (CorpusTooSmall("have=0 need=1"), 2, "CorpusTooSmall"),
        (DataCorrupt("a is missing"), 3, "DataCorrupt"),
        (OSError(errno.ENOSPC, "No space left on device"), 75, "StorageFull"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 75, "StorageFull"),
        (RuntimeError("surprise"), 70, "InfoXLMError"),
    ],
)
def test_every_ending_has_one_line_and_its_exit_code(tmp_path, capsys, monkeypatch, error, code, name):
    monkeypatch.setenv("RUN_ID", "run-1")
    with pytest.raises(SystemExit) as ended, runtime.ending_clearly(str(tmp_path), "prepare_corpus"):
        raise error

    assert ended.value.code == code
    outcome = json.loads((tmp_path / "outcome/run-1/prepare_corpus.json").read_text())
    assert (outcome["stage"], outcome["code"], outcome["class"]) == ("prepare_corpus", code, name)
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"prepare_corpus: {name}: ")


def test_a_published_artifact_is_found_by_the_next_stage(tmp_path):
    made = artifacts.get_or_build(str(tmp_path), "corpus", "abc", build)
    artifact = SimpleNamespace(path=str(tmp_path / "kfp" / "corpus"), metadata={})

    artifacts.publish(artifact, made)

    location, digest = artifacts.resolve(artifact)
    assert location == made and digest == manifests.read(made, "corpus", "x")["digest"] == artifact.metadata["digest"]
    assert keys.artifact_key("scores", EvaluationConfig(), digest)
