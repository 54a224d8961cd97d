"""Embeds sentences as the model card shows, with torch and transformers, but without this project's code.

    python -I infoxlm_core/model/huggingface/plain_transformers.py < request.json

`tasks.reference_vectors.check_with_transformers` runs this file in a separate process. The file first blocks imports of
our packages, and checks that such imports fail.
"""

import importlib
import json
import sys

BLOCKED_PACKAGES = ("infoxlm_core", "components", "pipelines")


def block_packages() -> list[str]:
    """Block imports of our packages, even if they are installed. Return the names of the packages that are blocked.

    The caller thereby proves that a model can be used without this project.
    """
    blocked_names = []
    for name in BLOCKED_PACKAGES:
        sys.modules[name] = None  # type: ignore[assignment]  # Python then raises ModuleNotFoundError
        try:  # check the block
            importlib.import_module(name)
        except ModuleNotFoundError:
            blocked_names.append(name)
    return blocked_names


def embed(directory: str, layer: int, pooling: str, sentences: list[str]) -> list[list[float]]:
    """Compute sentence vectors as the model card shows, in one padded batch on the CPU, in fp32."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModel.from_pretrained(directory, local_files_only=True, use_safetensors=True, dtype=torch.float32)
    batch = tokenizer(sentences, padding=True, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model.eval()(**batch, output_hidden_states=True).hidden_states[layer]  # (N, L, d)
    if pooling == "cls":
        return hidden[:, 0].tolist()
    attention_mask = batch["attention_mask"].unsqueeze(-1)  # (N, L, 1)
    token_counts = attention_mask.sum(dim=1)  # (N, 1)
    mean = (hidden * attention_mask).sum(dim=1) / token_counts  # (N, d)
    return mean.tolist()


if __name__ == "__main__":
    blocked = block_packages()
    request = json.load(sys.stdin)
    vectors = embed(request["directory"], request["layer"], request["pooling"], request["sentences"])
    versions = {name: sys.modules[name].__version__ for name in ("torch", "transformers")}
    print(json.dumps({"vectors": vectors, "blocked": blocked, "versions": versions}))
