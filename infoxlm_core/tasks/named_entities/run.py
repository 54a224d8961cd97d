"""Fine-tune named-entity taggers, and measure their F1 in each language.

A word's first token predicts the word's tag. Words without a token, including truncated words, are tagged O, so that
their entities count as missed.
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
from infoxlm_core.tasks.named_entities.files import (
    LAYOUT,
    TAG,
    Sentence,
    list_files,
    list_labels,
    name_data,
    read_tagged,
)
from infoxlm_core.tasks.named_entities.task import HEAD, NO_TARGET, NamedEntitiesConfig
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.tasks.task import load_selected_models
from infoxlm_core.training.finetuning import selection
from infoxlm_core.training.finetuning.task_learner import Training

logger = logging.getLogger(__name__)
FirstTokens = Mapping[int, int]  # word index -> position of the word's first token, for words with tokens


class EncodedSentences(NamedTuple):
    """N tokenised sentences."""

    examples: Examples
    first_tokens: list[FirstTokens]  # one mapping per sentence


def list_test_files(settings: NamedEntitiesConfig) -> list[Path]:
    """List the local files with test sentences."""
    return [file.path for file in list_files(settings) if file.split == "test"]


def check(settings: NamedEntitiesConfig, has_grid: bool) -> None:
    """Raise InputError if a set for training, model selection or the test is missing or not readable."""
    sets = read_tagged(settings)
    list_labels(settings, sets)  # raises CorpusTooSmall if the training sets are missing or have a single tag
    needs_dev = has_grid or settings.selection.rule != "last"  # for selecting grid points or checkpoints
    required_splits = ["dev", "test"] if needs_dev else ["test"]
    for split in required_splits:
        if not sets[split]:
            raise InputError(f"{name_data(settings)}: no {split} sentences. {LAYOUT}")
    source = two_letters(settings.train_languages[0])
    selection.check_dev_languages(settings.selection.rule, source, sorted(sets["dev"]))


def read_training(settings: NamedEntitiesConfig, encoder: Path, corpus: Path | None) -> Training:  # noqa: ARG001
    """Read and tokenise the training and development sets."""
    sets = read_tagged(settings, ("train", "dev"))
    labels = list_labels(settings, sets)
    languages = list(dict.fromkeys(map(two_letters, settings.train_languages)))  # removes duplicates
    train_sentences: list[Sentence] = []
    sentence_languages: list[str] = []
    for language in languages:
        sentences = sets["train"].get(language, [])
        train_sentences += sentences
        sentence_languages += [language] * len(sentences)
    train = encode(train_sentences, encoder, settings.max_tokens, sentence_languages)
    targets = _build_targets(train_sentences, train.first_tokens, labels, int(train.examples.lengths.max()))

    # Training scores the development sets many times, so they are tokenised once.
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
    """Return a mapping from language to a tagger's F1 on the development set."""
    f1_by_language = {}
    for language, sentences in sets.items():
        predicted_tags = tag(tagger, sentences, encoded_sets[language])
        f1_by_language[language] = span_f1(sentences, predicted_tags)
    return f1_by_language


def _build_targets(
    sentences: Sequence[Sentence], first_tokens: Sequence[FirstTokens], labels: Sequence[str], max_tokens: int
) -> np.ndarray:
    """Return targets (N, max_tokens): a word's label id at its first token, and NO_TARGET elsewhere."""
    label_ids = {label: label_id for label_id, label in enumerate(labels)}
    targets = np.full((len(sentences), max_tokens), NO_TARGET, np.int16)
    for row, (sentence, positions) in enumerate(zip(sentences, first_tokens, strict=True)):
        for word_index, position in positions.items():
            targets[row, position] = label_ids[sentence.tags[word_index]]
    return targets


def measure(settings: NamedEntitiesConfig, models: Path, output: Path) -> Scores:
    """Tag each test set with the model selected for its language, and write `predictions/LANGUAGE.tsv`.

    Raises:
        InputError: the model or a test set is missing or not usable, or the model's labels are not tags.
    """
    _check_labels(models)
    test_sets = read_tagged(settings, ("test",))["test"]
    if not test_sets:
        raise InputError(f"{name_data(settings)}: no test sentences. {LAYOUT}")
    predicted_tags: dict[str, list[list[str]]] = {}
    # Several languages may have the same selected model, which is then loaded only once.
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


def _check_labels(models: Path) -> None:
    """Raise InputError if a model's labels are not tags: a model trained elsewhere may have LABEL_0, LABEL_1, …"""
    for label in padded.read_labels(padded.load_config(models)):
        if not TAG.fullmatch(label):
            raise InputError(
                f"{models}/config.json: the label {label!r:.80} is not O, B-… or I-…. Write the tags to id2label."
            )


