"""Fine-tune a tagger of entities and measure it.

The first piece of a word bears its tag. Words that `max_tokens` cuts off, and words without a piece, are answered O:
entities among them count as missed.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from infoxlm_core import manifests
from infoxlm_core.data.examples import Examples, from_lists
from infoxlm_core.errors import InputError
from infoxlm_core.languages import two_letters
from infoxlm_core.model import task_models
from infoxlm_core.model.huggingface import pretrained, tokenizers
from infoxlm_core.model.task_models import TaskModel
from infoxlm_core.tasks.named_entities.files import LAYOUT, Sentence, list_labels, read_tagged, where_of
from infoxlm_core.tasks.named_entities.head import HEAD, NO_TARGET
from infoxlm_core.tasks.named_entities.settings import NamedEntitiesConfig
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.tasks.task import load_chosen
from infoxlm_core.training.finetuning import selection
from infoxlm_core.training.finetuning.task_learner import Training

logger = logging.getLogger(__name__)


def training_languages(settings: NamedEntitiesConfig) -> list[str]:
    return list(dict.fromkeys(map(two_letters, settings.train_languages)))


def check(settings: NamedEntitiesConfig, chosen: bool) -> None:
    """Read all sets; those of development must be there if something is chosen by them."""
    sets = read_tagged(settings)
    list_labels(settings, sets)
    for split in ("dev", "test") if chosen or settings.selection.rule != "last" else ("test",):
        if not sets[split]:
            raise InputError(f"{where_of(settings)}: no {split} sentences: {LAYOUT}")
    selection.check(settings.selection.rule, training_languages(settings)[0], sorted(sets["dev"]))


def training(settings: NamedEntitiesConfig, encoder: Path) -> Training:
    """Read and tokenise training and development sets."""
    sets = read_tagged(settings, ("train", "dev"))
    labels = list_labels(settings, sets)
    languages = training_languages(settings)
    train = [sentence for language in languages for sentence in sets["train"].get(language, ())]
    examples, firsts = encode(train, encoder, settings.max_tokens)
    numbers = {label: number for number, label in enumerate(labels)}
    targets = np.full((len(train), int(examples.lengths.max())), NO_TARGET, np.int16)
    for row, (sentence, pieces) in enumerate(zip(train, firsts, strict=True)):
        for word, piece in pieces.items():
            targets[row, piece] = numbers[sentence.tags[word]]
    score_dev = _score_dev(sets["dev"], encoder, settings.max_tokens) if sets["dev"] else None
    return Training(
        HEAD, examples, targets, labels, languages[0], tuple(sorted(sets["dev"])), score_dev, settings.head_dropout
    )


def measure(settings: NamedEntitiesConfig, model: Path, output: Path) -> Scores:
    """Tag the test sets with a fine-tuned model; write `predictions/LANGUAGE.tsv`."""
    tests = read_tagged(settings, ("test",))["test"]
    if not tests:
        raise InputError(f"{where_of(settings)}: no test sentences: {LAYOUT}")
    given = {}
    for directory, tagger, languages in load_chosen(model, HEAD, tests):
        for language in languages:
            examples, firsts = encode(tests[language], directory, settings.max_tokens)
            given[language] = tag(tagger, tests[language], examples, firsts)
    for language, sentences in tests.items():
        _write(output / "predictions" / f"{language}.tsv", sentences, given[language])
    f1 = {language: span_f1(sentences, given[language]) for language, sentences in tests.items()}
    return Scores.from_languages(
        "named_entities",
        {language: {"f1": value} for language, value in f1.items()},
        training_languages(settings)[0],
        model,
        counts={language: len(sentences) for language, sentences in tests.items()},
        test_set=manifests.digest(tests),
    )


def encode(sentences: Sequence[Sentence], directory: Path, max_tokens: int) -> tuple[Examples, list[Mapping[int, int]]]:
    """Sentences as a model reads them, and the first piece of each word; InputError if its tokenizer tells no words."""
    tokenizer = tokenizers.load(directory)
    if not tokenizer.is_fast:
        raise InputError(f"{directory}: its tokenizer does not tell words: give one with a tokenizer.json")
    limit = min(max_tokens, pretrained.longest_of(pretrained.read_config(directory)))
    words = [list(sentence.words) for sentence in sentences]
    try:
        found = tokenizer(
            words, is_split_into_words=True, truncation=True, max_length=limit, return_token_type_ids=True
        )
    except AssertionError as error:  # of RoBERTa's
        said = " ".join(str(error).split())
        raise InputError(
            f"{directory}: its tokenizer takes no words ({said}): set it in tokenizer_config.json"
        ) from None
    firsts: list[Mapping[int, int]] = []
    for row in range(len(sentences)):
        pieces: dict[int, int] = {}
        for piece, word in enumerate(found.word_ids(row)):
            if word is not None:
                pieces.setdefault(word, piece)
        firsts.append(pieces)
    if lost := sum(map(len, words)) - sum(map(len, firsts)):
        logger.warning("%d of %d words are cut off or have no piece: taken for O", lost, sum(map(len, words)))
    return from_lists(found["input_ids"], found["token_type_ids"]), firsts


def tag(
    tagger: TaskModel, sentences: Sequence[Sentence], examples: Examples, firsts: Sequence[Mapping[int, int]]
) -> list[list[str]]:
    """The most probable tag of each word."""
    answers: list[list[str]] = []
    for sentence, logits, pieces in zip(sentences, task_models.run(tagger, examples), firsts, strict=True):
        best = logits.argmax(dim=1).tolist()
        answers.append([tagger.labels[best[pieces[n]]] if n in pieces else "O" for n in range(len(sentence.words))])
    return answers


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
    entity_types = sorted({tag[2:] for tags in (*correct, *predicted) for tag in tags if tag != "O"})
    scores = Evaluator(correct, predicted, tags=entity_types, loader="list").evaluate()
    return float(scores["overall"]["strict"].f1)


def _score_dev(
    sets: Mapping[str, Sequence[Sentence]], encoder: Path, max_tokens: int
) -> Callable[[TaskModel], dict[str, float]]:
    encoded = {language: encode(sentences, encoder, max_tokens) for language, sentences in sets.items()}
    return lambda tagger: {
        language: span_f1(sentences, tag(tagger, sentences, *encoded[language]))
        for language, sentences in sorted(sets.items())
    }


def _write(path: Path, sentences: Sequence[Sentence], given: Sequence[Sequence[str]]) -> None:
    """Word, tag and answer a line, blank lines between sentences."""
    blocks = [
        "".join(f"{word}\t{right}\t{answer}\n" for word, right, answer in zip(*sentence, tags, strict=True))
        for sentence, tags in zip(sentences, given, strict=True)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    manifests.write_atomically(path, "\n".join(blocks))
