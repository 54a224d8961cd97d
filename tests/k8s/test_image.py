"""The image, as far as it can be judged without building it: its file's style, its locks, what it is built from."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from components.adapters.mlflow import runs
from tests.k8s.manifests import ROOT

HADOLINT = str(Path(sys.executable).with_name("hadolint"))
DOCKERFILE = (ROOT / "Dockerfile").read_text()
LOCKS = sorted(path.name for path in (ROOT / "docker").glob("*.lock"))


def entries(name: str) -> list[tuple[str, str, list[str]]]:
    """Name, version and hashes of each entry of a lock, whose lines are joined as pip joins them."""
    lines = (ROOT / "docker" / name).read_text().replace("\\\n", "").splitlines()
    found = []
    for line in lines:
        if not line.startswith(("#", "--extra-index-url ")):
            pinned, *hashes = line.split()
            package, _, version = pinned.partition("==")
            found.append((package, version, [one.removeprefix("--hash=sha256:") for one in hashes]))
    return found


def locked(name: str) -> dict[str, str]:
    return {package: version for package, version, _ in entries(name)}


def test_hadolint_finds_nothing():
    found = subprocess.run([HADOLINT, str(ROOT / "Dockerfile")], capture_output=True, text=True)

    assert found.stdout + found.stderr == "" and found.returncode == 0


def test_hadolint_would_find_something(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM python:latest\nRUN cd /src && pip install torch\n")

    found = subprocess.run([HADOLINT, str(tmp_path / "Dockerfile")], capture_output=True, text=True)

    assert {"DL3007", "DL3013", "DL3003"} <= set(re.findall(r"DL\d+", found.stdout))


@pytest.mark.parametrize("name", LOCKS)
def test_every_entry_of_a_lock_is_a_version_with_a_hash_for_each_processor(name):
    for package, version, hashes in entries(name):
        assert re.fullmatch(r"[a-z0-9-]+", package) and version
        assert all(re.fullmatch(r"[0-9a-f]{64}", one) for one in hashes), package
        assert len(hashes) == len(set(hashes)) in (1, 2), package
    several = {package for package, _, hashes in entries(name) if len(hashes) == 2}
    compiled = {"build.lock": set(), "torch-cpu.lock": set(), "torch-cuda.lock": {"torch", "triton", "nvidia-cublas"}}
    assert compiled.get(name, {"numpy", "ray", "tokenizers"}) <= several and (several or compiled[name] == several)


def test_locks_have_the_versions_that_the_tests_run_with():
    constraints = dict(
        (re.sub(r"[-_.]+", "-", name).lower(), version)
        for name, version in re.findall(r"^([^#=\s]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    both = locked("requirements.lock") | locked("torch-cuda.lock")

    differ = {
        name: (both[name], constraints[name]) for name in both.keys() & constraints if both[name] != constraints[name]
    }
    assert differ == {}
    assert locked("torch-cpu.lock") == {"torch": f"{constraints['torch']}+cpu"}
    assert not {"torch", "triton", "pytest", "ruff"} & set(locked("requirements.lock"))


def test_locks_hold_everything_that_the_package_its_server_and_signing_ask_for():
    """`make lock` was forgotten if this fails."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["server"], *extras["signing"]]
    names = {re.sub(r"[-_.]+", "-", re.split(r"[\[=<>~ ]", line)[0]).lower() for line in asked}

    assert names - {"torch"} <= set(locked("requirements.lock"))


def test_dependencies_are_installed_by_hash_as_a_user_without_rights_and_without_what_builds():
    installs = re.findall(r"^RUN pip install (.*)$", DOCKERFILE, re.MULTILINE)

    assert len(installs) == 3
    assert all("--require-hashes" in line or line.endswith("--root /code .") for line in installs)
    assert all("--no-deps" in line for line in installs)
    final = DOCKERFILE.rpartition("FROM ")[2]
    assert re.findall(r"^USER (.*)$", final, re.MULTILINE) == ["10001:10001"]
    assert not re.search(r"pip install|apt-get|gcc|build-essential", final)
    assert final.index("/opt/venv /opt/venv") < final.index("/code/opt/venv")  # our code last


def test_a_login_shell_finds_our_programs_too(tmp_path):
    """KubeRay with ENABLE_LOGIN_SHELL runs ray by `bash -lc`, whose profile sets PATH anew and then reads profile.d."""
    [line] = re.findall(r"(echo .*) > /etc/profile\.d/\w+\.sh$", DOCKERFILE.rpartition("FROM ")[2], re.MULTILINE)
    (tmp_path / "profile").write_text(f"PATH=/usr/bin:/bin\n. {tmp_path}/venv.sh\nexport PATH\n")
    subprocess.run(["sh", "-c", f"{line} > {tmp_path}/venv.sh"], check=True)

    shown = subprocess.run(["sh", "-c", f". {tmp_path}/profile; echo $PATH"], capture_output=True, text=True)

    assert shown.stdout == "/opt/venv/bin:/usr/bin:/bin\n"


def test_a_step_knows_the_commit_that_its_image_was_built_from():
    assert f"ENV {runs.COMMIT}=${{REVISION}}" in DOCKERFILE


def test_images_to_build_on_are_never_the_latest():
    bases = re.findall(r"^(?:FROM|ARG BASE=)\s*(\S+)", DOCKERFILE, re.MULTILINE)

    assert all(":latest" not in base and (":" in base or base in ("${BASE}", "dependencies")) for base in bases)


def test_no_build_argument_is_a_secret_and_only_what_is_copied_is_sent():
    assert set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE)) == {"BASE", "VARIANT", "VERSION", "REVISION"}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}

    assert "*" in ignored
    copied = {
        word for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]
    }
    assert copied - {path for path in copied if path.startswith("docker/")} == sent - {"docker/*.lock"}


@pytest.fixture
def builders(tmp_path):
    """A folder of builders that say what they are called with."""
    for name in ("docker", "podman", "buildah"):
        answers = "exit 1" if name == "docker" else 'echo "$0" "$@"'
        (tmp_path / name).write_text(f"#!/bin/sh\n{answers}\n")
        (tmp_path / name).chmod(0o755)
    return os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_the_builder_that_answers_builds_the_variant_that_is_asked_for(builders):
    command = [str(ROOT / "docker/build.sh"), "--isolation", "chroot"]

    built = subprocess.run(command, env=builders | {"VARIANT": "cuda"}, capture_output=True, text=True)

    assert "/podman build" in built.stdout  # docker has no daemon
    assert "--tag infoxlm:cuda" in built.stdout and "VARIANT=cuda" in built.stdout
    assert built.stdout.rstrip().endswith("--isolation chroot .")
    refused = subprocess.run(command, env=builders | {"VARIANT": "tpu"}, capture_output=True, text=True)
    assert refused.returncode == 2 and "cpu or cuda" in refused.stderr


def test_a_platform_for_which_there_is_no_lock_is_refused_before_anything_is_fetched(builders, tmp_path):
    (tmp_path / "uname").write_text("#!/bin/sh\necho aarch64\n")
    (tmp_path / "uname").chmod(0o755)

    refused = subprocess.run([str(ROOT / "docker/build.sh")], env=builders, capture_output=True, text=True)

    assert refused.returncode == 2 and "x86-64" in refused.stderr and "--platform linux/amd64" in refused.stderr
    command = [str(ROOT / "docker/build.sh"), "--platform", "linux/amd64"]
    built = subprocess.run(command, env=builders, capture_output=True, text=True)
    assert "/podman build" in built.stdout, built.stderr
