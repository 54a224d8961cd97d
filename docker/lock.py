"""Write the locks of the image anew: exact versions, those of constraints.txt, each with the hash of its one file.

    make lock

    build.lock         what builds our own package
    requirements.lock  everything but torch: the same for both variants of the image
    torch-cpu.lock     torch from https://download.pytorch.org/whl/cpu: PyPI has no CPU build for Linux
    torch-cuda.lock    torch from PyPI, with the CUDA libraries that it asks for

pip itself chooses the files, for this Python and platform: run it with the Python of the image.
"""

import json
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
EXTRAS = ("server", "signing")
"""What the image has beside the package's own dependencies: it is MLflow's server, too, and promotes signed models."""

TORCH = re.compile("torch|triton|nvidia-.*|cuda-.*")
"""Names of the packages whose versions or files differ between the variants."""

Locked = dict[str, tuple[str, str]]
"""Name -> version, sha256."""


def choose(*requirements: str, options: tuple[str, ...] = ()) -> Locked:
    """Let pip choose a wheel for each requirement and for everything that it needs, without installing anything."""
    command = [sys.executable, "-m", "pip", *options, "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--prefer-binary", "--report", "-", "-c", str(CONSTRAINTS), *requirements]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)  # noqa: S603 - our own pip
    return {
        re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower(): (
            item["metadata"]["version"],
            item["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for item in report["install"]
    }


def write(name: str, locked: Locked, *head: str) -> None:
    lines = [f"# {name}: made by `make lock` for Python 3.11 on Linux x86-64", *head]
    for package, (version, sha256) in sorted(locked.items()):
        lines += [f"{package}=={version} \\", f"    --hash=sha256:{sha256}"]
    (ROOT / "docker" / name).write_text("\n".join(lines) + "\n")
    print(f"docker/{name}: {len(locked)} packages")


def main() -> None:
    if (sys.version_info[:2], sys.platform, platform.machine()) != ((3, 11), "linux", "x86_64"):
        sys.exit("make lock needs Python 3.11 on Linux x86-64, as in the image")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    [torch] = re.findall(r"^torch==(.*)$", CONSTRAINTS.read_text(), re.MULTILINE)

    write("build.lock", choose("setuptools>=77", "setuptools-scm"))  # seqeval's version is made by the second
    everything = choose(*wanted)
    write("requirements.lock", {name: found for name, found in everything.items() if not TORCH.fullmatch(name)})
    write(
        "torch-cpu.lock",
        choose("--no-deps", "--retries=1", "--extra-index-url", CPU_INDEX, f"torch=={torch}+cpu"),
        "# The hash is that of the file found when this was made. If the index has another, make the lock anew.",
        f"--extra-index-url {CPU_INDEX}",
    )
    cuda = choose(f"torch=={torch}", options=("--isolated",))  # from PyPI, whatever this machine's pip is told
    write("torch-cuda.lock", {name: found for name, found in cuda.items() if TORCH.fullmatch(name)})


if __name__ == "__main__":
    main()
