"""Write tiny encoders with random weights and tokenizers of whole words, as our export does."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, XLMRobertaConfig, XLMRobertaForMaskedLM

TEXTS = ["save the file", "a", "open the door and save the file before you close the door", "close it"]
WORDS = sorted({word for text in TEXTS for word in text.split()} | set("bcdefghijklmnopqrstuvwxyz"))


def save_tokenizer(directory: Path, words: list[str] = WORDS) -> PreTrainedTokenizerFast:
    """Write a tokenizer of whole words with XLM-R's special tokens and layout."""
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *words, "<mask>"]
    inner = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **{f"{k}_token": v for k, v in names.items()})
    tokenizer.save_pretrained(directory)
    return tokenizer


def save_model(directory: Path, kind: type = XLMRobertaForMaskedLM, words: list[str] = WORDS, **config) -> Path:
    """Write a tiny model with random weights as our export does, and return its directory.

    Args:
        config: fields of its config.json that differ from the defaults below; None removes a field.
    """
    torch.manual_seed(config.pop("seed", 0))
    fields = {
        "vocab_size": len(save_tokenizer(directory, words)), "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 40, "pad_token_id": 1,
        "infoxlm": {"layer": 1, "pooling": "mean", "normalise": False},
    } | config  # fmt: skip
    model = kind(XLMRobertaConfig(**{name: value for name, value in fields.items() if value is not None}))
    for parameter in model.parameters():  # far from the tiny initial values, so that differences show
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    return directory


def save_bag_of_words(directory: Path, words: list[str]) -> Path:
    """Write a model whose vector of a sentence is about the mean of random vectors of its words."""
    save_model(directory, words=words, hidden_size=64, infoxlm={"layer": 0, "pooling": "mean", "normalise": False})
    model = XLMRobertaForMaskedLM.from_pretrained(directory)
    embeddings = model.roberta.embeddings
    for parameter in (embeddings.position_embeddings.weight, embeddings.token_type_embeddings.weight):
        torch.nn.init.zeros_(parameter)
    embeddings.LayerNorm.reset_parameters()
    model.save_pretrained(directory)
    return directory


NUMBERED = [f"w{number}" for number in range(40)]  # the words of `write_tokenizer`


def write_tokenizer(directory: Path, bert: bool) -> None:
    """Write a tokenizer of whole words: `<s> a </s> </s> b </s>`, or BERT's `<s> a </s> b </s>` with segments."""
    words = ["<s>", "<pad>", "</s>", "<unk>", *NUMBERED]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    pair = "<s> $A </s> $B:1 </s>:1" if bert else "<s> $A </s> </s> $B </s>"
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", pair, special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.add_special_tokens(words[:4])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = ["input_ids", "token_type_ids", "attention_mask"] if bert else ["input_ids", "attention_mask"]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "cls_token": "<s>", "eos_token":
                "</s>", "sep_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "model_max_length": 999,
                "model_input_names": names}  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "sentencepiece.bpe.model").write_bytes(b"goes along")
