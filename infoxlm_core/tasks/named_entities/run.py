"""Fine-tune taggers of named entities and measure them by language.

The first token of a word predicts the word's tag. Words that are truncated or have no token are tagged O, so that
entities among them count as missed.
"""

import itertools
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import BatchEncoding

from infoxlm_core import manifests
from infoxlm_core.data.examples import Examples, from_lists
from infoxlm_core.errors import InputError
from infoxlm_core.languages import two_letters
from infoxlm_core.model import padded, task_models
from infoxlm_core.model.huggingface import pretrained, tokenizers
from infoxlm_core.model.task_models import TaskModel
from infoxlm_core.tasks.named_entities.files import LAYOUT, Sentence, list_files, list_labels, name_data, read_tagged
from infoxlm_core.tasks.named_entities.task import HEAD, NO_TARGET, NamedEntitiesConfig
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.tasks.task import load_selected_models
from infoxlm_core.training.finetuning import selection
from infoxlm_core.training.finetuning.task_learner import Training

logger = logging.getLogger(__name__)
FirstTokens = Mapping[int, int]  # index of a word -> position of its first token; words without tokens are missing


class EncodedSentences(NamedTuple):
    """N tokenised sentences."""

    examples: Examples
    first_tokens: list[FirstTokens]  # of each sentence


def list_test_files(settings: NamedEntitiesConfig) -> list[Path]:
    """Return the local files with test sentences."""
    return [file.path for file in list_files(settings) if file.split == "test"]


def check(settings: NamedEntitiesConfig, has_grid: bool) -> None:
    """Raise InputError if a set is not readable, or if the data lack one that training, selection or the test needs."""
    sets = read_tagged(settings)
    list_labels(settings, sets)
    needs_dev = has_grid or settings.selection.rule != "last"  # to compare grid points or checkpoints
    required_splits = ["dev", "test"] if needs_dev else ["test"]
    for split in required_splits:
        if not sets[split]:
            raise InputError(f"{name_data(settings)}: no {split} sentences. {LAYOUT}")
    selection.check_dev_languages(
        settings.selection.rule, two_letters(settings.train_languages[0]), sorted(sets["dev"])
    )


def read_training(settings: NamedEntitiesConfig, encoder: Path, corpus: Path | None) -> Training:  # noqa: ARG001
    """Read and tokenise training and development sets."""
    sets = read_tagged(settings, ("train", "dev"))
    labels = list_labels(settings, sets)
    languages = list(dict.fromkeys(map(two_letters, settings.train_languages)))  # without duplicates
    train_sentences: list[Sentence] = []
    sentence_languages: list[str] = []
    for language in languages:
        sentences = sets["train"].get(language, [])
        train_sentences += sentences
        sentence_languages += [language] * len(sentences)
    train = encode(train_sentences, encoder, settings.max_tokens, sentence_languages)
    targets = _build_targets(train_sentences, train.first_tokens, labels, int(train.examples.lengths.max()))

    # Development sets are scored many times during training, so they are tokenised once.
    dev_sets = {language: sets["dev"][language] for language in sorted(sets["dev"])}
    encoded_dev_sets = {}
    for language, sentences in dev_sets.items():
        encoded_dev_sets[language] = encode(sentences, encoder, settings.max_tokens, [language] * len(sentences))
    score_dev = partial(_score_dev, dev_sets, encoded_dev_sets) if dev_sets else None

    return Training(
        HEAD,
        train.examples,
        targets,
        labels,
        source_language=languages[0],
        dev_languages=tuple(dev_sets),
        score_dev=score_dev,
        head_dropout=settings.head_dropout,
    )


def _score_dev(
    sets: Mapping[str, Sequence[Sentence]], encoded_sets: Mapping[str, EncodedSentences], tagger: TaskModel
) -> dict[str, float]:
    """Return the F1 of a tagger on the development set of each language."""
    f1_by_language = {}
    for language, sentences in sets.items():
        predicted_tags = tag(tagger, sentences, encoded_sets[language])
        f1_by_language[language] = span_f1(sentences, predicted_tags)
    return f1_by_language


def _build_targets(
    sentences: Sequence[Sentence], first_tokens: Sequence[FirstTokens], labels: Sequence[str], max_tokens: int
) -> np.ndarray:
    """Return the label id of each word at its first token, and NO_TARGET elsewhere: (N, max_tokens) int16."""
    label_ids = {label: label_id for label_id, label in enumerate(labels)}
    targets = np.full((len(sentences), max_tokens), NO_TARGET, np.int16)
    for row, (sentence, positions) in enumerate(zip(sentences, first_tokens, strict=True)):
        for word_index, position in positions.items():
            targets[row, position] = label_ids[sentence.tags[word_index]]
    return targets


