"""The tokenizer stored with a model: a SentencePiece model as `transformers`' tokenizer.json, in XLM-R's id layout."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import sentencepiece_model_pb2_new as sentencepiece_pb2

from infoxlm_core import outside
from infoxlm_core.data.vocabulary import BOS, EOS, SPECIAL_TOKENS, UNK
from infoxlm_core.errors import InputError, one_line

MODEL = "sentencepiece.bpe.model"  # XLM-R's file name, although it holds a unigram model

FILES = (
    "tokenizer.json", MODEL, "spiece.model", "spm.model", "vocab.txt", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
"""Files that may belong to a tokenizer, besides tokenizer_config.json."""


def vocabulary_size(model: bytes) -> int:
    """Return the number of ids of a SentencePiece model in XLM-R's layout: its pieces, `<pad>` and `<mask>`.

    Raises:
        RuntimeError: the bytes are not a SentencePiece model.
    """
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    return processor.get_piece_size() + 2


def round_scores(model: bytes) -> bytes:
    """Return the unigram model with scores rounded to 1/256, so that all libraries split text in the same way.

    Two splits into the same pieces in a different order have equal scores. Sums of unrounded scores are rounded
    differently in fp32 (SentencePiece) and fp64 (`tokenizers`), so the libraries would choose different splits. Sums
    of rounded scores are exact.
    """
    proto = sentencepiece_pb2.ModelProto()  # type: ignore[attr-defined]  # generated at run time
    proto.ParseFromString(model)
    for piece in proto.pieces:
        piece.score = round(piece.score * 256) / 256
    return proto.SerializeToString()


def write_fast(model: bytes, directory: Path, max_tokens: int = 512) -> None:
    """Write tokenizer.json and tokenizer_config.json, with which `AutoTokenizer` gives SentencePiece's ids.

    Raises:
        InputError: the model is damaged.
    """
    with reading("the SentencePiece model"):
        _write_fast(model, directory, max_tokens)


def _write_fast(model: bytes, directory: Path, max_tokens: int) -> None:
    """Convert a SentencePiece model, and write it with its settings."""
    proto = sentencepiece_pb2.ModelProto()  # type: ignore[attr-defined]  # generated at run time
    proto.ParseFromString(model)
    bos, pad, eos, unk, mask = SPECIAL_TOKENS
    pieces = [(piece.piece, piece.score) for piece in proto.pieces[3:]]  # without SentencePiece's special pieces
    vocabulary = [(bos, 0.0), (pad, 0.0), (eos, 0.0), (unk, 0.0), *pieces, (mask, 0.0)]
    tokenizer = Tokenizer(Unigram(vocabulary, unk_id=UNK))
    # SentencePiece normalises with its own character map, then removes outer and repeated spaces.
    character_map = proto.normalizer_spec.precompiled_charsmap
    steps: list[Any] = [normalizers.Precompiled(character_map)] if character_map else []
    steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}", pair=f"{bos} $A {eos} {eos} $B {eos}", special_tokens=[(bos, BOS), (eos, EOS)]
    )
    tokenizer.add_special_tokens([bos, pad, eos, unk, AddedToken(mask, lstrip=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "bos_token": bos, "cls_token": bos, "eos_token": eos, "sep_token": eos,
        "pad_token": pad, "unk_token": unk, "mask_token": mask,
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def load_fast(directory: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a model or shards directory from local files only."""
    return PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)


def load(directory: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of any model; InputError if it is missing, damaged, or has ids that the model lacks."""
    for path in directory.glob("*.json"):
        outside.check_readable(path)
    with reading(f"{directory}: its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        # The template may add special tokens whose ids lie outside the vocabulary, so encode a text and a pair.
        template_ids = [*tokenizer("a")["input_ids"], *tokenizer("a", "b")["input_ids"]]
        added_ids = tokenizer.get_added_vocab().values()
        largest_id = max(*template_ids, *added_ids, len(tokenizer) - 1)
    id_count = largest_id + 1
    config_path = directory / "config.json"
    if config_path.is_file():
        embedding_count = outside.read_json(config_path, dict[str, Any], "copy it again").get("vocab_size")
        if isinstance(embedding_count, int) and id_count > embedding_count:
            raise InputError(
                f"{directory}: its tokenizer has {id_count} ids, but the model only {embedding_count}: "
                "give the tokenizer it was trained with"
            )
    return tokenizer


@contextmanager
def reading(subject: str) -> Iterator[None]:
    """Turn every exception about a damaged tokenizer, and every panic of Rust code, into InputError."""
    try:
        yield
    except BaseException as error:  # a damaged file can raise almost any exception
        if isinstance(error, Exception) or outside.is_panic(error):
            raise InputError(f"{subject} cannot be read ({one_line(error)}): copy its files again") from None
        raise


def copy(source: Path, directory: Path, max_tokens: int) -> None:
    """Copy a model's tokenizer; `max_tokens` is the largest number of tokens that the model can read."""
    for name in FILES:
        if (source / name).is_file():
            shutil.copy(source / name, directory / name)
    settings_path = source / "tokenizer_config.json"
    if settings_path.is_file():
        settings = outside.read_json(settings_path, dict[str, Any], "copy it again")
        settings["model_max_length"] = max_tokens
        (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
