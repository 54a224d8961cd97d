"""An installed package holds every file that its commands read: configs, compiled pipelines, templates."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGED = (
    "infoxlm_core/", "components/", "pipelines/", "configs/", "pyproject.toml", "setup.py", "README.md", "LICENSE"
)  # fmt: skip


@pytest.mark.slow
def test_the_wheel_of_a_clone_holds_every_file_that_the_commands_read(tmp_path):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("this is no git checkout, so the files of the project are not known")
    # Build a copy: a build leaves folders behind. The copy is a git repository as well, because setuptools-scm, which
    # is installed for this test, asks git which files exist.
    clone = tmp_path / "clone"
    for name in tracked.stdout.splitlines():
        if name.startswith(PACKAGED) and (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(["git", "init", "--quiet"], cwd=clone, check=True)
    subprocess.run(["git", "add", "."], cwd=clone, check=True)

    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir"]
    subprocess.run([*command, str(tmp_path), str(clone)], check=True)

    [wheel] = tmp_path.glob("*.whl")
    packaged_files = set(zipfile.ZipFile(wheel).namelist())
    expected_files = {f"pipelines/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    expected_files |= {f"pipelines/compiled/{path.name}" for path in (ROOT / "pipelines/compiled").glob("*.yaml")}
    for pattern in ("*.py", "*.j2", "*.yaml"):
        expected_files |= {str(path.relative_to(ROOT)) for path in (ROOT / "infoxlm_core").rglob(pattern)}
    assert expected_files <= packaged_files
