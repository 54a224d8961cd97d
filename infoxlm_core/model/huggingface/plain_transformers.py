"""Sentences -> vectors by torch and transformers alone, as the model card shows it: this project stays outside.

    python -I infoxlm_core/model/huggingface/plain_transformers.py < request.json

Run as a file, in a process of its own (`tasks.reference_vectors.check`). It imports nothing of ours and makes sure that
nothing else does: our packages are blocked, and tried, before anything is loaded.
"""

import importlib
import importlib.abc
import json
import sys
from typing import Any

OURS = ("infoxlm_core", "components", "pipelines")


class Blocked(importlib.abc.MetaPathFinder):
    """Hides our packages, wherever they are installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:  # noqa: ARG002
        if name.partition(".")[0] in OURS:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)


def block() -> list[str]:
    """Hide our packages; return those whose import was then seen to fail."""
    sys.meta_path.insert(0, Blocked())
    failed = []
    for name in OURS:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            failed.append(name)
    return failed


def embed(directory: str, layer: int, pooling: str, sentences: list[str]) -> list[list[float]]:
    """The lines of the model card, on the CPU in fp32, all sentences in one padded batch."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModel.from_pretrained(directory, local_files_only=True, use_safetensors=True, dtype=torch.float32)
    batch = tokenizer(sentences, padding=True, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model.eval()(**batch, output_hidden_states=True).hidden_states[layer]  # (N, L, d)
    mask = batch["attention_mask"].unsqueeze(-1)
    return (hidden[:, 0] if pooling == "cls" else (hidden * mask).sum(dim=1) / mask.sum(dim=1)).tolist()


if __name__ == "__main__":
    blocked = block()
    wanted = json.load(sys.stdin)
    vectors = embed(wanted["directory"], wanted["layer"], wanted["pooling"], wanted["sentences"])
    versions = {name: sys.modules[name].__version__ for name in ("torch", "transformers")}
    print(json.dumps({"vectors": vectors, "blocked": blocked, "versions": versions}))
