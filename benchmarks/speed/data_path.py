"""From text to batch: tokenizing, drawing languages, reading shards, masking, and all of it together, on real text."""

import random
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from transformers import DataCollatorForLanguageModeling

from benchmarks.speed import corpus, inputs
from benchmarks.speed.harness import OURS, Case, Unequal, measure
from infoxlm_core.config import ObjectivesConfig, PretrainingConfig
from infoxlm_core.data import masking
from infoxlm_core.data.batches import micro_batches
from infoxlm_core.data.encoding import encode
from infoxlm_core.data.layouts import gather
from infoxlm_core.data.samples import Sampler
from infoxlm_core.data.sampling import TableSampler, generator
from infoxlm_core.data.shards import Table, open_shards
from infoxlm_core.data.vocabulary import SPECIAL_TOKENS
from infoxlm_core.model.huggingface import tokenizers

GIGABYTES = (
    "731.6 253.3 99.0 96.8 89.9 86.8 85.6 74.5 60.4 56.4 47.2 40.0 39.4 33.0 28.6 25.9 19.0 17.2 16.1 14.9 13.6 13.4 "
    "13.1 9.5 7.9 7.2 7.0 6.9 6.2 5.9 5.5 5.5 5.0 4.4 3.0 3.0 3.0 2.3 2.3 1.5 1.4 1.4 1.4 1.3 1.3 1.3 1.3 1.2 1.0 1.0 "
    "0.9 0.8 0.8 0.7 0.7 0.7 0.6 0.6 0.6 0.6 0.5 0.5 0.5 0.5 0.5 0.4 0.4 0.4 0.4 0.4 0.4 0.3 0.3 0.3 0.3 0.3 0.2 0.2 "
    "0.2 0.2 0.2 0.2 0.2 0.2 0.2 0.1 0.1"
)
"""The paper's Table 8: how much text each of its 87 languages has."""
ALPHA = 0.7


def run(quick: bool) -> list[Case]:
    rounds, text = (2 if quick else 7), corpus.make()
    return [
        preparing(text),
        tokenizing(text, rounds),
        drawing(rounds),
        reading(text.shards, rounds),
        *(masks(shape, rounds) for shape in inputs.SHAPES),
        loading(text.shards, rounds),
    ]


def preparing(text: corpus.Corpus) -> Case:
    """Raw catalogs to shards, vocabulary included, as measured when the text was made."""
    found = Case("data_path, preparation and tokenization", {"tokens": text.tokens, "wheels": len(corpus.WHEELS)})
    found.about = {OURS: "prepare and tokenize: read, clean, deduplicate, train 16,000 pieces, encode, write shards"}
    found.cpu[OURS], found.work[OURS] = [text.tokens / text.tokens_per_cpu_second], [float(text.tokens)]
    found.wall[OURS] = found.cpu[OURS]
    return found


def tokenizing(text: corpus.Corpus, rounds: int) -> Case:
    """Sentences to ids; the ids of every sentence must be the same."""
    folder = text.shards / "tokenizer"
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / tokenizers.MODEL))
    backend = tokenizers.load_fast(folder).backend_tokenizer
    # `transformers` reads a literal "<s>" in a text as the token of this name
    lines = [line for some in text.texts().values() for line in some if not any(t in line for t in SPECIAL_TOKENS)]

    def mine() -> list[list[int]]:
        return [ids.tolist() for ids in encode(processor, lines)]

    def theirs() -> list[list[int]]:
        return [found.ids for found in backend.encode_batch(lines, add_special_tokens=False)]

    different = sum(a != b for a, b in zip(mine(), theirs(), strict=True))
    size = sum(len(line.encode()) for line in lines)
    found = Case("data_path, tokenizing", {"bytes": size, "sentences": len(lines)}, unit="bytes")
    found.equality["Rust tokenizer"] = {"share of sentences with other ids": different / len(lines)}
    if different:
        raise Unequal(f"{found.name}: {different} of {len(lines)} sentences have other ids")
    found.about = {
        OURS: "data.encoding.encode: sentencepiece, a list of sentences a call",
        "Rust tokenizer": "tokenizers Unigram, encode_batch, one thread, the same vocabulary",
    }
    variants = {
        OURS: lambda number: _none(encode(processor, lines)),
        "Rust tokenizer": lambda number: _none(backend.encode_batch(lines, add_special_tokens=False)),
    }
    return measure(found, variants, rounds)


def _none(value: object) -> None:
    """Throw a result away: `measure` takes a number for the work done."""


