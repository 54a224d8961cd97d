"""Write tiny encoders of several classes with tokenizers that are trained on real text, for exports."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    PreTrainedTokenizerFast,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

from infoxlm_core.tasks.reference_vectors import SENTENCES

TEXTS = (
    *SENTENCES,
    "Open the window, please.",
    "Das Fenster ist offen.",
    "Le fichier est introuvable.",
    "Закройте окно.",
)
MAX_TOKENS = 24
"""Length to which the toys of sentence-transformers truncate texts; they have more positions."""
_XLMR_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
_BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def train_unigram() -> PreTrainedTokenizerFast:
    """Train a tokenizer like XLM-R's on a few sentences."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=_XLMR_SPECIAL[:4], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens(["<mask>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", cls_token="<s>", eos_token="</s>", sep_token="</s>",
        pad_token="<pad>", unk_token="<unk>", mask_token="<mask>",
    )  # fmt: skip


def train_wordpiece(texts: Iterable[str] = TEXTS) -> PreTrainedTokenizerFast:
    """Train a tokenizer like multilingual BERT's, whose special tokens are not the first pieces."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[PAD]", "[unused1]", *_BERT_SPECIAL[1:]], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin, end = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", end), ("[CLS]", begin))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]",
        mask_token="[MASK]",
    )  # fmt: skip


def save_encoder(directory: Path, kind: str) -> Path:
    """Write a tiny encoder with random weights, and return its directory.

    Args:
        directory: where to write.
        kind: infoxlm: our export, contrasted at layer 2 of 3 · e5: BERT with XLM-R's tokenizer, as
            multilingual-e5-small · bge: BERT with WordPiece, whose vector is the first token · distilbert: DistilBERT
            with WordPiece, without files of sentence-transformers.
    """
    torch.manual_seed(0)
    is_wordpiece = kind in ("bge", "distilbert")
    tokenizer = train_wordpiece() if is_wordpiece else train_unigram()
    ids = {"vocab_size": len(tokenizer), "pad_token_id": 0 if is_wordpiece else 1}
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    if kind == "distilbert":
        model = DistilBertModel(
            DistilBertConfig(**ids, dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=40)
        )
    elif kind == "infoxlm":
        contrast = {"layer": 2, "pooling": "mean", "normalise": False}
        model = XLMRobertaForMaskedLM(XLMRobertaConfig(**ids, **sizes, max_position_embeddings=42, infoxlm=contrast))
    else:
        model = BertModel(BertConfig(**ids, **sizes, max_position_embeddings=40))
    for parameter in model.parameters():  # far from the tiny initial values, so that differences show
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if kind == "e5":
        write_modules(directory, pooling="mean", prefix="query: ")
    elif kind == "bge":
        write_modules(directory, pooling="cls", prefix="")
    return directory


def write_modules(directory: Path, pooling: str, prefix: str) -> None:
    """Write the files of sentence-transformers that describe pooling, normalisation and a prompt."""
    modules = []
    for number, (path, name) in enumerate(
        [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    ):
        kind = f"sentence_transformers.models.{name}"
        modules.append({"idx": number, "name": str(number), "path": path, "type": kind})
    files = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": MAX_TOKENS, "do_lower_case": False},
        "1_Pooling/config.json": {
            "word_embedding_dimension": 32,
            "pooling_mode_cls_token": pooling == "cls",
            "pooling_mode_mean_tokens": pooling == "mean",
        },
        "config_sentence_transformers.json": {
            "prompts": {"query": prefix} if prefix else {},
            "default_prompt_name": "query" if prefix else None,
        },
    }
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(json.dumps(content))
