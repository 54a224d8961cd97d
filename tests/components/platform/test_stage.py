"""What a step imports before it knows whether there is anything to do: seconds that every finished run pays again."""

import ast
import subprocess
import sys
from pathlib import Path

import components

FOLDER = Path(components.__file__).parent
STEPS = ("prepare_corpus", "tokenize_corpus", "pretrain", "finetune", "evaluate", "register", "promote")


def imports_of(step: str) -> str:
    """The import statements at the top of a component's body, which every call executes."""
    tree = ast.parse((FOLDER / f"{step}.py").read_text(encoding="utf-8"))
    [function] = [one for one in tree.body if isinstance(one, ast.FunctionDef)]
    return "\n".join(ast.unparse(one) for one in function.body if isinstance(one, ast.Import | ast.ImportFrom))


def test_steps_that_find_their_artifacts_need_neither_torch_nor_transformers():
    check = "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    statements = [imports_of(step) for step in STEPS]
    program = "\n".join(["import sys", *(f"{imports}\n{check}" for imports in statements)])

    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    loaded_after_each_step = dict(zip(STEPS, printed.stdout.splitlines(), strict=False))
    assert all(statements) and loaded_after_each_step == dict.fromkeys(STEPS, "[]"), printed.stderr