def drawing(rounds: int) -> Case:
    """Languages by the distribution of the paper over its 87 languages."""
    sizes = [round(float(gb) * 10) for gb in GIGABYTES.split()]
    sampler = TableSampler([[size] for size in sizes], ALPHA)
    weights, languages, count = sampler.shares.tolist(), range(len(sizes)), 50_000
    rng, plain = generator(inputs.SEED, "benchmark"), random.Random(inputs.SEED)
    found = Case("data_path, drawing languages", {"draws": count, "languages": len(sizes)}, unit="draws")
    found.about = {
        OURS: "TableSampler.draw, which also draws the row: one cumulative distribution for a block",
        "random.choices": "random.choices(languages, weights), one draw a call",
    }

    def theirs(number: int) -> float:
        for _ in range(count // 10):
            plain.choices(languages, weights)
        return count // 10

    return measure(found, {OURS: lambda number: _none(sampler.draw(count, rng)), "random.choices": theirs}, rounds)


def reading(shards: Path, rounds: int) -> Case:
    """Random sentences out of a mapped table."""
    name = max((shards / "mono").glob("*/*.tokens"), key=lambda path: path.stat().st_size)
    table = Table.open(name.with_suffix(""))
    mapped = np.memmap(name, np.uint32, "r")
    count = 20_000
    rows = np.random.default_rng(inputs.SEED).integers(0, len(table), count)
    lengths = (table.offsets[1:] - table.offsets[:-1])[rows]
    found = Case("data_path, reading", {"rows": count, "tokens": int(lengths.sum())})
    found.about = {
        OURS: "layouts.gather, 32 rows a call: slices of a plain view, joined once",
        "np.memmap": "a slice of np.memmap for every row",
    }

    def mine(number: int) -> None:
        for start in range(0, count, 32):
            gather([table], np.zeros(32, np.int64)[: count - start], rows[start : start + 32], 10**6)

    def theirs(number: int) -> None:
        for start in range(0, count, 32):
            spans = [mapped[table.offsets[row] : table.offsets[row + 1]] for row in rows[start : start + 32]]
            np.concatenate(spans).astype(np.int64)

    return measure(found, {OURS: mine, "np.memmap": theirs}, rounds)


class _Tokenizer:
    """What the collator asks of a tokenizer."""

    mask_token, mask_token_id, pad_token_id = "<mask>", inputs.VOCABULARIES["250k"] - 1, 1

    def __len__(self) -> int:
        return inputs.VOCABULARIES["250k"]

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.mask_token_id


def masks(shape: str, rounds: int) -> Case:
    """Masking alone: exact counts a sequence, against the collator's coin for every token of the padded batch."""
    words, rng = inputs.VOCABULARIES["250k"], np.random.default_rng(inputs.SEED)
    counts = inputs.lengths(shape, rng, 512)
    flat, config = inputs.sequences(counts, words, rng).flat, ObjectivesConfig()
    padded = inputs.pad(torch.from_numpy(flat), tuple(counts.tolist()))
    special = padded < 4
    collator = DataCollatorForLanguageModeling(_Tokenizer(), mlm_probability=config.mask_ratio)  # type: ignore[arg-type]
    own = generator(inputs.SEED, "masks")
    found = Case(f"data_path, masking, {shape}", {"tokens": int(counts.sum()), "sequences": len(counts)})
    found.inputs["padding"] = 1 - counts.sum() / padded.numel()
    found.about = {
        OURS: "masking.mask: floor or ceil of 0.15 a sequence, without replacement",
        "collator": "DataCollatorForLanguageModeling.torch_mask_tokens, Bernoulli 0.15",
    }
    variants = {
        OURS: lambda number: _none(masking.mask(flat, counts, words, config, own)),
        "collator": lambda number: _none(collator.torch_mask_tokens(padded.clone(), special)),
    }
    return measure(found, variants, rounds)


def loading(shards: Path, rounds: int) -> Case:
    """Shards to masked, packed micro-batches: what one of 8 workers draws with the default config."""
    opened, config = open_shards(shards), PretrainingConfig()
    share = config.batches.virtual_shards // 8
    samplers = {
        OURS: Sampler(opened, config),
        "MLM only": Sampler(opened, PretrainingConfig.parse({"objectives": {"tlm": 0, "xlco": 0}})),
    }
    found = Case("data_path, shards to packed batches", {"samples of each objective": 256, "block_tokens": 512})
    found.about = {
        OURS: "Sampler.draw and micro_batches: MLM, TLM and mixup views, default config, 8 of 64 virtual shards",
        "MLM only": "the same without TLM and contrast",
    }

    def batches(sampler: Sampler, number: int) -> float:
        drawn = (micro_batches(sampler.draw(4 * number + i, range(share)), 32) for i in range(4))
        return sum(batch.tokens for some in drawn for batch in some)

    variants = {name: lambda number, s=sampler: batches(s, number) for name, sampler in samplers.items()}
    return measure(found, variants, rounds)
