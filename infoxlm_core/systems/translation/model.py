"""XLM's translator: XLM's encoder, and a decoder with causal attention and cross-attention to the source."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from infoxlm_core.data.vocabulary import EOS
from infoxlm_core.model.attention import Packing, attend, pack
from infoxlm_core.model.encoder import Encoder, EncoderSize, Layer
from infoxlm_core.model.mixed_precision import AddNorm, Linear
from infoxlm_core.systems.translation.config import Initialisation
from infoxlm_core.systems.translation.samples import PackedSentences
from infoxlm_core.systems.xlm import XLM


@dataclass
class DecoderCache:
    """A decoder layer's keys and values during the generation of N translations."""

    key: Tensor  # (N, tokens so far, d)
    value: Tensor  # (N, tokens so far, d)
    source_key: Tensor  # (N, S, d)
    source_value: Tensor  # (N, S, d)
    source_mask: Tensor  # (N, 1, 1, S) bool; false at padding


class DecoderLayer(Layer):
    """An encoder layer with cross-attention to the source between self-attention and feed-forward network."""

    def __init__(self, size: EncoderSize, dropout: float) -> None:
        super().__init__(size, dropout)
        d = size.hidden
        self.source_query = Linear(d, d)
        self.source_key = Linear(d, d)
        self.source_value = Linear(d, d)
        self.source_output = Linear(d, d)
        self.source_norm = AddNorm(d, size.epsilon)

    def decode(self, hidden: Tensor, target_packing: Packing, source: Tensor, source_packing: Packing) -> Tensor:
        """Compute the layer for complete targets, with causal attention within each sentence.

        Args:
            hidden: output of the previous layer for all target tokens (T, d).
            target_packing: lengths and offsets of the targets.
            source: output of the encoder for all source tokens (S, d).
            source_packing: lengths and offsets of the sources.

        Returns:
            The output of this layer (T, d).
        """
        hidden = self.attend(hidden, target_packing, causal=True)  # (T, d)
        query = self.source_query(hidden)  # (T, d)
        key = self.source_key(source)  # (S, d)
        value = self.source_value(source)  # (S, d)
        context = attend(query, key, value, target_packing, source_packing, self.heads, self.active_dropout)
        change = F.dropout(self.source_output(context), self.active_dropout)
        return self.feed_forward(self.source_norm(hidden, change))

    def create_cache(self, source: Tensor, lengths: Sequence[int]) -> DecoderCache:
        """Create the cache for the encoder's output (S, d), before the first target token."""
        sizes = list(lengths)
        source_key = pad_sequence(list(self.source_key(source).split(sizes)), batch_first=True)  # (N, S, d)
        source_value = pad_sequence(list(self.source_value(source).split(sizes)), batch_first=True)
        positions = torch.arange(source_key.shape[1], device=source.device)
        source_mask = positions < torch.tensor(sizes, device=source.device)[:, None]  # (N, S)
        no_tokens = source_key[:, :0]  # (N, 0, d)
        return DecoderCache(no_tokens, no_tokens, source_key, source_value, source_mask[:, None, None])

    def decode_next(self, hidden: Tensor, cache: DecoderCache) -> Tensor:
        """Compute the layer for the next token of each translation (N, d), and add the token to the cache."""
        cache.key = torch.cat([cache.key, self.key(hidden)[:, None]], dim=1)
        cache.value = torch.cat([cache.value, self.value(hidden)[:, None]], dim=1)
        context = self._attend_from_one_token(self.query(hidden), cache.key, cache.value)
        hidden = self.attention_norm(hidden, self.attention_output(context))
        context = self._attend_from_one_token(
            self.source_query(hidden), cache.source_key, cache.source_value, cache.source_mask
        )
        return self.feed_forward(self.source_norm(hidden, self.source_output(context)))

    def _attend_from_one_token(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Attend from one query per sentence (N, d) to keys and values (N, t, d)."""
        query = self._split_heads(query[:, None])  # (N, heads, 1, head size)
        key = self._split_heads(key)  # (N, heads, t, head size)
        value = self._split_heads(value)  # (N, heads, t, head size)
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        return context.transpose(1, 2).flatten(1)  # (N, heads, 1, head size) -> (N, d)

    def _split_heads(self, rows: Tensor) -> Tensor:
        """Split the last dimension into heads: (N, t, d) -> (N, heads, t, head size)."""
        return rows.unflatten(2, (self.heads, -1)).transpose(1, 2)


class Decoder(Encoder):
    """An encoder whose layers also attend to the source."""

    layer_class = DecoderLayer


class Translator(nn.Module):
    """An encoder-decoder model. Its output matrix is the decoder's word embeddings, plus a bias."""

    def __init__(self, size: EncoderSize, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = Encoder(size, dropout)
        self.decoder = Decoder(size, dropout)
        self.bias = nn.Parameter(torch.zeros(size.vocabulary))

    def encode(self, source: PackedSentences) -> Tensor:
        """Return the encoder's output (S, d) for source sentences with S tokens in total."""
        hidden = self.encoder.embed(source.ids, source.positions, source.types)
        return self.encoder.run_layers(hidden, source.lengths, 0, len(self.encoder.layers))

    def forward(self, source: PackedSentences, target: PackedSentences) -> Tensor:
        """Return the next-token logits (T - N, V) at every position of the N targets except the last."""
        encoded_source = self.encode(source)  # (S, d)
        hidden = self.decoder.embed(target.ids, target.positions, target.types)  # (T, d)
        layers: list[Any] = list(self.decoder.layers)
        target_packing = pack(target.lengths, hidden.device)
        source_packing = pack(source.lengths, hidden.device)
        hidden = self.decoder.apply_autocast(hidden, layers)
        with torch.autocast(hidden.device.type, enabled=False):  # layers handle bf16 themselves
            for layer in layers:
                hidden = layer.decode(hidden, target_packing, encoded_source, source_packing)
        last_rows = target_packing.cu_seqlens[1:].long() - 1  # (N,) no token follows the last token of a target
        has_next_token = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)  # (T,)
        has_next_token[last_rows] = False
        return self._logits(hidden[has_next_token])

    def _logits(self, hidden: Tensor) -> Tensor:
        """Compute logits over the vocabulary: (N, d) -> (N, V)."""
        return F.linear(hidden, self.decoder.token_embedding.weight, self.bias)

    @torch.no_grad()
    def generate(self, source: PackedSentences, language: int, max_lengths: Sequence[int]) -> list[list[int]]:
        """Translate N sentences by greedy decoding. Return token ids without `</s>`.

        Args:
            source: the sentences.
            language: number of the target language.
            max_lengths: maximum number of tokens per translation, including both `</s>`.
        """
        device = source.ids.device
        sentence_count = len(source.lengths)
        encoded_source = self.encode(source)  # (S, d)
        layers: list[Any] = list(self.decoder.layers)
        # Only refresh the layers' weight copies. The encoder's output already has the precision of autocast.
        self.decoder.apply_autocast(encoded_source, layers)
        caches = [layer.create_cache(encoded_source, source.lengths) for layer in layers]
        languages = torch.full((sentence_count,), language, device=device)
        tokens = torch.full((sentence_count,), EOS, device=device)  # newest token of each translation
        generated: list[Tensor] = []  # one (N,) tensor per position
        is_unfinished = torch.ones(sentence_count, dtype=torch.bool, device=device)
        length_limits = torch.tensor(max_lengths, device=device)
        for position in range(max(max_lengths) - 2):
            hidden = self.decoder.embed(tokens, torch.full_like(tokens, position), languages)  # (N, d)
            hidden = hidden.to(encoded_source.dtype)
            with torch.autocast(device.type, enabled=False):  # layers handle bf16 themselves
                for layer, cache in zip(layers, caches, strict=True):
                    hidden = layer.decode_next(hidden, cache)
            best_tokens = self._logits(hidden).argmax(dim=1)  # (N,)
            has_room = position + 2 < length_limits  # the new token is at position + 1, and `</s>` must follow it
            is_unfinished = is_unfinished & (best_tokens != EOS) & has_room
            tokens = torch.where(is_unfinished, best_tokens, EOS)
            if not is_unfinished.any():
                break
            generated.append(tokens)
        if not generated:
            return [[] for _ in range(sentence_count)]
        translations = torch.stack(generated, dim=1).tolist()  # N lists, padded with `</s>`
        return [_cut_at_end(translation) for translation in translations]


def _cut_at_end(ids: list[int]) -> list[int]:
    """Return the ids before the first `</s>`."""
    return ids[: ids.index(EOS)] if EOS in ids else ids


def copy_pretrained_weights(model: Translator, xlm: XLM, encoder: Initialisation, decoder: Initialisation) -> None:
    """Copy the weights of a pre-trained XLM into a translator of the same size.

    Cross-attention keeps its random weights, because XLM has none.

    Args:
        model: the translator with random weights.
        xlm: the pre-trained model.
        encoder: selection of weights for the encoder.
        decoder: selection of weights for the decoder. `pretrained` includes XLM's output bias.
    """
    _copy_weights(xlm.encoder, model.encoder, encoder)
    _copy_weights(xlm.encoder, model.decoder, decoder)
    if decoder == "pretrained":
        with torch.no_grad():
            model.bias.copy_(xlm.bias)


def _copy_weights(source: Encoder, target: Encoder, initialisation: Initialisation) -> None:
    """Copy no weights (`random`), only word embeddings (`embeddings`), or all weights (`pretrained`)."""
    if initialisation == "embeddings":
        target.token_embedding.load_state_dict(source.token_embedding.state_dict())
    elif initialisation == "pretrained":
        target.load_state_dict(source.state_dict(), strict=False)  # XLM has no cross-attention
