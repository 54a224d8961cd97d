"""Contrast alone: what masking false negatives costs, and the cost of a pair against in-batch contrast.

In-batch losses and a queue are different objectives: only the cost of a pair can be compared.
"""

import torch
from torch import Tensor, nn
from transformers import XLMRobertaModel

from benchmarks import inputs, ours, peers
from benchmarks.harness import OURS, Case, measure
from benchmarks.infoxlm_step import QUEUE
from infoxlm_core.data.batches import PackedBatch
from infoxlm_core.data.vocabulary import PAD
from infoxlm_core.model.objectives import share_a_sentence, xlco_logits, xlco_losses

QUERIES, HIDDEN = 32, 768


def run(quick: bool) -> list[Case]:
    return [masking(2 if quick else 7), per_pair(*(2, 4) if quick else (7, 16))]


def masking(rounds: int) -> Case:
    """Logits, loss and backward over the queue, with and without the false-negative mask."""
    generator = torch.Generator().manual_seed(inputs.SEED)
    query, key, queue = (torch.randn(n, HIDDEN, generator=generator) for n in (QUERIES, QUERIES, QUEUE))
    query.requires_grad_()
    mine, theirs = (torch.randint(2**60, (n, 2), generator=generator) for n in (QUERIES, QUEUE))

    def step(masked: bool) -> None:
        excluded = share_a_sentence(mine, theirs) if masked else None
        xlco_losses(xlco_logits(query, key, queue, 0.25, excluded)).sum().backward()

    sizes = {"queries": QUERIES, "queue": QUEUE, "hidden": HIDDEN}
    found = Case("contrast, false-negative mask", sizes, unit="queries")
    found.about = {OURS: "xlco_logits and its loss with share_a_sentence", "without mask": "the same, no row excluded"}
    return measure(found, {OURS: lambda number: step(True), "without mask": lambda number: step(False)}, rounds)


class _Encoder(nn.Module):
    """The first module of a sentence-transformers model: token vectors of a Hugging Face encoder."""

    def __init__(self, model: XLMRobertaModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Tensor], **unused) -> dict[str, Tensor]:
        vectors = self.model(features["input_ids"], attention_mask=features["attention_mask"]).last_hidden_state
        return {**features, "token_embeddings": vectors}


def per_pair(rounds: int, pairs: int) -> Case:
    """Forward and backward on so many pairs: momentum contrast against two losses of sentence-transformers."""
    words = inputs.VOCABULARIES["32k"]
    config = inputs.config({}, objectives={"mlm": 0, "tlm": 0}, contrast={"layer": 4, "queue_size": QUEUE})
    model = ours.make_model(config, words)
    learner = ours.Given(config, model)
    batches = [inputs.batch("ragged", words, number, ("xlco",), pairs, 1) for number in range(rounds + 1)]
    sizes = inputs.describe(batches[1:]) | {"pairs": pairs, "queue": QUEUE}
    found = Case("contrast, cost per pair", sizes, unit="pairs")
    found.about = {OURS: "momentum contrast at layer 4 of 6, queue with false-negative mask; no optimizer"}

    def mine(number: int) -> None:
        model.zero_grad(set_to_none=True)
        learner.mean_loss(batches[number]).backward()

    variants = {OURS: mine}
    try:
        from sentence_transformers import SentenceTransformer, losses
        from sentence_transformers.models import Pooling
    except ImportError as error:
        found.skipped["sentence-transformers"] = f"not installed ({error}): `make bench` installs it"
    else:
        encoder = peers.HuggingFace(model).model.roberta
        whole = SentenceTransformer(modules=[_Encoder(encoder), Pooling(config.model.hidden, "cls")], device="cpu")
        fed = [_sides(batch) for batch in batches]
        for name, loss in (
            ("MultipleNegativesRankingLoss", losses.MultipleNegativesRankingLoss(whole)),
            ("CachedMultipleNegativesRankingLoss", losses.CachedMultipleNegativesRankingLoss(whole)),
        ):
            found.about[name] = "sentence-transformers, in-batch negatives, CLS of layer 6, dropout 0, defaults"

            def theirs(number: int, loss=loss) -> None:
                whole.zero_grad(set_to_none=True)
                loss([dict(side) for side in fed[number]], torch.zeros(pairs)).backward()

            variants[name] = theirs
    return measure(found, variants, rounds)


def _sides(batch: PackedBatch) -> list[dict[str, Tensor]]:
    """Query and key views as sentence-transformers takes them."""
    counts = inputs.split(batch)
    sides = inputs.pad(batch.ids, counts["query"]), inputs.pad(batch.key_ids, counts["key"])
    return [{"input_ids": ids, "attention_mask": (ids != PAD).long()} for ids in sides]
