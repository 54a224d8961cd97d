"""Generate small sets of questions in SQuAD's format, and tokenizers for text in many scripts."""

import io
import json
import random
from collections.abc import Sequence
from pathlib import Path

import sentencepiece
import torch
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece
from transformers import XLMRobertaConfig, XLMRobertaModel

from infoxlm_core.model.huggingface import tokenizers

SCRIPTS = {
    "en": "The old bridge was built in 1887, near St. Mary's (Hill).",
    "de": "Der „schöne“ Turm heißt Börse; gebaut wurde er 1906/07.",
    "ru": "Город основан в 1703 году: Санкт-Петербург.",
    "ar": "وُلد المؤلف في القاهرة عام 1911، ثم عاش في باريس.",
    "hi": "दिल्ली में १९११ में राजधानी बनी। क़ुतुब मीनार ७३ मीटर ऊँची है।",
    "th": "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย ตั้งแต่ปี 2325 ทำน้ำ",
    "zh": "黑豹队的防守只丢了 308 分，在联赛中排名第六；½ 的人口住在北京。",
    "ko": "오대호의 크기는 24만 평방 킬로미터이다.",
}
CLASSES = {
    "colour": ("green", "silver", "yellow"),
    "season": ("winter", "spring", "summer"),
    "animal": ("horse", "tiger", "eagle"),
    "fruit": ("apple", "lemon", "cherry"),
}
WORDS = ("stone", "river", "table", "cloud", "paper", "garden", "window", "bottle")


def write_squad(path: Path, rows: Sequence[tuple[str, str, str, str]]) -> Path:
    """Write rows of (id, paragraph, question, answer), each paragraph once; an answer starts where it first occurs."""
    paragraphs: dict[str, list[dict]] = {}
    for name, paragraph, question, answer in rows:
        answers = [{"text": answer, "answer_start": paragraph.find(answer)}]
        paragraphs.setdefault(paragraph, []).append({"id": name, "question": question, "answers": answers})
    articles = [
        {"title": "toy", "paragraphs": [{"context": text, "qas": questions} for text, questions in paragraphs.items()]}
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"version": "1.1", "data": articles}))
    return path


def write_encoder(directory: Path, words: Sequence[str], pieces: int, layers: int) -> Path:
    """Write an XLM-R of 40 positions that learns soon, and whose tokenizer has a token for each word."""
    write_xlmr_tokenizer(directory, [" ".join([word] * 9) for word in words], pieces)
    config = XLMRobertaConfig(
        vocab_size=len(tokenizers.load(directory)), hidden_size=32, num_hidden_layers=layers, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=42, type_vocab_size=1, initializer_range=0.25,
    )  # fmt: skip
    torch.manual_seed(0)
    XLMRobertaModel(config, add_pooling_layer=False).save_pretrained(directory)
    return directory


def riddles(count: int, seed: int, words: int = 8) -> list[tuple[str, str, str, str]]:
    """Return questions for the colour, season, animal or fruit of a paragraph that contains one of each."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        answers = {name: rng.choice(members) for name, members in CLASSES.items()}
        text = [*rng.choices(WORDS, k=words), *answers.values()]
        rng.shuffle(text)
        name = rng.choice(sorted(answers))
        rows.append((f"q{number}", " ".join(text), f"which {name}", answers[name]))
    return rows


def write_xlmr_tokenizer(directory: Path, texts: Sequence[str], pieces: int, kind: str = "unigram") -> Path:
    """Train SentencePiece; with `kind` "char" every character is a token."""
    directory.mkdir(parents=True, exist_ok=True)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=pieces, model_type=kind, character_coverage=1.0,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    tokenizers.write_fast(model.getvalue(), directory)
    return directory


def write_bert_tokenizer(directory: Path, texts: Sequence[str]) -> Path:
    """Write a WordPiece tokenizer of single characters, with BERT's layout and segments."""
    directory.mkdir(parents=True, exist_ok=True)
    clean = normalizers.BertNormalizer(lowercase=True)
    letters = sorted(set("".join(clean.normalize_str(text) for text in texts)) - {" "})
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = Tokenizer(WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = clean
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    names = ["input_ids", "token_type_ids", "attention_mask"]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, "model_input_names": names}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | special))
    return directory
