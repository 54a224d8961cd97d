"""Reads, converts and copies a model's tokenizer.

SentencePiece models are converted to Transformers' tokenizer.json, with the ids of XLM-R.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import sentencepiece_model_pb2_new as sentencepiece_pb2

from infoxlm_core import user_files
from infoxlm_core.data.vocabulary import BOS, EOS, SPECIAL_TOKENS, UNK, Vocabulary
from infoxlm_core.errors import InputError, one_line

MODEL = "sentencepiece.bpe.model"  # file name in XLM-R, although the model is a unigram model
FAST = "tokenizer.json"
SETTINGS = "tokenizer_config.json"

FILES = (
    FAST, MODEL, "spiece.model", "spm.model", "vocab.txt", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
"""Possible files of a tokenizer, except tokenizer_config.json."""
ALL_FILES = (*FILES, SETTINGS, "config.json")
"""All files that determine a tokenizer's ids. config.json may name the tokenizer's class."""
USUAL_TOKENS = {
    "bos_token": ("<s>", "[CLS]"), "cls_token": ("<s>", "[CLS]"), "eos_token": ("</s>", "[SEP]"),
    "sep_token": ("</s>", "[SEP]"), "pad_token": ("<pad>", "[PAD]"), "unk_token": ("<unk>", "[UNK]"),
    "mask_token": ("<mask>", "[MASK]"),
}  # fmt: skip
"""Role of a special token -> its text in XLM-R and in BERT."""


@contextmanager
def reading(subject: str) -> Iterator[None]:
    """Convert every exception that a damaged tokenizer raises, including Rust panics, to InputError."""
    try:
        yield
    except BaseException as error:  # a damaged file can raise almost any exception
        if isinstance(error, Exception) or user_files.is_panic(error):
            raise InputError(f"{subject} cannot be read ({one_line(error)}): copy its files again") from None
        raise


def find_files(source: Path) -> list[Path]:
    """Return a tokenizer's files. The first file is tokenizer.json or a SentencePiece model.

    If a directory has both, use tokenizer.json, because Transformers also prefers it. The two files can split text
    differently: in a test with XLM-R, they differed for 0.4 % of short messages in 99 languages.

    Args:
        source: SentencePiece model, tokenizer.json, or model directory.

    Raises:
        InputError: the directory has neither tokenizer.json nor a SentencePiece model.
    """
    if not source.is_dir():
        return [source]
    if (source / FAST).is_file():
        return [source / name for name in ALL_FILES if (source / name).is_file()]
    if (source / MODEL).is_file():
        return [source / MODEL]
    raise InputError(f"{source} has neither {FAST} nor {MODEL}: give a model with its tokenizer, or the file itself")


def read_vocabulary(tokenizer: PreTrainedTokenizerBase, source: Path) -> Vocabulary:
    """Return a tokenizer's vocabulary size and special ids.

    Raises:
        InputError: the tokenizer has no tokenizer.json, lacks a special token, or does not add exactly one special
            token before and one after a text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(f"{source}: its tokenizer {type(tokenizer).__name__} has no tokenizer.json: use another model")
    template_ids = tokenizer("")["input_ids"]  # an empty text consists of special tokens only
    if len(template_ids) != 2:
        raise InputError(
            f"{source}: its tokenizer adds {len(template_ids)} special tokens to a text, not one before and one "
            "after it: use another model"
        )
    begin, end = template_ids
    id_by_role = {"pad": tokenizer.pad_token_id, "unk": tokenizer.unk_token_id, "mask": tokenizer.mask_token_id}
    for role, token_id in id_by_role.items():
        if token_id is None:
            raise InputError(f"{source}: its tokenizer has no {role}_token: name it in {SETTINGS}")
    added_special_ids = [token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special]
    special_ids = {begin, end, *id_by_role.values(), *added_special_ids}
    size = max(backend.get_vocab().values()) + 1  # not the number of pieces, because ids may have gaps
    return Vocabulary(begin, end, **id_by_role, special_ids=tuple(sorted(special_ids)), size=size)


def copy_files(tokenizer_json: Path, other_files: Sequence[Path], directory: Path) -> PreTrainedTokenizerBase:
    """Copy a tokenizer.json and its accompanying files to a directory, and return the tokenizer.

    If there is neither tokenizer_config.json nor config.json, write a tokenizer_config.json with the tokenizer's class.
    """
    shutil.copyfile(user_files.check_readable(tokenizer_json), directory / FAST)
    for path in other_files:
        if path.name != "config.json":  # the config of the model, not of its tokenizer
            shutil.copyfile(user_files.check_readable(path), directory / path.name)
    if any(path.name in (SETTINGS, "config.json") for path in other_files):
        return load(tokenizer_json.parent)  # not from the copy, which lacks config.json
    _write_settings(directory)
    return load(directory)


def _write_settings(directory: Path) -> None:
    """Write a tokenizer_config.json for a tokenizer.json with the special tokens of XLM-R or BERT."""
    with reading(str(directory / FAST)):
        vocabulary = Tokenizer.from_file(str(directory / FAST)).get_vocab()
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, usual_tokens in USUAL_TOKENS.items():
        for token in usual_tokens:  # if the vocabulary has both tokens, BERT's takes precedence
            if token in vocabulary:
                settings[role] = token
    _write_json(settings, directory)


