"""A wheel is downloaded once and verified. pip is replaced, so no network is needed."""

import hashlib
import subprocess
from pathlib import Path

import pytest

from components.adapters.sources import package_index
from infoxlm_core.errors import InputError, StorageUnavailable

WHEEL = b"wheel"
SHA256 = hashlib.sha256(WHEEL).hexdigest()


class Pip:
    """Acts as pip: writes a wheel with the content `WHEEL`, or fails with `stderr` if it is set."""

    def __init__(self) -> None:
        self.call_count = 0
        self.stderr = ""

    def run(self, command: list[str], **_: object) -> subprocess.CompletedProcess:
        self.call_count += 1
        if self.stderr:
            return subprocess.CompletedProcess(command, 1, "", self.stderr)
        folder = Path(command[command.index("-d") + 1])
        (folder / "my_app-1.0-py3-none-any.whl").write_bytes(WHEEL)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(monkeypatch) -> Pip:
    pip = Pip()
    monkeypatch.setattr(package_index.subprocess, "run", pip.run)
    return pip


def test_wheel_is_downloaded_once(tmp_path, pip):
    cache = tmp_path / "cache"

    first_path = package_index.download("pypi:My.App==1.0", SHA256, cache)
    second_path = package_index.download("pypi:my-app==1.0", SHA256, cache)

    assert first_path == second_path
    assert first_path.read_bytes() == WHEEL
    assert pip.call_count == 1
    assert [path.name for path in cache.iterdir()] == ["my_app-1.0-py3-none-any.whl"]


def test_another_version_in_the_cache_is_not_used(tmp_path, pip):
    (tmp_path / "my_app-1.0.1-py3-none-any.whl").write_bytes(b"newer")

    assert package_index.download("pypi:my-app==1.0", SHA256, tmp_path).read_bytes() == WHEEL


@pytest.mark.item("S08")
def test_wheel_with_another_digest_is_refused_and_removed(tmp_path, pip):
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
def test_unreachable_index_and_missing_version_have_different_errors(tmp_path, pip, stderr, error):
    pip.stderr = stderr

    with pytest.raises(error, match=r"my-app==1\.0"):
        package_index.download("pypi:my-app==1.0", SHA256, tmp_path)


@pytest.mark.parametrize("requirement", ["my-app", "my-app>=1", "--index-url==1", "my-app==1 --pre", "https://x/y==1"])
def test_only_a_name_and_a_version_are_passed_to_pip(tmp_path, pip, requirement):
    with pytest.raises(InputError, match="NAME==VERSION"):
        package_index.download(f"pypi:{requirement}", SHA256, tmp_path)

    assert pip.call_count == 0
