"""Translate text by greedy decoding, and compute the BLEU of translations."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from sacrebleu.metrics import BLEU
from safetensors.torch import save_file
from typing_extensions import TypedDict

from infoxlm_core import languages, user_files
from infoxlm_core.data.encoding import encode
from infoxlm_core.data.shards import Shards
from infoxlm_core.data.vocabulary import FIRST_PIECE
from infoxlm_core.errors import InputError, one_line
from infoxlm_core.model.encoder import EncoderSize, evaluating
from infoxlm_core.model.huggingface import directories, pretrained, stored_weights, tokenizers
from infoxlm_core.systems.text_batches import list_languages
from infoxlm_core.systems.translation.config import TranslationConfig
from infoxlm_core.systems.translation.model import Translator
from infoxlm_core.systems.translation.samples import pack_sentences
from infoxlm_core.training.learner import autocast

BATCH_SIZE = 32  # sentences per batch
CONFIG = "config.json"
KIND = "translator"
"""Kind of the manifest beside a translator."""


def max_translation_tokens(source_tokens: int) -> int:
    """Return the maximum length of a translation in tokens, including special tokens, as in XLM's evaluation."""
    return int(1.5 * source_tokens + 10)


def create_bleu(language: str) -> BLEU:
    """Create sacreBLEU's metric with the tokenizer of the target language, and without smoothing as in XLM.

    Without smoothing, translations that share no 4-gram with the references have a BLEU of 0.
    """
    code = languages.two_letters(language)
    if code == "zh":
        tokenizer = "zh"
    # Text without spaces is compared by characters: sacreBLEU's word segmenters need other packages or downloads.
    elif code in ("ja", "km", "lo", "my", "th"):
        tokenizer = "char"
    else:
        tokenizer = "13a"
    return BLEU(tokenize=tokenizer, smooth_method="none")


def compute_bleu(translations: Sequence[str], references: Sequence[str], language: str) -> tuple[float, str]:
    """Return corpus BLEU in percent and sacreBLEU's signature, which makes scores comparable between papers.

    Args:
        translations: detokenized translations.
        references: unmodified reference texts.
        language: target language.
    """
    metric = create_bleu(language)
    score = metric.corpus_score(list(translations), [list(references)]).score
    return score, str(metric.get_signature())


class _Description(TypedDict):
    """The content of a translator's config.json."""

    model_type: str
    size: EncoderSize
    languages: list[str]
    pair: tuple[str, str]
    side_tokens: int


@dataclass(frozen=True)
class TextTranslator:
    """A translation model with its tokenizer."""

    model: Translator
    processor: sentencepiece.SentencePieceProcessor
    languages: Sequence[str]
    """All languages of the shards. A language's index is its embedding's row."""
    pair: tuple[str, str]
    """The two languages that the model translates into each other."""
    side_tokens: int
    """Maximum number of tokens per sentence. Longer sentences are truncated."""

    @classmethod
    def with_shards_tokenizer(cls, model: Translator, config: TranslationConfig, shards: Shards) -> "TextTranslator":
        """Combine a model with the tokenizer of its training shards.

        Raises:
            InputError: the tokenizer is not a SentencePiece model.
        """
        model_file = shards.directory / "tokenizer" / tokenizers.MODEL
        if not model_file.is_file():
            raise InputError(f"{model_file}: no such file: set tokenization.model to a SentencePiece model")
        processor = sentencepiece.SentencePieceProcessor(str(model_file))
        return cls(model, processor, list_languages(shards), config.languages, config.side_tokens)

    @classmethod
    def load(cls, directory: Path) -> "TextTranslator":
        """Load a translator that `save` wrote, and set it to evaluation mode.

        Raises:
            InputError: the directory has no translator, or the weights contradict config.json.
        """
        remedy = "give the output of translate"
        if not directories.is_translator(directory):
            raise InputError(f"{directory} has no translator: {remedy}")
        description = user_files.read_json(directory / CONFIG, _Description, remedy)
        stored_weights.check_counts({"layers": description["size"].layers}, directory / CONFIG)
        with torch.device("meta"):  # compares the shapes before a wrong size can fill the memory
            stored_weights.check_shapes(Translator(description["size"]), directory)
        model = Translator(description["size"])
        try:
            model.load_state_dict(pretrained.read_tensors(directory / pretrained.WEIGHTS))
        except RuntimeError as error:  # for example, another number of layers
            raise InputError(f"{directory}: {one_line(error)}: {stored_weights.REMEDY}") from None
        processor = sentencepiece.SentencePieceProcessor(str(directory / tokenizers.MODEL))
        return cls(model.eval(), processor, description["languages"], description["pair"], description["side_tokens"])

    def save(self, directory: Path, tokenizer_file: Path) -> None:
        """Write the translator in a format of our own, because Transformers has no class for the model."""
        directory.mkdir(parents=True)
        parameters = self.model.named_parameters()
        weights = {name: parameter.detach().float().cpu().contiguous() for name, parameter in parameters}
        save_file(weights, directory / pretrained.WEIGHTS)
        shutil.copyfile(tokenizer_file, directory / tokenizers.MODEL)
        description = _Description(
            model_type=directories.TRANSLATOR,
            size=self.model.encoder.size,
            languages=list(self.languages),
            pair=self.pair,
            side_tokens=self.side_tokens,
        )
        (directory / CONFIG).write_text(json.dumps(description, indent=1, default=asdict) + "\n")

    def find_source_language(self, target: str) -> str:
        """Return the source language for a target language. Raise InputError for an unsupported target language."""
        if target not in self.pair:
            raise InputError(f"the model translates between {' and '.join(self.pair)}, not into {target}")
        first, second = self.pair
        return first if target == second else second

    def translate(self, texts: Sequence[str], target: str) -> list[str]:
        """Translate sentences into the language `target` by greedy decoding. Sentences without tokens stay empty."""
        source_number = self.languages.index(self.find_source_language(target))
        target_number = self.languages.index(target)
        sentences = [ids[: self.side_tokens] for ids in encode(self.processor, list(texts))]
        device = self.model.bias.device
        translations = [""] * len(sentences)
        lengths = [len(sentence) for sentence in sentences]
        shortest_first = [index for index in np.argsort(lengths, kind="stable") if lengths[index]]
        with evaluating(self.model), torch.inference_mode(), autocast(device):
            for start in range(0, len(shortest_first), BATCH_SIZE):
                # Translations of similarly long sentences finish at similar times.
                indices = shortest_first[start : start + BATCH_SIZE]
                batch = pack_sentences([sentences[index] for index in indices], source_number).to(device)
                max_lengths = [max_translation_tokens(length) for length in batch.lengths]
                batch_translations = self.model.generate(batch, target_number, max_lengths)
                for index, token_ids in zip(indices, batch_translations, strict=True):
                    translations[index] = self.decode(token_ids)
        return translations

    def decode(self, token_ids: Sequence[int]) -> str:
        """Convert token ids to text, ignoring special tokens."""
        shift = FIRST_PIECE - 3  # SentencePiece ids are one lower, because the model has no <pad>
        mask_id = self.processor.get_piece_size() + shift
        pieces = [token_id - shift for token_id in token_ids if FIRST_PIECE <= token_id < mask_id]
        return self.processor.decode(pieces)
