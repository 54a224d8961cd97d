"""Task: words of a sentence -> the entities among them (WikiANN, XTREME's panx, any BIO tags).

    train-en.tsv  dev-en.tsv  test-de.tsv      XTREME: one word and its tag a line, a tab between, blank lines between
    en/train  en/dev  de/test                  WikiANN: likewise; words may begin with their language (`en:Berlin`)

The first piece of a word bears its tag. Words that `max_tokens` cuts off, and words without a piece, are answered O:
entities among them count as missed.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from infoxlm_core import manifests, outside
from infoxlm_core.config.base import Language, Share, Source
from infoxlm_core.config.tasks import Paths, RecipeConfig
from infoxlm_core.errors import CorpusTooSmall, EncodingError, InputError
from infoxlm_core.languages import is_known, two_letters
from infoxlm_core.model.task_head import Head
from infoxlm_core.tasks.task import Preset, Scores, Task, load_chosen
from infoxlm_core.training.finetuning import selection

if TYPE_CHECKING:
    from torch import Tensor

    from infoxlm_core.data.examples import Examples
    from infoxlm_core.model.task_models import TaskModel
    from infoxlm_core.training.finetuning.task_learner import Training

logger = logging.getLogger(__name__)
NO_TARGET = -100  # of pieces that are not the first of a word
_SPLITS = {"train": "train", "dev": "dev", "valid": "dev", "validation": "dev", "test": "test"}
_NAME = re.compile(rf"(?:.*[._-])?(?P<split>{'|'.join(_SPLITS)})-(?P<language>[a-z]{{2,3}})(?:\.\w+)?")
_TAG = re.compile(r"O|[BI]-\S+")
_LAYOUT = "give XTREME's files (train-en.tsv, test-de.tsv) or WikiANN's (en/train, de/test)"


class NamedEntitiesConfig(RecipeConfig):
    """Encoder + sentences with tagged words -> a tagger of entities (WikiANN, XTREME's panx)."""

    task: Literal["named_entities"] = "named_entities"
    """The kind of task."""

    data: Source | Paths
    """Files, or folders in the layout of XTREME's panx or of WikiANN: one word and its tag (`O`, `B-PER`, `I-PER`, …)
    a line, parted by a tab, and blank lines between sentences."""

    train_languages: tuple[Language, ...] = ("en",)
    """Languages to train on; every language is tested."""

    head_dropout: Share = 0.1
    """Before the classifier's layer, drawn for the tokens that are computed together."""


class Sentence(NamedTuple):
    """Words and their tags."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


Sets = dict[str, dict[str, list[Sentence]]]  # split -> language -> sentences


def loss(logits: "Tensor", targets: "Tensor", lengths: Sequence[int]) -> tuple["Tensor", "Tensor"]:
    """Cross-entropy of (T, labels) logits of first pieces, summed, and which pieces are right."""
    import torch
    import torch.nn.functional as F

    from infoxlm_core.model.objectives import full_precision

    wanted = torch.cat([row[:length] for row, length in zip(targets, lengths, strict=True)])  # (T,)
    total = F.cross_entropy(full_precision(logits), wanted, ignore_index=NO_TARGET, reduction="sum")
    return total, logits.argmax(dim=1) == wanted


HEAD = Head(
    name="named_entities",
    architecture="TokenClassification",
    by_token=True,
    names=((r"^output\.", "classifier."),),
    bert_names=((r"^output\.", "classifier."),),
    loss=loss,
    count=lambda targets: int((targets != NO_TARGET).sum()),
)


class NamedEntities(Task[NamedEntitiesConfig]):
    """Which words are a name, and of what: spans are right only as a whole."""

    name: ClassVar[str] = "named_entities"
    settings = NamedEntitiesConfig
    metrics: ClassVar[tuple[str, ...]] = ("f1",)
    unit: ClassVar[str] = "sentences"
    order: ClassVar[Sequence[str]] = (
        "en", "af", "ar", "bg", "bn", "de", "el", "es", "et", "eu", "fa", "fi", "fr", "he", "hi", "hu", "id", "it",
        "ja", "jv", "ka", "kk", "ko", "ml", "mr", "ms", "my", "nl", "pt", "ru", "sw", "ta", "te", "th", "tl", "tr",
        "ur", "vi", "yo", "zh",
    )  # fmt: skip
    presets: ClassVar[Mapping[str, Preset]] = {"panx": Preset(), "named-entities": Preset()}
    head = HEAD

    def check(self, settings: NamedEntitiesConfig, chosen: bool) -> None:
        sets = read(settings)
        list_labels(settings, sets)
        for split in ("dev", "test") if chosen or settings.selection.rule != "last" else ("test",):
            if not sets[split]:
                raise InputError(f"{_where(settings)}: no {split} sentences: {_LAYOUT}")
        selection.check(settings.selection.rule, self.declared_languages(settings)[0], sorted(sets["dev"]))

    def tests(self, settings: NamedEntitiesConfig) -> list[Path]:
        paths = [settings.data] if isinstance(settings.data, str) else settings.data
        return [file for path in paths for file, split, _ in _find(Path(path)) if split == "test"]

    def training(self, settings: NamedEntitiesConfig, encoder: Path, corpus: Path | None) -> "Training":  # noqa: ARG002 - of no prepared corpus
        import numpy as np

        from infoxlm_core.training.finetuning.task_learner import Training

        sets = read(settings, ("train", "dev"))
        labels = list_labels(settings, sets)
        languages = self.declared_languages(settings)
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

    def measure(self, settings: NamedEntitiesConfig, model: Path, output: Path) -> Scores:
        tests = read(settings, ("test",))["test"]
        if not tests:
            raise InputError(f"{_where(settings)}: no test sentences: {_LAYOUT}")
        given = {}
        for directory, tagger, languages in load_chosen(model, HEAD, tests):
            for language in languages:
                examples, firsts = encode(tests[language], directory, settings.max_tokens)
                given[language] = tag(tagger, tests[language], examples, firsts)
        for language, sentences in tests.items():
            _write(output / "predictions" / f"{language}.tsv", sentences, given[language])
        f1 = {language: span_f1(sentences, given[language]) for language, sentences in tests.items()}
        return Scores.over(
            self.name,
            {language: {"f1": value} for language, value in f1.items()},
            self.declared_languages(settings)[0],
            model,
            counts={language: len(sentences) for language, sentences in tests.items()},
            test_set=manifests.digest(tests),
        )


def read(settings: NamedEntitiesConfig, splits: Iterable[str] = ("train", "dev", "test")) -> Sets:
    """Read the sentences of some splits; of training text only the languages that are learned.

    Raises:
        InputError: a file is missing, there twice or not readable, or a line is not a word and its tag: file and line.
    """
    sets: Sets = {split: {} for split in splits}
    languages = {two_letters(language) for language in settings.train_languages}
    seen: dict[tuple[str, str], Path] = {}
    for path in [settings.data] if isinstance(settings.data, str) else settings.data:
        for file, split, language in _find(Path(path)):
            if split not in sets or (split == "train" and language not in languages):
                continue
            if first := seen.get((split, language)):
                raise InputError(f"{first} and {file} are both {split} sentences in {language}: keep one")
            seen[split, language] = file
            sets[split][language] = list(_read(file))
    return sets


def _find(path: Path) -> Iterator[tuple[Path, str, str]]:
    """Files, and what their names say: split and language."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder: {_LAYOUT}")
    inside = [path] if path.is_file() else [p for p in outside.below(path) if p.is_file()]
    found = []
    for file in inside:
        if match := _NAME.fullmatch(file.name):
            found.append((file, _SPLITS[match["split"]], two_letters(match["language"])))
        elif file.stem in _SPLITS and is_known(file.parent.name):
            found.append((file, _SPLITS[file.stem], two_letters(file.parent.name)))
    if not found:
        raise InputError(f"{path}: no file whose name says split and language: {_LAYOUT}")
    yield from found


