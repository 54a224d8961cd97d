"""The source never executes data as code, and no file of the repository contains a secret."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from components.settings.environment import is_secret
from infoxlm_core.errors import ConfigError
from infoxlm_core.run_file import StrictLoader

ROOT = Path(__file__).parents[2]
PACKAGES = ("infoxlm_core", "components", "pipelines")
# The rules S of ruff report eval, exec, shells, pickle and other unsafe modules and calls.
UNSAFE_MODULES = {"cloudpickle", "joblib", "jsonpickle"}
UNSAFE_CALLS = {
    "compile",
    "__import__",
    "yaml.unsafe_load",
    "yaml.full_load",
    "yaml.unsafe_load_all",
    "yaml.full_load_all",
}
UNSAFE_OPTIONS = {"trust_remote_code", "allow_pickle"}


def find_unsafe_code(source: str) -> list[str]:
    """Return what could execute data as code and has no rule of ruff's, as `LINE: description`."""
    findings = []
    for node in ast.walk(ast.parse(source)):
        findings += [f"{node.lineno}: {description}" for description in describe_unsafe_node(node)]
    return findings


def describe_unsafe_node(node: ast.AST) -> Iterator[str]:
    """Yield what is unsafe about an import or a call."""
    imported = []
    if isinstance(node, ast.Import):
        imported = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        imported = [node.module or ""]
    for name in imported:
        if name.partition(".")[0] in UNSAFE_MODULES:
            yield f"imports {name}"
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        for option in sorted(UNSAFE_OPTIONS & set(options)):
            if options[option] != "False":
                yield f"{option}={options[option]}"
        if name in UNSAFE_CALLS:
            yield f"calls {name}"
        if name == "torch.load" and options.get("weights_only") != "True":
            yield "torch.load without weights_only=True"


@pytest.mark.item("S01")
@pytest.mark.parametrize(
    "line",
    [
        "import joblib.numpy_pickle",
        "from cloudpickle import load",
        "compile(text, path, mode)",
        "np.load(path, allow_pickle=True)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.full_load(text)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_unsafe_code_is_reported_with_its_line(line):
    assert find_unsafe_code(f"def f():\n    {line}\n")[0].startswith("2: ")


@pytest.mark.parametrize(
    "line", ["torch.load(path, weights_only=True)", "np.load(path, allow_pickle=False)", "re.compile(p)"]
)
def test_safe_code_is_not_reported(line):
    assert find_unsafe_code(line) == []


@pytest.mark.item("S01")
def test_our_source_executes_no_data_as_code():
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]

    findings = []
    for path in paths:
        findings += [f"{path}:{finding}" for finding in find_unsafe_code(path.read_text(encoding="utf-8"))]
    assert len(paths) > 50
    assert findings == []


@pytest.mark.item("S11")
def test_the_yaml_loader_of_configs_is_safe():
    assert issubclass(StrictLoader, yaml.SafeLoader)
    with pytest.raises(ConfigError, match="tags"):
        yaml.load("!!python/object/apply:os.getcwd []", Loader=StrictLoader)


SECRET_PATTERNS = {
    "key of AWS": r"\b(AKIA|ASIA)[0-9A-Z]{16}\b",
    "secret of AWS": r"(?i)aws_secret_access_key[\"']?\s*[:=]\s*[\"']?[A-Za-z0-9/+=]{20,}",
    "private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "token of a forge or hub": r"\b(gh[pousr]_[A-Za-z0-9]{30,}|hf_[A-Za-z0-9]{30,}|glpat-[\w-]{20,})",
    "password in a URL": r"\b[a-z][a-z0-9+.-]*://[^\s/:@\"'{}$<>]+:[^\s/:@\"'{}$<>]{6,}@",
}
GENERATED_FOLDERS = {"build", "runs"}
WITH_INVENTED_PASSWORDS = {"tests/components/adapters/mlflow/test_connection.py", "tests/k8s/test_manifests.py"}
"""Tests of functions that detect passwords."""


def list_repository_files() -> Iterator[Path]:
    """Yield the text files of the repository."""
    for entry in ROOT.iterdir():
        is_hidden = entry.name.startswith(".") and entry.name != ".ci"
        if is_hidden or entry.name in GENERATED_FOLDERS or entry.suffix == ".egg-info":
            continue
        for path in [entry] if entry.is_file() else entry.rglob("*"):
            if path.is_file() and path.suffix not in (".png", ".pyc"):
                yield path


def find_secrets(text: str) -> list[str]:
    """Return the kind and the first characters of each secret in a text."""
    findings = []
    for kind, pattern in SECRET_PATTERNS.items():
        findings += [f"{kind}: {match[0][:12]}…" for match in re.finditer(pattern, text)]
    return findings


@pytest.mark.parametrize(
    "text",
    [
        "AK" + "IA" + "Q3EGJ7XK2MNP5RST",
        "AWS_SECRET_" + "ACCESS_KEY=wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLE",
        '"aws_secret_' + 'access_key": "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLE"',
        "-----BEGIN RSA " + "PRIVATE KEY-----",
        "gh" + "p_" + 36 * "a",
        "postgresql+psycopg2://mlflow:" + "hunter2hunter2@db/mlflow",
    ],
)
def test_a_secret_is_reported(text):
    assert find_secrets(f"x = '{text}'")


@pytest.mark.item("S07")
def test_no_file_of_the_repository_contains_a_secret():
    paths = list(list_repository_files())

    findings = []
    for path in paths:
        if str(path.relative_to(ROOT)) not in WITH_INVENTED_PASSWORDS:
            text = path.read_text(encoding="utf-8", errors="replace")
            findings += [f"{path}: {finding}" for finding in find_secrets(text)]
    assert len(paths) > 150
    assert findings == []


@pytest.mark.item("S12")
def test_compiled_pipelines_evaluate_no_text_install_nothing_and_contain_no_secret():
    paths = list((ROOT / "pipelines/compiled").glob("*.yaml"))

    assert len(paths) >= 3
    for path in paths:
        text = path.read_text()
        assert not re.search(r"condition:[^:]*string_value", text), path  # KFP's local runner would eval() it
        assert "pip install" not in text, path
        executors = next(yaml.safe_load_all(text))["deploymentSpec"]["executors"].values()
        for executor in executors:
            variables = executor["container"].get("env", [])  # values; references to Secrets are elsewhere
            assert not any(is_secret(variable["name"]) for variable in variables), path
