"""The image, as far as it can be checked without building it: the Dockerfile, the locks and the build script."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.k8s.manifests import ROOT

HADOLINT = str(Path(sys.executable).with_name("hadolint"))
DOCKERFILE = (ROOT / "Dockerfile").read_text()
FINAL_STAGE = DOCKERFILE.rpartition("FROM ")[2]
LOCKS = sorted(path.name for path in (ROOT / "docker").glob("*.lock"))
BUILD = str(ROOT / "docker/build.sh")
BASE = f"mirror.example:5000/python:3.11-slim-bookworm@sha256:{'0123456789abcdef' * 4}"


def read_lock(name: str) -> list[tuple[str, str, list[str]]]:
    """Return name, version and hashes of each entry of a lock. Continued lines are joined as pip joins them."""
    lines = (ROOT / "docker" / name).read_text().replace("\\\n", "").splitlines()
    entries = []
    for line in lines:
        if line.startswith(("#", "--extra-index-url ")):
            continue
        requirement, *hash_options = line.split()
        package, _, version = requirement.partition("==")
        entries.append((package, version, [option.removeprefix("--hash=sha256:") for option in hash_options]))
    return entries


def locked_versions(name: str) -> dict[str, str]:
    """Return package -> version of a lock."""
    return {package: version for package, version, _ in read_lock(name)}


def normalise(package: str) -> str:
    """Return the normalised name of a Python package."""
    return re.sub(r"[-_.]+", "-", package).lower()


def run_build(environment: dict[str, str], *options: str) -> subprocess.CompletedProcess:
    return subprocess.run([BUILD, *options], env=environment, capture_output=True, text=True)


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_hadolint_reports_nothing():
    result = subprocess.run([HADOLINT, str(ROOT / "Dockerfile")], capture_output=True, text=True)

    assert result.stdout + result.stderr == ""
    assert result.returncode == 0


@pytest.mark.item("S08")
@pytest.mark.parametrize("name", LOCKS)
def test_every_lock_entry_has_a_version_and_a_hash_for_each_processor(name):
    for package, version, hashes in read_lock(name):
        assert re.fullmatch(r"[a-z0-9-]+", package)
        assert version
        assert all(re.fullmatch(r"[0-9a-f]{64}", file_hash) for file_hash in hashes), package
        assert len(hashes) == len(set(hashes)) in (1, 2), package
    packages_with_two_files = {package for package, _, hashes in read_lock(name) if len(hashes) == 2}
    if name in ("build.lock", "torch-cpu.lock"):  # pure Python, and x86-64 only
        assert packages_with_two_files == set()
    elif name == "torch-cuda.lock":
        assert {"torch", "triton", "nvidia-cublas"} <= packages_with_two_files
    else:
        assert {"numpy", "ray", "tokenizers"} <= packages_with_two_files


def test_locks_have_the_versions_of_the_constraints():
    pattern = re.compile(r"^([^#=\s]+)==(\S+)$", re.MULTILINE)
    constraints = {
        normalise(name): version for name, version in pattern.findall((ROOT / "constraints.txt").read_text())
    }
    locked = locked_versions("requirements.lock") | locked_versions("torch-cuda.lock")

    constrained_packages = locked.keys() & constraints.keys()
    assert {name: locked[name] for name in constrained_packages} == {
        name: constraints[name] for name in constrained_packages
    }
    assert locked_versions("torch-cpu.lock") == {"torch": f"{constraints['torch']}+cpu"}
    assert {"torch", "triton", "pytest", "ruff"}.isdisjoint(locked_versions("requirements.lock"))


def test_the_lock_contains_the_dependencies_of_the_package_and_of_the_image_extras():
    """If this fails, run `make lock`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = list(project["dependencies"])
    for extra in ("server", "signing", "fuzzy", "mining"):
        requirements += project["optional-dependencies"][extra]
    packages = {normalise(re.split(r"[\[=<>~ ]", requirement)[0]) for requirement in requirements}

    assert packages - {"torch"} <= set(locked_versions("requirements.lock"))


def test_dependencies_are_installed_by_hash_and_the_image_has_no_installer_and_no_root():
    installs = re.findall(r"^RUN pip install (.*)$", DOCKERFILE, re.MULTILINE)

    assert len(installs) == 3
    assert all("--no-deps" in line for line in installs)
    assert all("--require-hashes" in line or line.endswith("--root /code .") for line in installs)
    assert re.findall(r"^USER (.*)$", FINAL_STAGE, re.MULTILINE) == ["10001:10001"]
    assert not re.search(r"pip install|apt-get|gcc|build-essential", FINAL_STAGE)
    # Our code changes most often, so its layer is the last.
    assert FINAL_STAGE.index("/opt/venv /opt/venv") < FINAL_STAGE.index("/code/opt/venv")