def measure(settings: NamedEntitiesConfig, models: Path, output: Path) -> Scores:
    """Tag the test set of each language with the model selected for it, and write `predictions/LANGUAGE.tsv`."""
    test_sets = read_tagged(settings, ("test",))["test"]
    if not test_sets:
        raise InputError(f"{name_data(settings)}: no test sentences. {LAYOUT}")
    predicted_tags: dict[str, list[list[str]]] = {}
    for directory, tagger, languages in load_selected_models(models, HEAD, test_sets):
        for language in languages:
            sentences = test_sets[language]
            encoded = encode(sentences, directory, settings.max_tokens, [language] * len(sentences))
            predicted_tags[language] = tag(tagger, sentences, encoded)
    scores = {}
    for language, sentences in test_sets.items():
        _write_predictions(output / "predictions" / f"{language}.tsv", sentences, predicted_tags[language])
        scores[language] = {"f1": span_f1(sentences, predicted_tags[language])}
    return Scores.from_languages(
        "named_entities",
        scores,
        two_letters(settings.train_languages[0]),
        models,
        counts={language: len(sentences) for language, sentences in test_sets.items()},
        test_set=manifests.digest(test_sets),
    )


def encode(
    sentences: Sequence[Sentence], directory: Path, max_tokens: int, languages: Sequence[str]
) -> EncodedSentences:
    """Tokenise sentences, and find the first token of each word.

    Args:
        sentences: N sentences.
        directory: the model that will read them.
        max_tokens: longer sentences are truncated.
        languages: the language of each of the N sentences.

    Raises:
        InputError: the tokenizer cannot map tokens to words.
    """
    encoding = _tokenise_words(sentences, directory, max_tokens)
    first_tokens: list[FirstTokens] = []
    for row in range(len(sentences)):
        positions: dict[int, int] = {}
        for position, word_index in enumerate(encoding.word_ids(row)):
            if word_index is not None:  # None for special tokens
                positions.setdefault(word_index, position)
        first_tokens.append(positions)
    num_words = sum(len(sentence.words) for sentence in sentences)
    num_with_token = sum(len(positions) for positions in first_tokens)
    if num_with_token < num_words:
        num_without_token = num_words - num_with_token
        logger.warning("%d of %d words are truncated or have no token, and are tagged O", num_without_token, num_words)
    examples = from_lists(encoding["input_ids"], encoding["token_type_ids"])
    examples = padded.set_language_ids(examples, padded.read_config(directory), languages)
    return EncodedSentences(examples, first_tokens)


def _tokenise_words(sentences: Sequence[Sentence], directory: Path, max_tokens: int) -> BatchEncoding:
    """Tokenise the words of sentences with a model's tokenizer. Raise InputError if it cannot map tokens to words."""
    tokenizer = tokenizers.load(directory)
    if not tokenizer.is_fast:
        raise InputError(f"{directory}: its tokenizer cannot map tokens to words. Give one with a tokenizer.json.")
    limit = min(max_tokens, pretrained.find_max_tokens(pretrained.read_config(directory)))
    words = [list(sentence.words) for sentence in sentences]
    try:
        return tokenizer(words, is_split_into_words=True, truncation=True, max_length=limit, return_token_type_ids=True)
    except AssertionError as error:  # RoBERTa's tokenizer needs an option to accept words
        reason = " ".join(str(error).split())
        raise InputError(
            f"{directory}: its tokenizer refuses words ({reason}). Change tokenizer_config.json."
        ) from None


def tag(tagger: TaskModel, sentences: Sequence[Sentence], encoded: EncodedSentences) -> list[list[str]]:
    """Return the most probable tag of each word, or O for words without a token."""
    tags: list[list[str]] = []
    logits_of_sentences = task_models.compute_logits(tagger, encoded.examples)
    for sentence, logits, first_tokens in zip(sentences, logits_of_sentences, encoded.first_tokens, strict=True):
        label_ids = logits.argmax(dim=1).tolist()  # (tokens, labels) -> the label of each token
        sentence_tags = ["O"] * len(sentence.words)
        for word_index, position in first_tokens.items():
            sentence_tags[word_index] = tagger.labels[label_ids[position]]
        tags.append(sentence_tags)
    return tags


def span_f1(sentences: Sequence[Sentence], predicted_tags: Sequence[Sequence[str]]) -> float:
    """Return the F1 of whole entities over all sentences, as the CoNLL script counts them.

    Args:
        sentences: sentences with their correct tags.
        predicted_tags: one tag for each word of each sentence, in the same order.

    Returns:
        A value from 0 to 1; 0 if neither the sentences nor the predictions have an entity.
    """
    from nervaluate import Evaluator

    if not sentences:
        return 0.0
    correct = [list(sentence.tags) for sentence in sentences]
    predicted = [list(tags) for tags in predicted_tags]
    distinct_tags = set(itertools.chain(*correct, *predicted)) - {"O"}
    entity_types = sorted({tag[2:] for tag in distinct_tags})  # B-PER and I-PER -> PER
    # `strict` counts an entity only if its first word, its last word and its type are correct.
    scores = Evaluator(correct, predicted, tags=entity_types, loader="list").evaluate()
    return float(scores["overall"]["strict"].f1)


def _write_predictions(path: Path, sentences: Sequence[Sentence], predicted_tags: Sequence[Sequence[str]]) -> None:
    """Write a word with its correct and its predicted tag on each line, and a blank line between sentences."""
    blocks = []
    for sentence, tags in zip(sentences, predicted_tags, strict=True):
        rows = zip(sentence.words, sentence.tags, tags, strict=True)
        blocks.append("".join(f"{word}\t{correct_tag}\t{predicted_tag}\n" for word, correct_tag, predicted_tag in rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    manifests.write_atomically(path, "\n".join(blocks))
