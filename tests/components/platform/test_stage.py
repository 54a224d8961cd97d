"""What a step imports before it knows whether there is anything to do: seconds that every finished run pays again."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import components

FOLDER = Path(components.__file__).parent
STEPS = ("prepare_corpus", "tokenize_corpus", "pretrain", "finetune", "evaluate", "register", "promote")


def imports_of(step: str) -> str:
    """The import statements at the top of a component's body, which every call executes."""
    tree = ast.parse((FOLDER / f"{step}.py").read_text(encoding="utf-8"))
    [function] = [one for one in tree.body if isinstance(one, ast.FunctionDef)]
    return "\n".join(ast.unparse(one) for one in function.body if isinstance(one, ast.Import | ast.ImportFrom))


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_finds_its_artifact_needs_neither_torch_nor_transformers(step):
    statements = imports_of(step)
    program = f"{statements}\nimport sys\nprint([name for name in ('torch', 'transformers') if name in sys.modules])"

    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert statements and printed.stdout == "[]\n", printed.stderr
