"""The wheel holds all that a run outside the checkout reads: configs, compiled pipelines, templates."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGED = ("infoxlm_core/", "components/", "pipelines/", "configs/", "pyproject.toml", "README.md", "LICENSE")


@pytest.mark.slow
def test_the_wheel_holds_every_file_that_the_commands_read(tmp_path):
    source = tmp_path / "source"  # a copy: building leaves folders behind, and must see no other files
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("no checkout: git does not say which files belong to it")
    for name in tracked.stdout.split("\n"):
        if name.startswith(PACKAGED):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_symlink():
                (source / name).symlink_to((ROOT / name).readlink())
            elif (ROOT / name).is_file():
                (source / name).write_bytes((ROOT / name).read_bytes())

    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir"]
    subprocess.run([*command, str(tmp_path), str(source)], check=True)

    [wheel] = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    needed = {f"pipelines/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    needed |= {f"pipelines/compiled/{path.name}" for path in (ROOT / "pipelines/compiled").glob("*.yaml")}
    for kind in ("*.py", "*.j2", "*.yaml"):
        needed |= {str(path.relative_to(ROOT)) for path in (ROOT / "infoxlm_core").rglob(kind)}
    assert needed <= held