def _write_json(settings: dict[str, Any], directory: Path) -> None:
    """Write settings to a directory's tokenizer_config.json."""
    (directory / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n")


def vocabulary_size(model: bytes) -> int:
    """Return a SentencePiece model's number of ids in XLM-R's layout, including `<pad>` and `<mask>`.

    Raises:
        RuntimeError: the bytes are not a SentencePiece model.
    """
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    return processor.get_piece_size() + 2


def round_scores(model: bytes) -> bytes:
    """Round a unigram model's scores to multiples of 1/256, so that all libraries split text in the same way.

    The score of a split is the sum of its pieces' scores, so splits with the same pieces in a different order, such as
    `a·aa` and `aa·a`, have equal scores. Without rounding, the sums can differ in the last bit, and SentencePiece
    (fp32) and `tokenizers` (fp64) choose different splits. Sums of rounded scores are exact.
    """
    proto = sentencepiece_pb2.ModelProto()  # type: ignore[attr-defined]  # generated at run time
    proto.ParseFromString(model)
    for piece in proto.pieces:
        piece.score = round(piece.score * 256) / 256
    return proto.SerializeToString()


@reading("the SentencePiece model")
def write_fast(model: bytes, directory: Path, max_tokens: int = 512) -> None:
    """Convert a SentencePiece model to tokenizer.json and tokenizer_config.json, with the ids of XLM-R.

    Args:
        model: content of the SentencePiece model.
        directory: output directory.
        max_tokens: maximum number of tokens in a text.

    Raises:
        InputError: the model is damaged.
    """
    proto = sentencepiece_pb2.ModelProto()  # type: ignore[attr-defined]  # generated at run time
    proto.ParseFromString(model)
    bos, pad, eos, unk, mask = SPECIAL_TOKENS
    pieces = [(piece.piece, piece.score) for piece in proto.pieces[3:]]  # the first three are <unk>, <s> and </s>
    vocabulary = [(bos, 0.0), (pad, 0.0), (eos, 0.0), (unk, 0.0), *pieces, (mask, 0.0)]
    tokenizer = Tokenizer(Unigram(vocabulary, unk_id=UNK))
    # As SentencePiece does, map characters with the model's table, and then remove outer and repeated spaces.
    character_map = proto.normalizer_spec.precompiled_charsmap  # empty if the model maps no characters
    steps: list[Any] = [normalizers.Precompiled(character_map)] if character_map else []
    steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}", pair=f"{bos} $A {eos} {eos} $B {eos}", special_tokens=[(bos, BOS), (eos, EOS)]
    )
    tokenizer.add_special_tokens([bos, pad, eos, unk, AddedToken(mask, lstrip=True)])
    tokenizer.save(str(directory / FAST))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "bos_token": bos,
        "cls_token": bos,
        "eos_token": eos,
        "sep_token": eos,
        "pad_token": pad,
        "unk_token": unk,
        "mask_token": mask,
    }
    _write_json(settings, directory)


def load_fast(directory: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer from a directory of a model or of shards."""
    return PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)


def load(directory: Path) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer. Raise InputError if it is missing, damaged, or has more ids than the model."""
    for path in directory.glob("*.json"):
        user_files.check_readable(path)  # Transformers would wait forever for a pipe
    with reading(f"{directory}: its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        # Special tokens around a text or a pair may have ids beyond the vocabulary.
        template_ids = [*tokenizer("a")["input_ids"], *tokenizer("a", "b")["input_ids"]]
        added_ids = tokenizer.get_added_vocab().values()
        largest_id = max(*template_ids, *added_ids, len(tokenizer) - 1)
    if (directory / "config.json").is_file():
        _check_id_count(largest_id + 1, directory)
    return tokenizer


def _check_id_count(id_count: int, directory: Path) -> None:
    """Raise InputError if a tokenizer has more ids than its model has word embeddings."""
    config = user_files.read_json(directory / "config.json", dict[str, Any], "copy it again")
    embedding_count = config.get("vocab_size")
    if isinstance(embedding_count, int) and id_count > embedding_count:
        raise InputError(
            f"{directory}: its tokenizer has {id_count} ids, but the model only {embedding_count}: "
            "give the tokenizer it was trained with"
        )


def copy(source: Path, directory: Path, max_tokens: int) -> None:
    """Copy a tokenizer's files, and set model_max_length, so that Transformers truncates texts to `max_tokens`.

    Args:
        source: directory of the tokenizer.
        directory: output directory.
        max_tokens: maximum sequence length of the model, in tokens.
    """
    for name in (*FILES, SETTINGS):
        if (source / name).is_file():
            shutil.copy(source / name, directory / name)
    if (source / SETTINGS).is_file():
        settings = user_files.read_json(source / SETTINGS, dict[str, Any], "copy it again")
        if settings.get("model_max_length") != max_tokens:
            settings["model_max_length"] = max_tokens
            _write_json(settings, directory)
