"""The tokenizer that travels with a model: SentencePiece's as `transformers`' tokenizer.json, in XLM-R's id layout."""

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

MODEL = "sentencepiece.bpe.model"  # XLM-R's name of the file, though the model is a unigram one

FILES = (
    "tokenizer.json", MODEL, "spiece.model", "spm.model", "vocab.txt", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
"""What a tokenizer may consist of, besides its tokenizer_config.json."""


def vocabulary_size(model: bytes) -> int:
    """Ids of a SentencePiece model in XLM-R's layout: its pieces, `<pad>` and `<mask>`. RuntimeError if it is none."""
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    return processor.get_piece_size() + 2


def round_scores(model: bytes) -> bytes:
    """The same unigram model with scores rounded to 1/256, so that every tokenizer splits alike.

    Two splits into the same pieces in another order have equal scores. Sums of unrounded scores differ in their
    last bits, in fp32 (SentencePiece) otherwise than in fp64 (`tokenizers`), and so does the split; sums of rounded
    ones are exact.
    """
    proto = sentencepiece_pb2.ModelProto()  # type: ignore[attr-defined]  # made at run time
    proto.ParseFromString(model)
    for piece in proto.pieces:
        piece.score = round(piece.score * 256) / 256
    return proto.SerializeToString()


def write_fast(model: bytes, directory: Path, max_tokens: int = 512) -> None:
    """Write tokenizer.json and tokenizer_config.json: the same ids as SentencePiece for `AutoTokenizer`.

    Raises:
        InputError: the model is damaged.
    """
    with reading("the SentencePiece model"):
        _write_fast(model, directory, max_tokens)


def _write_fast(model: bytes, directory: Path, max_tokens: int) -> None:
    proto = sentencepiece_pb2.ModelProto()  # type: ignore[attr-defined]  # made at run time
    proto.ParseFromString(model)
    bos, pad, eos, unk, mask = SPECIAL_TOKENS
    pieces = [(piece.piece, piece.score) for piece in proto.pieces[3:]]
    vocabulary = [(bos, 0.0), (pad, 0.0), (eos, 0.0), (unk, 0.0), *pieces, (mask, 0.0)]
    tokenizer = Tokenizer(Unigram(vocabulary, unk_id=UNK))
    # SentencePiece normalises by its own character map, then drops spaces at the ends and doubled ones.
    charsmap = proto.normalizer_spec.precompiled_charsmap
    tokenizer.normalizer = normalizers.Sequence(
        [
            *([normalizers.Precompiled(charsmap)] if charsmap else []),
            normalizers.Strip(),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
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
    """The tokenizer of a model or shards directory, from its own files alone."""
    return PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)


def load(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of any model; InputError if there is none that can be read, or it has ids that the model lacks."""
    for path in directory.glob("*.json"):
        outside.check_readable(path)
    with reading(f"{directory}: its tokenizer"):
        found = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        # what its template names may not be there, and has ids of its own
        used = [number for texts in (("a",), ("a", "b")) for number in found(*texts)["input_ids"]]
        ids = max(len(found), *(number + 1 for number in (*used, *found.get_added_vocab().values())))
    config = directory / "config.json"
    if config.is_file():
        rows = outside.read_json(config, dict[str, Any], "copy it again").get("vocab_size")
        if isinstance(rows, int) and ids > rows:
            raise InputError(f"{directory}: its tokenizer has {ids} ids, the model {rows}: give the tokenizer it had")
    return found


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn whatever a library says of a broken tokenizer, panics of Rust too, into InputError."""
    try:
        yield
    except BaseException as error:  # a broken file shows itself by almost any exception
        if isinstance(error, Exception) or outside.is_panic(error):
            raise InputError(f"{what} cannot be read ({one_line(error)}): copy its files again") from None
        raise


def copy(source: Path, directory: Path, longest: int) -> None:
    """Let a model's tokenizer travel along; `longest` is the number of tokens that the model can read."""
    for name in FILES:
        if (source / name).is_file():
            shutil.copy(source / name, directory / name)
    if (source / "tokenizer_config.json").is_file():
        settings = outside.read_json(source / "tokenizer_config.json", dict[str, Any], "copy it again")
        settings["model_max_length"] = longest
        (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