def encode(
    sentences: Sequence[Sentence], directory: Path, max_tokens: int, languages: Sequence[str]
) -> EncodedSentences:
    """Tokenise sentences, and find each word's first token.

    Args:
        sentences: N sentences.
        directory: directory of the model that reads the sentences.
        max_tokens: maximum length of a sentence; longer sentences are truncated.
        languages: language codes of the N sentences.

    Raises:
        InputError: the tokenizer cannot map tokens to words.
    """
    encoding = _tokenise_words(sentences, directory, max_tokens)
    first_tokens: list[FirstTokens] = []
    for row in range(len(sentences)):
        positions: dict[int, int] = {}
        for position, word_index in enumerate(encoding.word_ids(row)):
            if word_index is not None:  # None means a special token
                positions.setdefault(word_index, position)
        first_tokens.append(positions)
    num_words = sum(len(sentence.words) for sentence in sentences)
    num_with_token = sum(len(positions) for positions in first_tokens)
    if num_with_token < num_words:
        num_without_token = num_words - num_with_token
        logger.warning("%d of %d words are truncated or have no token, and are tagged O", num_without_token, num_words)
    examples = from_lists(encoding["input_ids"], encoding["token_type_ids"])
    examples = padded.set_language_ids(examples, padded.load_config(directory), languages)
    return EncodedSentences(examples, first_tokens)


def _tokenise_words(sentences: Sequence[Sentence], directory: Path, max_tokens: int) -> BatchEncoding:
    """Tokenise sentences word by word. Raise InputError if the model's tokenizer cannot map tokens to words."""
    tokenizer = tokenizers.load(directory)
    if not tokenizer.is_fast:
        raise InputError(f"{directory}: its tokenizer cannot map tokens to words. Give one with a tokenizer.json.")
    limit = min(max_tokens, pretrained.find_max_tokens(pretrained.read_config(directory)))
    words = [list(sentence.words) for sentence in sentences]
    try:
        return tokenizer(words, is_split_into_words=True, truncation=True, max_length=limit, return_token_type_ids=True)
    except AssertionError as error:  # RoBERTa's tokenizer accepts words only with the option add_prefix_space
        reason = " ".join(str(error).split())
        raise InputError(
            f"{directory}: its tokenizer does not accept separate words ({reason}). Change tokenizer_config.json."
        ) from None


def tag(tagger: TaskModel, sentences: Sequence[Sentence], encoded: EncodedSentences) -> list[list[str]]:
    """Predict the tag of each word. Words without a token are tagged O."""
    tags: list[list[str]] = []
    logits_of_sentences = task_models.compute_logits(tagger, encoded.examples)
    for sentence, logits, first_tokens in zip(sentences, logits_of_sentences, encoded.first_tokens, strict=True):
        label_ids = logits.argmax(dim=1).tolist()  # (tokens, labels) -> (tokens,)
        sentence_tags = ["O"] * len(sentence.words)
        for word_index, position in first_tokens.items():
            sentence_tags[word_index] = tagger.labels[label_ids[position]]
        tags.append(sentence_tags)
    return tags


def span_f1(sentences: Sequence[Sentence], predicted_tags: Sequence[Sequence[str]]) -> float:
    """Return the entity-level F1 over all sentences, as in the CoNLL script.

    Args:
        sentences: sentences with the correct tags.
        predicted_tags: predicted tags of each sentence's words.

    Returns:
        F1 from 0 to 1; 0 if neither the sentences nor the predictions contain an entity.
    """
    from nervaluate import Evaluator

    if not sentences:
        return 0.0
    correct = [list(sentence.tags) for sentence in sentences]
    predicted = [list(tags) for tags in predicted_tags]
    distinct_tags = set(itertools.chain(*correct, *predicted)) - {"O"}
    entity_types = sorted({tag[2:] for tag in distinct_tags})  # B-PER and I-PER -> PER
    # With `strict`, an entity counts only if its first word, last word and type are correct.
    scores = Evaluator(correct, predicted, tags=entity_types, loader="list").evaluate()
    return float(scores["overall"]["strict"].f1)


def _write_predictions(path: Path, sentences: Sequence[Sentence], predicted_tags: Sequence[Sequence[str]]) -> None:
    """Write a word, its correct tag and its predicted tag per line, with a blank line between sentences."""
    blocks = []
    for sentence, tags in zip(sentences, predicted_tags, strict=True):
        rows = zip(sentence.words, sentence.tags, tags, strict=True)
        blocks.append("".join(f"{word}\t{correct_tag}\t{predicted_tag}\n" for word, correct_tag, predicted_tag in rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    manifests.write_atomically(path, "\n".join(blocks))
