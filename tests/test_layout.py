"""The folders of the tests mirror those of the product, so that the tests of a module are easy to find."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
PACKAGES = ("infoxlm_core", "components", "pipelines")
ELSEWHERE = {
    "infoxlm_core/config/corpora.py": "infoxlm_core/stages/test_preparation.py",
    "infoxlm_core/config/pretraining.py": "infoxlm_core/stages/test_pretraining.py",
    "infoxlm_core/config/tasks.py": "infoxlm_core/stages/test_finetuning.py",
    "infoxlm_core/corpora/phases/clean.py": "infoxlm_core/stages/test_golden_rows.py",
    "infoxlm_core/corpora/phases/deduplicate.py": "infoxlm_core/stages/test_golden_rows.py",
    "infoxlm_core/corpora/phases/job.py": "infoxlm_core/stages/test_killed_preparation.py",
    "infoxlm_core/corpora/phases/reserve.py": "infoxlm_core/corpora/test_leaks.py",
    "infoxlm_core/corpora/phases/write.py": "infoxlm_core/corpora/test_leaks.py",
    "infoxlm_core/corpora/report.py": "infoxlm_core/stages/test_preparation.py",
    "infoxlm_core/corpora/tables.py": "infoxlm_core/corpora/test_formats.py",
    "infoxlm_core/data/encoding.py": "infoxlm_core/stages/test_tokenization.py",
    "infoxlm_core/model/huggingface/plain_transformers.py": "infoxlm_core/tasks/test_reference_vectors.py",
    "infoxlm_core/model/huggingface/tokenizers.py": "infoxlm_core/stages/test_tokenization.py",
    "infoxlm_core/model/task_head.py": "infoxlm_core/model/test_task_models.py",
    "infoxlm_core/tasks/export_measurements.py": "infoxlm_core/stages/test_export.py",
    "infoxlm_core/systems/system.py": "infoxlm_core/systems/test_text_system.py",
    "infoxlm_core/training/finetuning/task_learner.py": "infoxlm_core/stages/test_finetuning.py",
    "components/adapters/mlflow/copies.py": "components/adapters/mlflow/test_promotion.py",
    "components/adapters/mlflow/user.py": "k8s/test_mlflow.py",
    "components/adapters/s3/store.py": "components/adapters/test_storage.py",
    "components/adapters/sources/hub.py": "components/platform/test_sources.py",
    "components/platform/sweeps.py": "components/test_suite.py",
    "components/prepare_corpus.py": "components/adapters/ray/test_tasks.py",
    "components/pretrain.py": "components/platform/test_sources.py",
    "components/promote.py": "pipelines/cli/test_registry.py",
    "components/register.py": "e2e/test_pipeline.py",
    "components/tokenize_corpus.py": "e2e/test_pipeline.py",
    "components/translate.py": "pipelines/test_translation.py",
    "pipelines/cli/cluster.py": "pipelines/test_submit.py",
    "pipelines/infoxlm.py": "pipelines/test_compiled.py",
    "pipelines/promotion.py": "pipelines/test_compiled.py",
    "pipelines/steps.py": "k8s/test_secrets.py",
}
"""Module -> the test file that covers it, if that is the file of a stage, protocol or command that uses it."""
SCENARIOS = {
    "infoxlm_core/corpora/test_leaks.py",
    "infoxlm_core/stages/test_duplicates.py",
    "infoxlm_core/stages/test_golden_rows.py",
    "infoxlm_core/stages/test_killed_preparation.py",
    "infoxlm_core/stages/test_versions.py",
    "infoxlm_core/systems/test_named_runs.py",
    "infoxlm_core/systems/test_ranking.py",
    "infoxlm_core/training/test_long_evaluations.py",
    "infoxlm_core/training/test_rewinds.py",
    "components/adapters/kuberay/test_stop.py",
    "components/adapters/ray/test_two_nodes.py",
}
"""Tests of how several modules work together, named after what they prove."""


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Return the modules that a file imports; for `from a import b` both `a` and `a.b`."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return frozenset(modules)


def has_tests(module: str) -> bool:
    """Return whether a test file is named after a module, or a test in the same folder imports the module."""
    path = Path(module)
    dotted = ".".join(path.with_suffix("").parts)
    folder = TESTS / path.parent
    return (folder / f"test_{path.name}").is_file() or any(dotted in imports(test) for test in folder.glob("test_*.py"))


MODULES = [
    str(path.relative_to(ROOT))
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.name != "__init__.py"
]
TEST_FILES = sorted(TESTS.rglob("test_*.py"))


@pytest.mark.parametrize("module", sorted(set(MODULES) - set(ELSEWHERE)))
def test_every_module_is_tested_in_the_folder_of_its_name(module):
    folder, name = Path("tests") / Path(module).parent, Path(module).name
    assert has_tests(module), f"{folder} has no test of {module}: add test_{name}"


@pytest.mark.parametrize("module", ELSEWHERE)
def test_every_exception_is_needed_and_names_an_existing_test(module):
    assert module in MODULES
    assert (TESTS / ELSEWHERE[module]).is_file()
    assert not has_tests(module), f"{module} has tests in its folder: take it out of ELSEWHERE"


def test_every_test_file_is_named_after_a_module_or_package_or_is_a_scenario():
    mirrored = [path.relative_to(TESTS) for path in TEST_FILES if path.relative_to(TESTS).parts[0] in PACKAGES]
    subjects = {path: ROOT / path.parent / path.stem.removeprefix("test_") for path in mirrored}

    others = {str(path) for path, subject in subjects.items()
              if not subject.with_suffix(".py").is_file() and not subject.is_dir()}  # fmt: skip

    assert others == SCENARIOS


@pytest.mark.parametrize("test", TEST_FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_no_test_imports_from_the_file_of_another(test):
    own = ".".join(test.relative_to(ROOT).with_suffix("").parts)
    imported = {name for name in imports(test) if name.startswith("tests.") and ".test_" in name and name != own}
    assert not imported, "move shared code to tests/toys, tests/helpers or conftest.py"
