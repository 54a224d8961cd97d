"""Write the locks of the image anew: exact versions, those of constraints.txt, each with the hashes of its files.

    make lock

    build.lock         what builds our own package
    requirements.lock  everything but torch: the same for both variants of the image
    torch-cpu.lock     torch from https://download.pytorch.org/whl/cpu: PyPI has no CPU build for Linux
    torch-cuda.lock    torch from PyPI, with the CUDA libraries that it asks for

pip itself chooses the files, for this Python and platform: run it with the Python of the image. Where arm64 needs
another file of the same version its hash comes from PyPI's index; torch-cpu.lock has x86-64 only.
"""

import json
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.request import Request, urlopen

from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
EXTRAS = ("server", "signing")
"""What the image has beside the package's own dependencies: it is MLflow's server, too, and promotes signed models."""

TORCH = re.compile("torch|triton|nvidia-.*|cuda-.*")
"""Names of the packages whose versions or files differ between the variants."""

PLATFORMS = [*(f"manylinux_2_{glibc}_aarch64" for glibc in range(36, 16, -1)), "manylinux2014_aarch64"]
ARM = [*cpython_tags((3, 11), platforms=PLATFORMS), *compatible_tags((3, 11), "cp311", PLATFORMS)]
"""What Debian 12 runs on arm64, the best first."""

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


def for_arm(package: str, version: str, sha256: str) -> str:
    """The hash of the file for arm64, from PyPI's index: `sha256` itself if that file is for every processor."""
    page = Request(f"https://pypi.org/simple/{package}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urlopen(page) as answer:  # noqa: S310 - the address above
        hashes = {file["filename"]: file["hashes"]["sha256"] for file in json.load(answer)["files"]}
    chosen = next((name for name, found in hashes.items() if found == sha256), "")
    if chosen.endswith((".tar.gz", "-any.whl")):
        return sha256
    ranks = {}
    for name in hashes:
        if name.endswith(".whl") and name.split("-")[1] == version:
            ranks |= {ARM.index(tag): name for tag in parse_wheel_filename(name)[3] if tag in ARM}
    if not ranks:
        sys.exit(f"{package} {version} has no file for arm64 on PyPI: another version, or a lock of x86-64 alone")
    return hashes[ranks[min(ranks)]]


def write(name: str, locked: Locked, *head: str, arm: bool = True) -> None:
    lines = [f"# {name}: made by `make lock` for Python 3.11 on Linux, x86-64{' and arm64' if arm else ''}", *head]
    for package, (version, sha256) in sorted(locked.items()):
        hashes = {sha256: None} | ({for_arm(package, version, sha256): None} if arm else {})
        lines += [" \\\n    ".join([f"{package}=={version}", *(f"--hash=sha256:{one}" for one in hashes)])]
    (ROOT / "docker" / name).write_text("\n".join(lines) + "\n")
    print(f"docker/{name}: {len(locked)} packages")


def main() -> None:
    if (sys.version_info[:2], sys.platform, platform.machine()) != ((3, 11), "linux", "x86_64"):
        sys.exit("make lock needs Python 3.11 on Linux x86-64, as in the image")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    [torch] = re.findall(r"^torch==(.*)$", CONSTRAINTS.read_text(), re.MULTILINE)

    write("build.lock", choose("setuptools>=77"))
    everything = choose(*wanted)
    write("requirements.lock", {name: found for name, found in everything.items() if not TORCH.fullmatch(name)})
    write(
        "torch-cpu.lock",
        choose("--no-deps", "--retries=1", "--extra-index-url", CPU_INDEX, f"torch=={torch}+cpu"),
        "# The hash is that of the file found when this was made. If the index has another, make the lock anew.",
        f"--extra-index-url {CPU_INDEX}",
        arm=False,
    )
    cuda = choose(f"torch=={torch}", options=("--isolated",))  # from PyPI, whatever this machine's pip is told
    write("torch-cuda.lock", {name: found for name, found in cuda.items() if TORCH.fullmatch(name)})


if __name__ == "__main__":
    main()
