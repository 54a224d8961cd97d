"""The image, as far as it can be judged without building it: its file's style, its locks, what it is built from."""

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
LOCKS = sorted(path.name for path in (ROOT / "docker").glob("*.lock"))
BUILD = str(ROOT / "docker/build.sh")
BASE = f"mirror.example:5000/python:3.11-slim-bookworm@sha256:{'0123456789abcdef' * 4}"


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


@pytest.mark.item("S08")
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


def test_locks_contain_the_package_dependencies_and_those_of_the_extras_of_the_image():
    """`make lock` was forgotten if this fails."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = list(project["dependencies"])
    for extra in ("server", "signing", "fuzzy", "mining"):
        asked += extras[extra]
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


def unpinned(dockerfile: str) -> list[str]:
    """What a Dockerfile builds on that is neither its own stage nor named by digest; docker/build.sh checks BASE."""
    stages = set(re.findall(r"^FROM .* AS (\S+)$", dockerfile, re.MULTILINE))
    stages |= {re.sub("^(cpu|cuda)", "${VARIANT}", stage) for stage in stages}
    bases = re.findall(r"^(?:FROM|ARG BASE=|COPY --from=)\s*(\S+)", re.sub("--from=", "--from= ", dockerfile), re.M)
    given = {"${BASE}"} if re.search(r"^ARG BASE$", dockerfile, re.MULTILINE) else set()
    return [base for base in bases if base not in stages | given and not re.search(r"@sha256:[0-9a-f]{64}$", base)]


@pytest.mark.item("S08")
def test_images_to_build_on_are_named_by_digest_or_by_an_argument_that_must_be_given():
    assert unpinned(DOCKERFILE) == []
    assert unpinned(DOCKERFILE.replace("ARG BASE\n", "ARG BASE=python:3.11-slim-bookworm\n")) == [
        "python:3.11-slim-bookworm",
        *["${BASE}"] * 3,
    ]
    assert unpinned("FROM python:3.11\nCOPY --from=busybox:1 /bin /bin\n") == ["python:3.11", "busybox:1"]
    assert unpinned(f"FROM {BASE}\n") == []


@pytest.mark.parametrize("base", ["", "python:3.11-slim-bookworm", "python@sha256:123", f"{BASE}4"])
def test_a_base_without_its_digest_is_refused_before_anything_is_fetched(builders, base):
    refused = subprocess.run([BUILD], env=builders | {"BASE": base}, capture_output=True, text=True)

    assert refused.returncode == 2 and refused.stdout == ""
    assert f"BASE={base}:" in refused.stderr and "@sha256:" in refused.stderr


@pytest.mark.item("S08")
@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_the_bill_of_materials_is_the_lock(variant):
    command = [sys.executable, "-I", str(ROOT / "docker/sbom.py"), variant]
    written = [subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2)]
    bill = json.loads(written[0])

    listed = {
        (one["name"], one["version"], tuple(hash["content"] for hash in one["hashes"])) for one in bill["components"]
    }
    locks = ("build.lock", "requirements.lock", f"torch-{variant}.lock")
    assert listed == {(name, version, tuple(hashes)) for lock in locks for name, version, hashes in entries(lock)}
    assert {hash["alg"] for one in bill["components"] for hash in one["hashes"]} == {"SHA-256"}
    assert len(bill["components"]) == len(listed) == len({one["purl"] for one in bill["components"]})
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    # The same bytes each time, whoever writes them and when.
    assert written[0] == written[1] and not {"serialNumber", "timestamp"} & {*bill, *bill["metadata"]}


def test_compiled_python_goes_by_its_source_and_not_by_its_time(tmp_path):
    """A builder that sets the times of files would make every .pyc of the other kind stale, and each start slow."""
    [constants] = re.findall(r"^ENV (SOURCE_DATE_EPOCH=\d+ PYTHONHASHSEED=0)$", DOCKERFILE, re.MULTILINE)
    assert DOCKERFILE.index(constants) < DOCKERFILE.index("RUN pip install")
    (tmp_path / "one.py").write_text("numbers = {1, 2, 3}\n")

    compiling = [sys.executable, "-m", "compileall", "-q", str(tmp_path)]
    subprocess.run(compiling, env=os.environ | dict(one.split("=") for one in constants.split()), check=True)

    [compiled] = tmp_path.glob("__pycache__/*.pyc")
    assert compiled.read_bytes()[4] & 0b11 == 0b11  # PEP 552: by hash, and checked


def test_only_the_variant_for_gpus_has_a_compiler_and_what_it_compiles_has_a_place():
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM|\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL))
    final = DOCKERFILE.rpartition("FROM ")[2]

    assert re.search(r"apt-get install .* g\+\+ \$\{PACKAGES\}", stages["cuda-system"])
    assert "Python.h" in stages["cuda-system"] and 'PACKAGES="libibverbs1 ibverbs-providers"' in stages["cuda-system"]
    assert stages["cpu-system"].strip() == "" and final.startswith("${VARIANT}-system\n")
    assert DOCKERFILE.count("apt-get install") == 1
    places = dict(re.findall(r"(\w+_CACHE_DIR)=(\S+)", final))
    assert set(places) == {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"}
    assert all(place.startswith("/tmp/") for place in places.values())


def test_no_build_argument_is_a_secret_and_only_what_is_copied_is_sent():
    assert set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE)) == {
        *("BASE", "VARIANT", "PACKAGES", "VERSION", "REVISION")
    }
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}

    assert "*" in ignored
    copied = {
        word for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]
    }
    assert {path for path in copied if not path.endswith(".lock")} == sent - {"docker/*.lock"}


@pytest.fixture
def builders(tmp_path):
    """A folder of builders that say what they are called with."""
    for name in ("docker", "podman", "buildah"):
        answers = "exit 1" if name == "docker" else 'echo "$0" "$@" $SOURCE_DATE_EPOCH'
        (tmp_path / name).write_text(f"#!/bin/sh\n{answers}\n")
        (tmp_path / name).chmod(0o755)
    own = {key: value for key, value in os.environ.items() if key not in ("VARIANT", "BUILDER", "SOURCE_DATE_EPOCH")}
    return own | {"PATH": f"{tmp_path}:{own['PATH']}", "BASE": BASE}


def test_the_builder_that_answers_builds_the_variant_that_is_asked_for(builders):
    command = [BUILD, "--isolation", "chroot"]
    asked = {"VARIANT": "cuda", "PACKAGES": "g++ rdma-core"}

    built = subprocess.run(command, env=builders | asked, capture_output=True, text=True)

    assert "/podman build" in built.stdout, built.stderr  # docker has no daemon
    assert "--tag infoxlm:cuda" in built.stdout and "VARIANT=cuda" in built.stdout
    assert f"--build-arg BASE={BASE} " in built.stdout and "--build-arg PACKAGES=g++ rdma-core " in built.stdout
    assert built.stdout.rstrip().endswith("--isolation chroot .")
    refused = subprocess.run(command, env=builders | {"VARIANT": "tpu"}, capture_output=True, text=True)
    assert refused.returncode == 2 and "cpu or cuda" in refused.stderr


def test_the_time_of_an_image_is_that_of_its_commit_or_the_one_that_is_given(builders, tmp_path):
    commit = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True).stdout

    given = subprocess.run([BUILD], env=builders | {"SOURCE_DATE_EPOCH": "1763683200"}, capture_output=True, text=True)
    own = subprocess.run([BUILD], env=builders, capture_output=True, text=True)

    assert "--timestamp 1763683200 " in given.stdout and given.stdout.endswith(" .\n")  # newer ones read the variable
    assert "--label org.opencontainers.image.created=2025-11-21T00:00:00Z " in given.stdout
    assert f"--timestamp {commit.strip() or 315532800} " in own.stdout
    (tmp_path / "docker").write_text('#!/bin/sh\necho "$0" "$@"\n')
    docker = subprocess.run([BUILD], env=builders | {"SOURCE_DATE_EPOCH": "1763683200"}, capture_output=True, text=True)
    assert "--build-arg SOURCE_DATE_EPOCH=1763683200 " in docker.stdout and "--timestamp" not in docker.stdout


def test_labels_say_what_an_image_was_built_on_and_from_without_the_login_of_a_clone(builders, tmp_path):
    (tmp_path / "git").write_text("#!/bin/sh\necho https://somebody:token@code.example/infoxlm.git\n")
    (tmp_path / "git").chmod(0o755)
    asked = {"SOURCE_DATE_EPOCH": "1763683200"}

    built = subprocess.run([BUILD], env=builders | asked, capture_output=True, text=True).stdout

    assert "image.source=https://code.example/infoxlm.git " in built
    assert "image.base.name=mirror.example:5000/python:3.11-slim-bookworm " in built
    assert f"image.base.digest={BASE.partition('@')[2]} " in built
    assert "token" not in re.sub("REVISION=\\S+", "", built)
    assert {"title", "description", "licenses", "version", "revision"} == set(
        re.findall(r"org\.opencontainers\.image\.(\w+)=", DOCKERFILE)
    )


@pytest.mark.parametrize(
    "machine, options, variant, builds",
    [
        ("aarch64", [], "cpu", False),
        ("aarch64", [], "cuda", True),
        ("aarch64", ["--platform", "linux/amd64"], "cpu", True),
        ("x86_64", ["--platform", "linux/arm64"], "cpu", False),
        ("riscv64", [], "cuda", False),
    ],
)
def test_a_platform_for_which_there_is_no_lock_is_refused_before_anything_is_fetched(
    builders, tmp_path, machine, options, variant, builds
):
    (tmp_path / "uname").write_text(f"#!/bin/sh\necho {machine}\n")
    (tmp_path / "uname").chmod(0o755)

    done = subprocess.run([BUILD, *options], env=builders | {"VARIANT": variant}, capture_output=True, text=True)

    assert ("/podman build" in done.stdout) is builds, done.stderr
    if not builds:
        assert done.returncode == 2 and "x86-64 has both" in done.stderr and "arm64 has cuda" in done.stderr
