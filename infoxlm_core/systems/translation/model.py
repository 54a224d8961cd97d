"""XLM's translator: its encoder, and a decoder that adds causal attention and attention to the source."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infoxlm_core.data.vocabulary import EOS
from infoxlm_core.model.attention import Packing, attend, pack
from infoxlm_core.model.encoder import Encoder, EncoderSize, Layer
from infoxlm_core.model.mixed import AddNorm, Linear
from infoxlm_core.systems.translation.samples import Side
from infoxlm_core.systems.xlm import XLM


@dataclass
class Memory:
    """The cached keys and values of a decoder layer while it generates N translations."""

    key: Tensor  # (N, tokens so far, d)
    value: Tensor  # (N, tokens so far, d)
    source_key: Tensor  # (N, S, d)
    source_value: Tensor  # (N, S, d)
    real: Tensor  # (N, 1, 1, S) bool: false where the source is padding


class DecoderLayer(Layer):
    """An encoder layer with attention to the source between its halves."""

    def __init__(self, size: EncoderSize, dropout: float) -> None:
        super().__init__(size, dropout)
        d = size.hidden
        self.source_query, self.source_key, self.source_value = Linear(d, d), Linear(d, d), Linear(d, d)
        self.source_output, self.source_norm = Linear(d, d), AddNorm(d, size.epsilon)

    def decode(self, hidden: Tensor, target: Packing, source: Tensor, sources: Packing) -> Tensor:
        """Map target rows (T, d) and source rows (S, d) to (T, d), with causal attention within each sentence."""
        hidden, dropout = self.attend(hidden, target, causal=True), self.dropout if self.training else 0.0
        query, key, value = self.source_query(hidden), self.source_key(source), self.source_value(source)
        context = attend(query, key, value, target, sources, self.heads, dropout)
        hidden = self.source_norm(hidden, F.dropout(self.source_output(context), dropout))
        return self.feed_forward(hidden)

    def remember(self, source: Tensor, lengths: Sequence[int]) -> Memory:
        """Return the memory before the first token, with no target keys and all keys of the source (S, d)."""
        pieces = (self.source_key(source).split(list(lengths)), self.source_value(source).split(list(lengths)))
        key, value = (nn.utils.rnn.pad_sequence(list(rows), batch_first=True) for rows in pieces)  # (N, S, d)
        counts = torch.tensor(lengths, device=source.device)
        real = torch.arange(key.shape[1], device=source.device) < counts[:, None]
        nothing = key[:, :0]
        return Memory(nothing, nothing, key, value, real[:, None, None])

    def step(self, hidden: Tensor, memory: Memory) -> Tensor:
        """Decode the next token of each sentence, without dropout: (N, d) -> (N, d)."""
        memory.key = torch.cat([memory.key, self.key(hidden)[:, None]], dim=1)
        memory.value = torch.cat([memory.value, self.value(hidden)[:, None]], dim=1)
        context = self._attend_one(self.query(hidden), memory.key, memory.value)
        hidden = self.attention_norm(hidden, self.attention_output(context))
        context = self._attend_one(self.source_query(hidden), memory.source_key, memory.source_value, memory.real)
        return self.feed_forward(self.source_norm(hidden, self.source_output(context)))

    def _attend_one(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None = None) -> Tensor:
        """Map one query per sentence (N, d), and keys and values (N, t, d), to (N, d)."""
        q, k, v = (rows.unflatten(2, (self.heads, -1)).transpose(1, 2) for rows in (query[:, None], key, value))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=real).transpose(1, 2).flatten(1)


class Decoder(Encoder):
    layer = DecoderLayer


class Translator(nn.Module):
    """An encoder and a decoder, whose output matrix is the decoder's word embeddings plus a bias."""

    def __init__(self, size: EncoderSize, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(size, dropout), Decoder(size, dropout)
        self.bias = nn.Parameter(torch.zeros(size.vocabulary))

    def read(self, source: Side) -> Tensor:
        """Return the encoder's output (S, d) for the source."""
        return self.encoder.run(
            self.encoder.embed(source.ids, source.positions, source.types), source.lengths, 0, len(self.encoder.layers)
        )

    def forward(self, source: Side, target: Side) -> Tensor:
        """Return the logits (T - N, V) of every token of the N targets except the first, given the earlier tokens."""
        memory = self.read(source)
        hidden = self.decoder.embed(target.ids, target.positions, target.types)
        layers: list[Any] = list(self.decoder.layers)
        targets, sources = pack(target.lengths, hidden.device), pack(source.lengths, hidden.device)
        hidden = self.decoder.prepare(hidden, layers)
        with torch.autocast(hidden.device.type, enabled=False):  # layers handle bf16 themselves
            for layer in layers:
                hidden = layer.decode(hidden, targets, memory, sources)
        ends = torch.tensor(target.lengths, device=hidden.device).cumsum(0) - 1
        not_last = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device).index_fill(0, ends, False)
        return self._logits(hidden[not_last])

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.decoder.token_embedding.weight, self.bias)

    @torch.no_grad()
    def generate(self, source: Side, language: int, limits: Sequence[int]) -> list[list[int]]:
        """Return greedy translations of N sentences, as token ids without `</s>`.

        Args:
            source: the packed sentences.
            language: number of the target language.
            limits: largest number of tokens of each translation, both `</s>` included.
        """
        encoded, count, device = self.read(source), len(source.lengths), source.ids.device
        layers: list[Any] = list(self.decoder.layers)
        self.decoder.prepare(encoded, layers)
        memories = [layer.remember(encoded, source.lengths) for layer in layers]
        last, language_row = torch.full((count,), EOS, device=device), torch.full((count,), language, device=device)
        words: list[Tensor] = []
        unfinished = torch.ones(count, dtype=torch.bool, device=device)
        longest = torch.tensor(limits, device=device)
        for position in range(max(limits) - 2):
            hidden = self.decoder.embed(last, torch.full_like(last, position), language_row).to(encoded.dtype)
            with torch.autocast(device.type, enabled=False):  # layers handle bf16 themselves
                for layer, memory in zip(layers, memories, strict=True):
                    hidden = layer.step(hidden, memory)
            best = self._logits(hidden).argmax(dim=1)  # (N,)
            unfinished = unfinished & (best != EOS) & (position + 2 < longest)
            last = torch.where(unfinished, best, EOS)
            if not unfinished.any():
                break
            words.append(last)
        rows = torch.stack(words, dim=1).tolist() if words else [[] for _ in range(count)]
        return [row[: row.index(EOS)] if EOS in row else row for row in rows]


def start_from(model: Translator, pretrained: XLM, half: str, only_embeddings: bool = False) -> None:
    """Copy a pre-trained XLM into `half` ("encoder" or "decoder") of a translator of the same size.

    The decoder keeps its random attention to the source, which XLM does not have, and gets XLM's output bias.
    """
    weights = pretrained.encoder.state_dict()
    if only_embeddings:
        weights = {"token_embedding.weight": weights["token_embedding.weight"]}
    getattr(model, half).load_state_dict(weights, strict=False)
    if half == "decoder" and not only_embeddings:
        with torch.no_grad():
            model.bias.copy_(pretrained.bias)