def test_a_login_shell_finds_the_programs_of_the_image(tmp_path):
    """KubeRay with ENABLE_LOGIN_SHELL runs `bash -lc`, whose profile resets PATH and then reads profile.d."""
    [command] = re.findall(r"(echo .*) > /etc/profile\.d/\w+\.sh$", FINAL_STAGE, re.MULTILINE)
    (tmp_path / "profile").write_text(f"PATH=/usr/bin:/bin\n. {tmp_path}/venv.sh\nexport PATH\n")
    subprocess.run(["sh", "-c", f"{command} > {tmp_path}/venv.sh"], check=True)

    result = subprocess.run(["sh", "-c", f". {tmp_path}/profile; echo $PATH"], capture_output=True, text=True)

    assert result.stdout == "/opt/venv/bin:/usr/bin:/bin\n"


def find_unpinned_images(dockerfile: str) -> list[str]:
    """Return the images in FROM, COPY and ARG BASE that have no digest and are neither stages nor BASE."""
    stages = set(re.findall(r"^FROM .* AS (\S+)$", dockerfile, re.MULTILINE))
    stages |= {re.sub("^(cpu|cuda)", "${VARIANT}", stage) for stage in stages}
    text = re.sub("--from=", "--from= ", dockerfile)
    images = re.findall(r"^(?:FROM|ARG BASE=|COPY --from=)\s*(\S+)", text, re.MULTILINE)
    base_is_required = re.search(r"^ARG BASE$", dockerfile, re.MULTILINE)
    allowed = stages | ({"${BASE}"} if base_is_required else set())  # docker/build.sh checks the digest of BASE
    return [image for image in images if image not in allowed and not re.search(r"@sha256:[0-9a-f]{64}$", image)]


@pytest.mark.item("S08")
def test_base_images_have_digests_or_are_a_required_argument():
    with_default = DOCKERFILE.replace("ARG BASE\n", "ARG BASE=python:3.11-slim-bookworm\n")

    assert find_unpinned_images(DOCKERFILE) == []
    assert find_unpinned_images(f"FROM {BASE}\n") == []
    assert find_unpinned_images(with_default) == ["python:3.11-slim-bookworm", *["${BASE}"] * 3]
    assert find_unpinned_images("FROM python:3.11\nCOPY --from=busybox:1 /bin /bin\n") == ["python:3.11", "busybox:1"]


@pytest.mark.parametrize("base", ["", "python:3.11-slim-bookworm", "python@sha256:123", f"{BASE}4"])
def test_build_refuses_a_base_without_a_digest(builders, base):
    refused = run_build(builders | {"BASE": base})

    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"BASE={base}:" in refused.stderr
    assert "@sha256:" in refused.stderr


@pytest.mark.item("S08")
@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_bill_of_materials_equals_the_locks_and_is_reproducible(variant):
    command = [sys.executable, "-I", str(ROOT / "docker/sbom.py"), variant]
    outputs = [subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2)]
    bill = json.loads(outputs[0])

    listed = set()
    for component in bill["components"]:
        assert {digest["alg"] for digest in component["hashes"]} == {"SHA-256"}
        digests = tuple(digest["content"] for digest in component["hashes"])
        listed.add((component["name"], component["version"], digests))
    locked = set()
    for lock in ("build.lock", "requirements.lock", f"torch-{variant}.lock"):
        locked |= {(name, version, tuple(hashes)) for name, version, hashes in read_lock(lock)}
    assert listed == locked
    assert len(bill["components"]) == len(listed) == len({component["purl"] for component in bill["components"]})
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert outputs[0] == outputs[1]
    assert {"serialNumber", "timestamp"}.isdisjoint({*bill, *bill["metadata"]})


def test_compiled_python_files_are_validated_by_the_hash_of_their_source(tmp_path):
    """A builder that sets the times of files would make .pyc files with times stale, and each start slow."""
    [variables] = re.findall(r"^ENV (SOURCE_DATE_EPOCH=\d+ PYTHONHASHSEED=0)$", DOCKERFILE, re.MULTILINE)
    assert DOCKERFILE.index(variables) < DOCKERFILE.index("RUN pip install")
    (tmp_path / "module.py").write_text("numbers = {1, 2, 3}\n")

    command = [sys.executable, "-m", "compileall", "-q", str(tmp_path)]
    subprocess.run(command, env=os.environ | dict(item.split("=") for item in variables.split()), check=True)

    [compiled] = tmp_path.glob("__pycache__/*.pyc")
    flags = compiled.read_bytes()[4]
    assert flags & 0b11 == 0b11  # PEP 552: validated by hash, and checked at each import


