"""Nothing in our source turns data into code, and no file holds a secret."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from components.settings.environment import is_secret

ROOT = Path(__file__).parents[2]
OURS = ("infoxlm_core", "components", "pipelines")
UNSAFE_MODULES = {"cloudpickle", "joblib", "jsonpickle"}  # ruff's S knows the others, as it knows eval, exec and shells
UNSAFE_CALLS = {
    "compile",
    "__import__",
    "yaml.unsafe_load",
    "yaml.full_load",
    "yaml.unsafe_load_all",
    "yaml.full_load_all",
}
UNTRUE = {"trust_remote_code", "allow_pickle"}  # if given at all, then as False


def dangers(source: str) -> list[str]:
    """What in a module could make code of data and has no rule of ruff's, as `line: what`."""
    return [f"{node.lineno}: {what}" for node in ast.walk(ast.parse(source)) for what in _of(node)]  # type: ignore[attr-defined]


def _of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        of = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        yield from (f"imports {name}" for name in of if name.partition(".")[0] in UNSAFE_MODULES)
    if not isinstance(node, ast.Call):
        return
    name = ast.unparse(node.func)
    given = {word.arg: word.value for word in node.keywords}
    yield from (
        f"{word}={ast.unparse(given[word])}" for word in sorted(UNTRUE & set(given)) if not _is(given[word], False)
    )
    if name in UNSAFE_CALLS:
        yield f"calls {name}"
    if name == "torch.load" and not _is(given.get("weights_only"), True):
        yield "torch.load without weights_only=True"


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


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
def test_what_makes_code_of_data_is_seen(line):
    assert dangers(f"def f():\n    {line}\n")[0].startswith("2: ")


@pytest.mark.parametrize(
    "line",
    ["torch.load(path, weights_only=True)", "np.load(path, allow_pickle=False)", "re.compile(p)"],
)
def test_what_does_not_is_not(line):
    assert not dangers(line)


@pytest.mark.item("S01")
def test_our_source_makes_no_code_of_data():
    files = [path for package in OURS for path in (ROOT / package).rglob("*.py")]

    found = {str(path.relative_to(ROOT)): dangers(path.read_text(encoding="utf-8")) for path in files}

    assert len(files) > 50
    assert not {path: all for path, all in found.items() if all}


@pytest.mark.item("S11")
def test_the_strict_loader_of_yaml_is_a_safe_one():
    from infoxlm_core.run_file import StrictLoader

    assert issubclass(StrictLoader, yaml.SafeLoader)
    with pytest.raises(yaml.YAMLError):
        yaml.load("!!python/object/apply:os.getcwd []", Loader=StrictLoader)


SECRETS = {
    "key of AWS": r"\b(AKIA|ASIA)[0-9A-Z]{16}\b",
    "secret of AWS": r"(?i)aws_secret_access_key[\"']?\s*[:=]\s*[\"']?[A-Za-z0-9/+=]{20,}",
    "private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "token of a forge or hub": r"\b(gh[pousr]_[A-Za-z0-9]{30,}|hf_[A-Za-z0-9]{30,}|glpat-[\w-]{20,})",
    "password in a URL": r"\b[a-z][a-z0-9+.-]*://[^\s/:@\"'{}$<>]+:[^\s/:@\"'{}$<>]{6,}@",
}
LEFT_OUT = {"build", "runs"}  # what runs and builds leave behind
# made-up passwords, in tests of whether one is seen
PLANTED = {"tests/components/adapters/mlflow/test_connection.py", "tests/k8s/test_manifests.py"}


def files_of_the_repository() -> Iterator[Path]:
    for place in ROOT.iterdir():
        if (
            (place.name.startswith(".") and place.name != ".ci")
            or place.name in LEFT_OUT
            or place.suffix == ".egg-info"
        ):
            continue
        yield from [place] if place.is_file() else (path for path in place.rglob("*") if path.is_file())


def secrets_in(text: str) -> list[str]:
    return [f"{kind}: {found[0][:12]}…" for kind, pattern in SECRETS.items() for found in re.finditer(pattern, text)]


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
def test_a_secret_is_seen(text):
    assert secrets_in(f"x = '{text}'")


@pytest.mark.item("S07")
def test_no_file_of_the_repository_holds_a_secret():
    texts = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8", errors="replace")
        for path in files_of_the_repository()
        if path.suffix not in (".png", ".pyc")
    }

    assert len(texts) > 150
    assert not {name: found for name, text in texts.items() if name not in PLANTED and (found := secrets_in(text))}


def test_no_manifest_makes_a_secret_with_a_value():
    manifests = list((ROOT / "k8s").rglob("*.yaml"))

    kinds = [
        thing["kind"]
        for path in manifests
        for thing in yaml.safe_load_all(path.read_text())
        if thing and "kind" in thing
    ]

    assert len(kinds) > 10 and "Secret" not in kinds


@pytest.mark.item("S12")
def test_no_compiled_pipeline_decides_by_text_installs_or_holds_a_secret():
    compiled = list((ROOT / "pipelines/compiled").glob("*.yaml"))

    assert len(compiled) >= 3
    for path in compiled:
        text = path.read_text()
        assert not re.search(r"condition:[^:]*string_value", text), path  # the local runner would eval() it
        assert "pip install" not in text, path
        executors = next(yaml.safe_load_all(text))["deploymentSpec"]["executors"].values()
        given = [variable for executor in executors for variable in executor["container"].get("env", [])]
        assert not [variable for variable in given if is_secret(variable["name"])], path  # a reference, never a value
