"""Write the lock files of the image: the versions in constraints.txt, each with the hashes of its files.

    make lock

    build.lock         packages that build our own package
    requirements.lock  all packages except torch; both variants of the image use them
    torch-cpu.lock     torch from https://download.pytorch.org/whl/cpu, because PyPI has no CPU build for Linux
    torch-cuda.lock    torch from PyPI, with the CUDA libraries that it requires

pip chooses the files for the Python and platform on which it runs, so run this script with the Python of the image. If
arm64 needs another file of the same version, its hash is read from PyPI's index. torch-cpu.lock is for x86-64 only.
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
EXTRAS = ("server", "signing", "fuzzy", "mining")
"""Optional dependencies in the image: MLflow's server, signed models, MinHash, and mining of large files."""

TORCH = re.compile("torch|triton|nvidia-.*|cuda-.*")
"""Names of the packages whose versions or files differ between the variants."""

PLATFORMS = [*(f"manylinux_2_{glibc}_aarch64" for glibc in range(36, 16, -1)), "manylinux2014_aarch64"]
ARM = [*cpython_tags((3, 11), platforms=PLATFORMS), *compatible_tags((3, 11), "cp311", PLATFORMS)]
"""Tags of the wheels that Debian 12 can install on arm64, the best first."""

Locked = dict[str, tuple[str, str]]
"""Name of a package -> its version and the SHA-256 of its file for x86-64."""


def resolve(*requirements: str, options: tuple[str, ...] = ()) -> Locked:
    """Return version and hashes of each package that pip would install for requirements and their dependencies."""
    command = [sys.executable, "-m", "pip", *options, "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--prefer-binary", "--report", "-", "-c", str(CONSTRAINTS), *requirements]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)  # noqa: S603 - our own pip
    packages = {}
    for item in report["install"]:
        metadata = item["metadata"]
        normalized_name = re.sub(r"[-_.]+", "-", metadata["name"]).lower()
        sha256 = item["download_info"]["archive_info"]["hashes"]["sha256"]
        packages[normalized_name] = (metadata["version"], sha256)
    return packages


def find_arm64_hash(package: str, version: str, sha256: str) -> str:
    """Return the SHA-256 of a package's file for arm64, as PyPI's index has it.

    Args:
        package: normalized name of the package.
        version: its locked version.
        sha256: hash of the file for x86-64, which is returned if that file is for all processors.
    """
    page = Request(f"https://pypi.org/simple/{package}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urlopen(page) as answer:  # noqa: S310 - the address above
        hashes = {file["filename"]: file["hashes"]["sha256"] for file in json.load(answer)["files"]}
    for filename, file_hash in hashes.items():
        if file_hash == sha256 and filename.endswith((".tar.gz", "-any.whl")):
            return sha256
    file_by_rank = {}
    for filename in hashes:
        if not filename.endswith(".whl") or filename.split("-")[1] != version:
            continue
        _, _, _, tags = parse_wheel_filename(filename)
        for tag in tags:
            if tag in ARM:
                file_by_rank[ARM.index(tag)] = filename
    if not file_by_rank:
        sys.exit(
            f"{package} {version} has no file for arm64 on PyPI: choose another version, or lock it for x86-64 only"
        )
    best_file = file_by_rank[min(file_by_rank)]
    return hashes[best_file]


def write_lock(filename: str, locked: Locked, *comments: str, arm: bool = True) -> None:
    """Write a lock file for x86-64 and, with `arm`, for arm64; `comments` follow its first line."""
    processors = "x86-64 and arm64" if arm else "x86-64"
    lines = [f"# {filename}: made by `make lock` for Python 3.11 on Linux, {processors}", *comments]
    for package, (version, sha256) in sorted(locked.items()):
        hashes = [sha256]
        if arm:
            arm_hash = find_arm64_hash(package, version, sha256)
            if arm_hash != sha256:
                hashes.append(arm_hash)
        hash_options = [f"--hash=sha256:{file_hash}" for file_hash in hashes]
        lines.append(" \\\n    ".join([f"{package}=={version}", *hash_options]))
    (ROOT / "docker" / filename).write_text("\n".join(lines) + "\n")
    print(f"docker/{filename}: {len(locked)} packages")


def main() -> None:
    """Write all lock files."""
    if (sys.version_info[:2], sys.platform, platform.machine()) != ((3, 11), "linux", "x86_64"):
        sys.exit("make lock needs Python 3.11 on Linux x86-64, as in the image")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = list(project["dependencies"])
    for extra in EXTRAS:
        requirements += project["optional-dependencies"][extra]
    [torch_version] = re.findall(r"^torch==(.*)$", CONSTRAINTS.read_text(), re.MULTILINE)

    write_lock("build.lock", resolve("setuptools>=77"))
    packages = resolve(*requirements)
    write_lock("requirements.lock", {name: file for name, file in packages.items() if not TORCH.fullmatch(name)})
    write_lock(
        "torch-cpu.lock",
        resolve("--no-deps", "--retries=1", "--extra-index-url", CPU_INDEX, f"torch=={torch_version}+cpu"),
        "# The hash is that of the file found when this was made. If the index has another, make the lock anew.",
        f"--extra-index-url {CPU_INDEX}",
        arm=False,
    )
    # `--isolated` ignores this machine's pip settings, which may name another index than PyPI.
    cuda_packages = resolve(f"torch=={torch_version}", options=("--isolated",))
    write_lock("torch-cuda.lock", {name: file for name, file in cuda_packages.items() if TORCH.fullmatch(name)})


if __name__ == "__main__":
    main()
