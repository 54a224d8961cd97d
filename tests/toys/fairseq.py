"""Checkpoints in fairseq's layout, with random weights."""

import argparse
from pathlib import Path

import torch

V, D, FFN, LAYERS, POSITIONS = 50, 128, 96, 3, 34  # two heads of 64


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * 0.1


def layer_tensors(fused: bool) -> dict[str, torch.Tensor]:
    """Return one layer under fairseq's names; `fused`: q, k and v in one matrix, as in older files."""
    attention = {f"self_attn.{p}_proj.{k}": random(*s) for p in "qkv" for k, s in (("weight", (D, D)), ("bias", (D,)))}
    if fused:
        attention = {
            f"self_attn.in_proj_{kind}": torch.cat([attention[f"self_attn.{part}_proj.{kind}"] for part in "qkv"])
            for kind in ("weight", "bias")
        }
    linear = {"self_attn.out_proj": (D, D), "fc1": (FFN, D), "fc2": (D, FFN)}
    norms = {f"{name}.{kind}": random(D) for name in ("self_attn_layer_norm", "final_layer_norm")
             for kind in ("weight", "bias")}  # fmt: skip
    weights = {f"{name}.weight": random(*shape) for name, shape in linear.items()}
    return attention | norms | weights | {f"{name}.bias": random(shape[0]) for name, shape in linear.items()}


def model_tensors(fused: bool = False) -> dict[str, torch.Tensor]:
    """Return XLM-R with its masked-LM head, under names without prefix."""
    state = {
        "sentence_encoder.embed_tokens.weight": random(V, D),
        "sentence_encoder.embed_positions.weight": random(POSITIONS, D),
        "sentence_encoder.emb_layer_norm.weight": random(D),
        "sentence_encoder.emb_layer_norm.bias": random(D),
        "lm_head.dense.weight": random(D, D),
        "lm_head.dense.bias": random(D),
        "lm_head.layer_norm.weight": random(D),
        "lm_head.layer_norm.bias": random(D),
        "lm_head.bias": random(V),
    }
    for number in range(LAYERS):
        state |= {f"sentence_encoder.layers.{number}.{n}": value for n, value in layer_tensors(fused).items()}
    return state | {"lm_head.weight": state["sentence_encoder.embed_tokens.weight"].clone()}


def under(prefix: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": value for name, value in state.items()}


def infoxlm_checkpoint(path: Path, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """Write a checkpoint as InfoXLM's released trainer does, in half precision, and return its projection."""
    projection = random(1, D, D)
    model = under("model_fast.decoder.", state) | under("model_slow.decoder.", model_tensors())
    model |= {"proj_matrix_fast": projection, "proj_matrix_slow": random(1, D, D), "queue": random(16, D),
              "queue_ptr": torch.zeros(1).long(), "enqueue_cnt": torch.zeros(1).long()}  # fmt: skip
    args = argparse.Namespace(arch="infoxlm_base", xlco_layer=2, lr=[2e-4])
    extra = {"epoch": 2, "optimizer": {"exp_avg": random(4)}}
    torch.save({"args": args, "model": {n: v.half() if v.is_floating_point() else v for n, v in model.items()},
                "extra_state": extra}, path)  # fmt: skip
    return projection.half().float()
