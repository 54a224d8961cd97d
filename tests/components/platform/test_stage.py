"""Steps that find their artifacts start fast, because they import no slow libraries."""

import ast
import subprocess
import sys
from pathlib import Path

import components

FOLDER = Path(components.__file__).parent
STEPS = ("prepare_corpus", "tokenize_corpus", "pretrain", "finetune", "evaluate", "register", "promote")


def list_imports(step: str) -> str:
    """Return the import statements at the top of a component's body, which every call executes."""
    tree = ast.parse((FOLDER / f"{step}.py").read_text(encoding="utf-8"))
    [function] = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    statements = [node for node in function.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return "\n".join(ast.unparse(statement) for statement in statements)


def test_imports_of_steps_include_neither_torch_nor_transformers():
    check = "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    programs = [f"{list_imports(step)}\n{check}" for step in STEPS]

    command = [sys.executable, "-c", "\n".join(["import sys", *programs])]
    result = subprocess.run(command, capture_output=True, text=True)

    loaded_after_each_step = dict(zip(STEPS, result.stdout.splitlines(), strict=False))
    assert loaded_after_each_step == dict.fromkeys(STEPS, "[]"), result.stderr