def test_only_the_gpu_variant_has_a_compiler_and_its_output_goes_to_a_writable_folder():
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM|\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL))

    assert re.search(r"apt-get install .* g\+\+ \$\{PACKAGES\}", stages["cuda-system"])
    assert "Python.h" in stages["cuda-system"]
    assert 'PACKAGES="libibverbs1 ibverbs-providers"' in stages["cuda-system"]
    assert stages["cpu-system"].strip() == ""
    assert FINAL_STAGE.startswith("${VARIANT}-system\n")
    assert DOCKERFILE.count("apt-get install") == 1
    cache_folders = dict(re.findall(r"(\w+_CACHE_DIR)=(\S+)", FINAL_STAGE))
    assert set(cache_folders) == {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"}
    assert all(folder.startswith("/tmp/") for folder in cache_folders.values())


def test_no_build_argument_is_a_secret_and_only_copied_files_are_sent_to_the_builder():
    arguments = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    ignore_rules = (ROOT / ".dockerignore").read_text().splitlines()
    sent_paths = {rule.removeprefix("!") for rule in ignore_rules if rule.startswith("!")}
    copied_paths = set()
    for copy in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE):
        *sources, _ = copy.split()
        copied_paths |= {source for source in sources if not source.endswith(".lock")}

    assert arguments == {"BASE", "VARIANT", "PACKAGES", "VERSION", "REVISION"}
    assert "*" in ignore_rules
    assert sent_paths == copied_paths | {"docker/*.lock"}


@pytest.fixture
def builders(tmp_path) -> dict[str, str]:
    """Return an environment in which docker has no daemon, and podman and buildah print their arguments."""
    write_program(tmp_path / "docker", "exit 1")
    for name in ("podman", "buildah"):
        write_program(tmp_path / name, 'echo "$0" "$@" $SOURCE_DATE_EPOCH')
    environment = dict(os.environ)
    for variable in ("VARIANT", "BUILDER", "SOURCE_DATE_EPOCH"):
        environment.pop(variable, None)
    return environment | {"PATH": f"{tmp_path}:{environment['PATH']}", "BASE": BASE}


def test_build_passes_variant_packages_and_options_to_the_first_builder_that_works(builders):
    result = run_build(builders | {"VARIANT": "cuda", "PACKAGES": "g++ rdma-core"}, "--isolation", "chroot")

    assert "/podman build" in result.stdout, result.stderr
    assert "--tag infoxlm:cuda" in result.stdout
    assert "VARIANT=cuda" in result.stdout
    assert f"--build-arg BASE={BASE} " in result.stdout
    assert "--build-arg PACKAGES=g++ rdma-core " in result.stdout
    assert result.stdout.rstrip().endswith("--isolation chroot .")


def test_build_refuses_an_unknown_variant(builders):
    refused = run_build(builders | {"VARIANT": "tpu"})

    assert refused.returncode == 2
    assert "cpu or cuda" in refused.stderr


def test_image_time_is_that_of_the_commit_or_the_given_one(builders, tmp_path):
    command = ["git", "log", "-1", "--format=%ct"]
    commit_time = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "315532800"
    given_time = {"SOURCE_DATE_EPOCH": "1763683200"}

    assert f"--timestamp {commit_time} " in run_build(builders).stdout
    podman = run_build(builders | given_time).stdout
    assert "--timestamp 1763683200 " in podman
    assert podman.endswith(" .\n")  # the variable is unset: podman refuses it beside --timestamp
    assert "--label org.opencontainers.image.created=2025-11-21T00:00:00Z " in podman
    write_program(tmp_path / "docker", 'echo "$0" "$@"')
    docker = run_build(builders | given_time).stdout
    assert "--build-arg SOURCE_DATE_EPOCH=1763683200 " in docker
    assert "--timestamp" not in docker


def test_labels_name_base_and_source_without_the_login_of_the_clone(builders, tmp_path):
    write_program(tmp_path / "git", "echo https://somebody:token@code.example/infoxlm.git")

    output = run_build(builders | {"SOURCE_DATE_EPOCH": "1763683200"}).stdout

    assert "image.source=https://code.example/infoxlm.git " in output
    assert "image.base.name=mirror.example:5000/python:3.11-slim-bookworm " in output
    assert f"image.base.digest={BASE.partition('@')[2]} " in output
    assert "token" not in re.sub(r"REVISION=\S+", "", output)
    labels = set(re.findall(r"org\.opencontainers\.image\.(\w+)=", DOCKERFILE))
    assert labels == {"title", "description", "licenses", "version", "revision"}


@pytest.mark.parametrize(
    ("machine", "options", "variant", "has_lock"),
    [
        ("aarch64", [], "cpu", False),
        ("aarch64", [], "cuda", True),
        ("aarch64", ["--platform", "linux/amd64"], "cpu", True),
        ("x86_64", ["--platform", "linux/arm64"], "cpu", False),
        ("riscv64", [], "cuda", False),
    ],
)
def test_build_refuses_a_platform_without_a_lock(builders, tmp_path, machine, options, variant, has_lock):
    write_program(tmp_path / "uname", f"echo {machine}")

    result = run_build(builders | {"VARIANT": variant}, *options)

    assert ("/podman build" in result.stdout) is has_lock, result.stderr
    if not has_lock:
        assert result.returncode == 2
        assert "x86-64 has both" in result.stderr
        assert "arm64 has cuda" in result.stderr
