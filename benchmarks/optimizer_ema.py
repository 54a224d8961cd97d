"""What touches every parameter once a step: AdamW, clipping, the key encoder's move. 107 million parameters."""

import torch
from torch import Tensor, nn

from benchmarks import inputs, ours, peers
from benchmarks.harness import OURS, Case, Unequal, measure
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.model.momentum import KeyEncoder
from infoxlm_core.training.optimizer import make_adamw

MOMENTUM, CLIP = 0.999, 1.0


def run(quick: bool) -> list[Case]:
    rounds, words = (2, 32_000) if quick else (7, inputs.VOCABULARIES["250k"])
    model = ours.make_model(inputs.config({}), words)
    generator = torch.Generator().manual_seed(inputs.SEED)
    for parameter in model.parameters():
        parameter.grad = torch.empty(parameter.shape).normal_(0.0, 1.0, generator=generator)
    return [adam(model, rounds), clipping(model, rounds), ema(model, rounds)]


def _count(model: nn.Module) -> dict[str, int]:
    return {"parameters": sum(p.numel() for p in model.parameters())}


def _copies(model: nn.Module) -> list[nn.Parameter]:
    copies = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    for copy, p in zip(copies, model.parameters(), strict=True):
        copy.grad = p.grad
    return copies


def adam(model: InfoXLM, rounds: int) -> Case:
    """One update of every parameter; all variants must come to the same weights."""
    wanted = inputs.config({}, optimization={"warmup_steps": 0, "learning_rate": 1e-4}).optimization
    same = {"lr": wanted.learning_rate, "betas": wanted.betas, "eps": wanted.epsilon}
    same |= {"weight_decay": wanted.weight_decay}
    found = Case("optimizer, AdamW", _count(model), unit="parameters")
    weights = {name: _copies(model) for name in (OURS, "torch, for-loop", "torch, foreach")}
    optimizers = {
        OURS: make_adamw(weights[OURS], wanted),
        "torch, for-loop": torch.optim.AdamW(weights["torch, for-loop"], **same, foreach=False),
        "torch, foreach": torch.optim.AdamW(weights["torch, foreach"], **same, foreach=True),
    }
    found.about = {OURS: "training.optimizer.make_adamw: torch AdamW, fused"}
    if reason := peers.fairseq_reason():
        found.skipped["fairseq's Adam"] = reason
    else:
        from fairseq.optim.adam import Adam

        weights["fairseq's Adam"] = _copies(model)
        optimizers["fairseq's Adam"] = Adam(weights["fairseq's Adam"], **same)
        found.about["fairseq's Adam"] = "fairseq.optim.adam.Adam, as ve-fairseq 0.12.3 has it on a CPU"
    for name, optimizer in optimizers.items():
        optimizer.step()
        found.equality[name] = {"weights": _apart(weights[name], weights[OURS])}
        if found.equality[name]["weights"] > 1e-5:
            raise Unequal(f"{found.name}: weights of {name} differ by {found.equality[name]['weights']:.1e}")
    del found.equality[OURS]
    return measure(found, {name: _call(optimizer.step) for name, optimizer in optimizers.items()}, rounds)


def _apart(found: list[nn.Parameter], expected: list[nn.Parameter]) -> float:
    with torch.no_grad():
        difference = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
        return (difference / sum(float(b.square().sum()) for b in expected)) ** 0.5


def _call(function):
    def once(number: int) -> None:
        function()

    return once


def clipping(model: InfoXLM, rounds: int) -> Case:
    """The norm of a gradient that need not be clipped."""
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad.mul_(1e-5)
    found = Case("clipping, not needed", _count(model), unit="parameters")
    found.about = {OURS: "norm first, scale only beyond the limit", "torch": "clip_grad_norm_, which always scales"}

    def mine() -> None:
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        if norm > CLIP:
            nn.utils.clip_grads_with_norm_(parameters, CLIP, norm)

    variants = {OURS: _call(mine), "torch": _call(lambda: nn.utils.clip_grad_norm_(parameters, CLIP))}
    return measure(found, variants, rounds)


def ema(model: InfoXLM, rounds: int) -> Case:
    """One move of the key encoder."""
    keys = KeyEncoder(model)
    inputs.perturb(keys, inputs.SEED + 1)
    queries = dict(model.named_parameters())
    pairs: list[tuple[Tensor, Tensor]] = [(key.clone(), queries[name]) for name, key in keys.named_parameters()]

    @torch.no_grad()
    def formula() -> None:
        for key, query in pairs:
            key.copy_(key * MOMENTUM + query * (1.0 - MOMENTUM))

    found = Case("key encoder, EMA", _count(keys), unit="parameters")
    found.about = {OURS: "KeyEncoder.follow: _foreach_lerp_", "reference formula": "k.copy_(k * m + q * (1 - m))"}
    keys.follow(MOMENTUM)
    formula()
    apart = _apart([key for key, _ in pairs], list(keys.parameters()))
    found.equality["reference formula"] = {"weights": apart}
    if apart > 1e-6:
        raise Unequal(f"{found.name}: weights differ by {apart:.1e}")
    return measure(found, {OURS: _call(lambda: keys.follow(MOMENTUM)), "reference formula": _call(formula)}, rounds)