def _read(path: Path) -> Iterator[Sentence]:
    prefix: str | None = None
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            lines = ((number, line.rstrip("\r\n")) for number, line in enumerate(file, 1))
            for blank, block in groupby(lines, key=lambda line: not line[1].strip()):
                if blank:
                    continue
                sentence = []
                for number, line in block:
                    word, _, tag = line.partition("\t")
                    if not _TAG.fullmatch(tag):
                        raise InputError(
                            f"{path}:{number}: {line!r:.80} is not a word, a tab and O, B-… or I-…: mend it"
                        )
                    if prefix is None:
                        found = re.match(r"[a-z]{2,3}(?:-[a-z-]+)?:(?=.)", word)
                        prefix = found[0] if found and is_known(found[0][:2]) else ""
                    sentence.append((word.removeprefix(prefix), tag))
                yield Sentence(*zip(*sentence, strict=True))
    except UnicodeDecodeError:
        raise EncodingError(f"{path}: not UTF-8: convert the file") from None


def list_labels(settings: NamedEntitiesConfig, sets: Sets) -> tuple[str, ...]:
    """Tags of the training text; CorpusTooSmall if there is none, or it has no entity."""
    labels = tuple(sorted({tag for part in sets["train"].values() for sentence in part for tag in sentence.tags}))
    if len(labels) < 2:
        languages = ", ".join(settings.train_languages)
        raise CorpusTooSmall(
            f"{_where(settings)}: train sentences in {languages} have tags {list(labels)}: need=2 tags"
        )
    return labels


def _where(settings: NamedEntitiesConfig) -> str:
    return settings.data if isinstance(settings.data, str) else ", ".join(settings.data)


def encode(
    sentences: Sequence[Sentence], directory: Path, max_tokens: int
) -> tuple["Examples", list[Mapping[int, int]]]:
    """Sentences as a model reads them, and the first piece of each word; InputError if its tokenizer tells no words."""
    from infoxlm_core.data.examples import from_lists
    from infoxlm_core.model.huggingface import pretrained, tokenizers

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
    tagger: "TaskModel", sentences: Sequence[Sentence], examples: "Examples", firsts: Sequence[Mapping[int, int]]
) -> list[list[str]]:
    """The most probable tag of each word."""
    from infoxlm_core.model import task_models

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
) -> "Callable[[TaskModel], dict[str, float]]":
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
