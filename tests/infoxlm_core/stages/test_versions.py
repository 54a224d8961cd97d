"""The results of a stage change only together with its version, by which stored artifacts are found again.

Each stage runs on a tiny input, and its result is compared with a digest that belongs to its version. The digests cover
only what is exact on every processor: text, ids, masks, orders, schedules and shares of few answers, but no weights and
losses. Those of `scores` and `points` cover which questions are asked and how answers are counted.
"""

import dataclasses
import hashlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import sentencepiece
import torch
from transformers import XLMRobertaConfig, XLMRobertaModel
from transformers.utils import sentencepiece_model_pb2_new as sentencepiece_pb2

from infoxlm_core import manifests
from infoxlm_core.config import (
    EvaluationConfig,
    OptimizationConfig,
    PreparationConfig,
    PretrainingConfig,
    TokenizationConfig,
)
from infoxlm_core.corpora.parallel import map_in_process
from infoxlm_core.data import shards as token_shards
from infoxlm_core.data.sampling import make_rng
from infoxlm_core.data.writing import write_table
from infoxlm_core.model import task_models
from infoxlm_core.model.huggingface import tokenizers
from infoxlm_core.stages import finetuning, merging, preparation, tokenization
from infoxlm_core.systems.table import SYSTEMS
from infoxlm_core.systems.translation.config import TranslationConfig
from infoxlm_core.systems.translation.decoding import compute_bleu
from infoxlm_core.systems.translation.evaluation import TranslatedText, score_sentences
from infoxlm_core.systems.translation.samples import TranslationSampler, denoising_weight
from infoxlm_core.tasks import perplexity, questions
from infoxlm_core.tasks.classification import run
from infoxlm_core.tasks.classification.task import ClassificationConfig
from infoxlm_core.tasks.embedding import VectorSpec
from infoxlm_core.tasks.question_answering import answers
from infoxlm_core.tasks.question_answering.task import AnsweringConfig
from infoxlm_core.tasks.retrieval import held_out, nearest
from infoxlm_core.tasks.scores import average_within_and_across, mean_over, transfer_gap
from infoxlm_core.training.finetuning.best_checkpoints import BestCheckpoints
from infoxlm_core.training.finetuning.task_learner import TaskLearner
from infoxlm_core.training.learner import Learner
from infoxlm_core.training.optimizer import learning_rate
from tests.helpers.files import Folder
from tests.toys.pretraining import make_pairs, make_text, tiny_config
from tests.toys.questions import write_squad

GOLDEN = {  # kind of artifact -> its version, and the digest of the result on the inputs below
    "corpus": (4, "sha256:0d53cbf852823b2e4650ee39362a3c1814a526115e7299f57bec0deb0d0bf7a5"),
    "shards": (3, "sha256:542808531c015947bb2a1b8695805a68ee7eac077f366b382288a87e614991c5"),
    "pretrained": (1, "sha256:1b83ccc3f91217ba6bfa5837936e11d7879c2df3175f225191197934b0d487b5"),
    "merged": (1, "sha256:e74314076cec8078d733575250a6655e04ad46d60e03a9706e915e51e997b0f1"),
    "classifier": (2, "sha256:ec3923542d09a47f4208692b3d20e390f645976fcdeda635391a53c0a7b5d078"),
    "scores": (5, "sha256:194657d8704eb8b334e0a239151c7f755cd0a9c8f02aa1e725b0e7ca3c7b6763"),
    "points": (2, "sha256:d1867b052dc8e5f842924c09fdfefc98ac8e1dff93965f46b766aa526472fee6"),
    "translator": (2, "sha256:93e700f3f25c2cc0416d682f298ba3b41d71d37b9954ad21ba27f2d92388b4a3"),
    "translations": (2, "sha256:8c205f513ae98def5e33baad221b0fdce16c9faa6c24d6cbd0d7b4d78274fe06"),
}

WORDS = ["the", "a", "key", "page", "table", "opens", "closes", "finds", "here", "now",
         "der", "die", "das", "ein", "Schlüssel", "Seite", "Tisch", "öffnet", "schließt", "hier"]  # fmt: skip
PAIRS = [
    (f"{article} {noun} {verb} {place}", f"{german_article} {german_noun} {german_verb} {place}")
    for article, german_article in (("the", "der"), ("a", "ein"))
    for noun, german_noun in (("key", "Schlüssel"), ("page", "Seite"), ("table", "Tisch"))
    for verb, german_verb in (("opens", "öffnet"), ("closes", "schließt"))
    for place in ("here", "now")
]


# Fields of a batch that do not affect the training: alignment for GPUs and for sharded models, and the names of curves.
FIELDS_WITHOUT_EFFECT = ("rows_with_target", "padding_tokens", "is_dummy", "target_group_ids", "view_group_ids")


def list_leaves(value: Any) -> Iterator[bytes]:
    """Yield the arrays and numbers in a batch, without the names of its fields."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.name not in FIELDS_WITHOUT_EFFECT]
        value = [getattr(value, name) for name in names]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from list_leaves(part)
    elif isinstance(value, torch.Tensor | np.ndarray):
        array = np.ascontiguousarray(value)
        if array.size:
            yield f"{array.dtype} {array.shape}".encode() + array.tobytes()
    else:
        yield repr(value).encode()


def digest_batches(batches: Iterable[Any]) -> list[str]:
    """Return a digest of each batch that does not depend on the order of its fields."""
    digests = []
    for batch in batches:
        leaf_digests = sorted(hashlib.sha256(leaf).digest() for leaf in list_leaves(batch))
        digests.append(hashlib.sha256(b"".join(leaf_digests)).hexdigest())
    return digests


def round_scores(value: Any) -> Any:
    """Round scores to nine digits, because a mean may be added up in another order."""
    if isinstance(value, Mapping):
        return {str(name): round_scores(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [round_scores(part) for part in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def make_sentencepiece_model() -> bytes:
    """Return a unigram model of all letters and some words."""
    model = sentencepiece_pb2.ModelProto()
    model.trainer_spec.model_type = 1
    model.normalizer_spec.name = "identity"
    letters = sorted({*"".join(WORDS), *"abcdefghijklmnopqrstuvwxyz.,?!:;()0123456789", "▁"})
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(letter, -8.0, 1) for letter in letters]
    pieces += [(f"▁{word}", -4.0 - number / 64, 1) for number, word in enumerate(WORDS[::2])]
    for piece, score, kind in pieces:
        model.pieces.add(piece=piece, score=score, type=kind)
    return model.SerializeToString()


def write_lines(path: Path, *lines: str) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    """A tiny model with the tokenizer of `make_sentencepiece_model`."""
    directory = tmp_path_factory.mktemp("encoder")
    model = make_sentencepiece_model()
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = XLMRobertaConfig(vocab_size=tokenizers.vocabulary_size(model), max_position_embeddings=70, **sizes)
    XLMRobertaModel(config).save_pretrained(directory)
    tokenizers.write_fast(model, directory)
    (directory / tokenizers.MODEL).write_bytes(model)
    return directory


def make_corpus(tmp_path: Path, encoder: Path) -> Any:
    odd_lines = ["the key opens here", "\ufeffThe  key\u00a0opens here", "x", "", "http://a.b/c d",
                 "Ключ от двери здесь", "1 2"]  # fmt: skip
    corpora = [
        {"name": "one", "format": "tsv", "path": write_lines(tmp_path / "one.tsv", *map("\t".join, PAIRS[:16]))},
        {"name": "two", "format": "tsv", "path": write_lines(tmp_path / "two.tsv", *map("\t".join, PAIRS[8:20]))},
        {"name": "held", "format": "tsv", "path": write_lines(tmp_path / "held.tsv", *map("\t".join, PAIRS[20:]))},
        {"name": "text", "format": "text", "path": write_lines(tmp_path / "t.txt", *odd_lines, PAIRS[21][0]),
         "languages": ["en"]},
    ]  # fmt: skip
    values = {
        "languages": ["en", "de"], "labelled_share": 0.2, "held_out": ["held"],
        "corpora": [{"languages": ["en", "de"]} | corpus for corpus in corpora],
    }  # fmt: skip
    output = tmp_path / "corpus"
    report = preparation.prepare(PreparationConfig.parse(values), output, Folder(str(tmp_path / "work")))
    paths = sorted(output.rglob("*.parquet"))
    tables = {str(path.relative_to(output)): pq.read_table(path).to_pydict() for path in paths}
    counts = [{name: value for name, value in entry.items() if name != "file"} for entry in report["files"]]
    return [tables, counts, report["languages"]]


def make_shards(tmp_path: Path, encoder: Path) -> Any:
    corpus = tmp_path / "corpus"
    make_corpus(tmp_path, encoder)
    manifests.write(corpus, "corpus")
    training_calls = []

    def record_training(sentence_iterator: Iterator[str], model_writer: Any, **options: Any) -> None:
        """Stand in for SentencePiece: its options and sentences are ours, but its result depends on its version."""
        training_calls.append([sorted(options.items()), list(sentence_iterator)])
        model_writer.write(make_sentencepiece_model())

    model = str(encoder / tokenizers.MODEL)
    size = tokenizers.vocabulary_size(make_sentencepiece_model())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentencepiece.SentencePieceTrainer, "train", record_training)
        for number, fields in enumerate(({"training_sentences": 12, "alpha": 0.5}, {"model": model})):
            config = TokenizationConfig.parse({"vocabulary_size": size, "processes": 1} | fields)
            tokenization.tokenize(config, corpus, tmp_path / f"shards{number}", map_in_process)
    paths = sorted((tmp_path / "shards1").rglob("*"))
    shard_files = [path for path in paths if path.is_file() and "tokenizer" not in path.parts]
    return [training_calls, {str(path.relative_to(tmp_path)): manifests.file_sha256(path) for path in shard_files}]


def make_learner(config: PretrainingConfig, shards: token_shards.Shards) -> Learner:
    system = SYSTEMS[config.system]
    return system.create_learner(config, system.build(config, shards), shards)


def write_pairs(tmp_path: Path, encoder: Path) -> token_shards.Shards:
    """Write shards of pairs of English with two languages, and of the sentences of both."""
    folder = tmp_path / "shards"
    tables = {}
    for language in ("de", "fr"):
        for corpus, count in (("one", 40), ("two", 24)):
            lengths = 3 + np.arange(count) * 7 % 5
            source = 5 + np.arange(lengths.sum()) * 11 % 28
            stem, target = f"pairs/en-{language}/{corpus}", source + 28
            pairs = make_pairs(source, target, lengths, np.arange(count) * 7919 % 31)
            tables[stem] = write_table(folder, stem, [pairs])
            name = f"mono/{language}/{corpus}"
            ids = np.insert(target, lengths.cumsum(), 2)
            tables[name] = write_table(folder, name, [make_text(ids, lengths + 1)])
    shutil.copytree(encoder, folder / "tokenizer")
    size = tokenizers.vocabulary_size(make_sentencepiece_model())
    facts = {"vocabulary_size": size, "tables": tables, "block_tokens": 512, "corpus": "c", "tokenizer": "t"}
    manifests.write(folder, "shards", facts)
    return token_shards.open_shards(folder)


def make_pretrained(tmp_path: Path, encoder: Path) -> Any:
    shards = write_pairs(tmp_path, encoder)
    released = {"contrast": {"partner": "next", "corruption": 0.15, "symmetric": True},
                "objectives": {"masking": "released", "weighting": "count"}}  # fmt: skip
    only_mlm = {"mlm": 1, "tlm": 0, "xlco": 0}
    results: list[Any] = []
    for changes in ({"optimization": {"schedule": "inverse_sqrt"}}, released, {"objectives": {"whole_words": True}}):
        config = tiny_config(**changes)
        learner = make_learner(config, shards)
        results += [digest_batches(learner.batches(step)) for step in (0, 1, 9)]
        results += [learning_rate(config.optimization, update) for update in range(6)]
    for system, objectives in (
        ("xlm", {"masking": "xlm"} | only_mlm),
        ("xlm", {"masking": "xlm"} | only_mlm | {"mlm": 0, "clm": 1}),
        ("bert", {"masking": "bert", "nsp": 1} | only_mlm),
    ):
        learner = make_learner(tiny_config(system=system, model={"ffn": 64}, objectives=objectives), shards)
        results += [digest_batches(learner.batches(step)) for step in (0, 1, 9)]
    return results


def make_merged(tmp_path: Path, encoder: Path) -> Any:
    lower_ends = (0.01, -0.004, -0.005, -0.02)
    curve = [merging.MergedAccuracies(0.25 * number, 0.5, 0.5, lower) for number, lower in enumerate(lower_ends, 1)]
    choices = [merging.choose_weight(curve[first:]) for first in range(4)]
    chosen = [(choice, merging.keeps_guard_accuracy(choice)) for choice in choices]
    tensors = {"a": torch.tensor([0.0, 2.0, -4.0]), "b": torch.tensor([1.0, 0.5, 0.25])}
    return [chosen, torch.lerp(tensors["a"], tensors["b"], 0.25).tolist()]


def make_classifier(tmp_path: Path, encoder: Path) -> Any:
    rows = [
        f"{text}\t{pair[0].split()[1]}\t{language}\t{'train' if number % 5 else 'dev'}"
        for number, pair in enumerate(PAIRS)
        for language, text in zip(("en", "de"), pair, strict=True)
    ]
    data = write_lines(tmp_path / "data.tsv", "text\tlabel\tlanguage\tsplit", *rows)
    questions_and_answers = [(f"q{n}", f"{source}, {target}.", f"which {source.split()[1]}?", target.split()[1])
                             for n, (source, target) in enumerate(PAIRS)]  # fmt: skip
    squad = str(write_squad(tmp_path / "train-v1.1.json", questions_and_answers))
    optimization = OptimizationConfig(steps=9, warmup_steps=1).model_dump()
    common = {"max_tokens": 40, "batch_size": 10, "micro_batch_size": 4, "optimization": optimization, "seed": 3}
    answering = common | {"task": "question_answering", "train": [squad], "test": [squad], "max_tokens": 30,
                          "question_tokens": 9, "stride": 6}  # fmt: skip
    results: list[Any] = []
    for config in (
        ClassificationConfig.parse(common | {"data": data, "dropout": 0.1, "epochs": 2}),
        AnsweringConfig.parse(answering),
    ):
        training = finetuning.read_training(config, encoder, None)
        head_dropout = training.head_dropout
        module = task_models.create(encoder, training.head, training.labels, config.dropout, head_dropout, config.seed)
        schedule = finetuning.choose_steps(config, len(training.examples))
        best = BestCheckpoints(tmp_path, config.selection, "en")
        learner = TaskLearner(config, module, training, schedule.steps, best)
        results += [finetuning.digest_training(training), schedule.model_dump(mode="json")]
        results += [digest_batches(learner.batches(step)) for step in (0, 1, 8)]
    return results


def make_scores(tmp_path: Path, encoder: Path) -> Any:
    config = EvaluationConfig(retrieval_pairs=9, perplexity_sentences=7)
    drawn = [questions.draw_pairs(PAIRS * 2, config), questions.draw_sentences("en", {"de": PAIRS}, config)]
    vectors = torch.eye(6).double()
    shifted = vectors.roll(1, 0)
    sources = {VectorSpec("mean", 0): vectors, VectorSpec("mean", 1): shifted}
    targets = {VectorSpec("mean", 0): vectors + shifted / 4, VectorSpec("mean", 1): vectors}
    is_unshared = torch.tensor([True, False, True, False, False, True])
    scores = []
    for nearest_rows in nearest.find_nearest_by_spec(sources, targets).values():
        hits = {direction: rows == torch.arange(6) for direction, rows in nearest_rows.items()}
        score_by_language = {"de": held_out.score_language(hits, is_unshared)}
        scores.append(mean_over(score_by_language) | {"languages": score_by_language})
    languages = ["en", "de", "de", "fr", "en", "en"]
    accuracy = run.accuracy_by_language(list("xyxyxx"), list("xyyyxy"), languages)
    gaps = [perplexity.choose_masked_positions(tokens, make_rng(1, "gaps", tokens)).tolist() for tokens in (1, 9, 40)]
    return [drawn, gaps, scores, accuracy, transfer_gap(accuracy)]


def make_translator(tmp_path: Path, encoder: Path) -> Any:
    shards = write_pairs(tmp_path, encoder)
    common = {"languages": ("en", "de"), "side_tokens": 12, "batch_tokens": 60, "parallel_share": 0.9}
    pairs_only = common | {"denoising": (), "back_translation": False}
    text_only = common | {"languages": ("de", "fr"), "parallel_share": 0}
    digests: list[Any] = []
    for settings, steps in ((pairs_only, (0, 1)), (text_only, range(4))):
        config = TranslationConfig.parse(settings)
        sampler = TranslationSampler(shards, config)
        digests += digest_batches(sampler.draw(step, shard) for step in steps for shard in (0, 1))
        digests += [denoising_weight(config, step) for step in (0, 1, 200_000)]
    return digests


def make_translations(tmp_path: Path, encoder: Path) -> Any:
    references = {"de": ["Die Datei wurde gelöscht.", "Nein."], "zh": ["文件已被删除。", "不。"]}
    translations = {"de": ["Die Datei wird gelöscht.", "Nein!"], "zh": ["文件已删除。", "不。"]}
    scores = [compute_bleu(translations[language], references[language], language) for language in references]
    result = TranslatedText(0.0, "", references["zh"], references["de"], translations["de"])
    sentences = score_sentences("zh-de", result)
    return [scores, sentences.values.tolist()]


def make_points(tmp_path: Path, encoder: Path) -> Any:
    correct = {"a": ["The Key, opens!"], "b": ["ein Tisch", "der Tisch"], "c": ["在北京 1906 年"], "d": ["x"]}
    predicted = {"a": "key opens", "b": "den Tisch hier", "c": "北京1906年"}
    scores = {}
    for rule, code in (("squad", "en"), ("mlqa", "en"), ("mlqa", "de"), ("mlqa", "zh"), ("mlqa", "vi")):
        scores[f"{rule} {code}"] = answers.score(predicted, correct, rule, code)
    cells = {("en", "en"): 0.5, ("de", "de"): 0.25, ("en", "de"): 0.75, ("de", "en"): 0.125}
    return [scores, mean_over(scores), average_within_and_across(cells)]


MAKERS = {
    "corpus": (make_corpus, "stages/preparation.py or corpora/"),
    "shards": (make_shards, "stages/tokenization.py or data/"),
    "pretrained": (make_pretrained, "systems/ or data/"),
    "merged": (make_merged, "stages/merging.py or model/huggingface/interpolation.py"),
    "classifier": (make_classifier, "stages/finetuning.py, tasks/ or training/"),
    "scores": (make_scores, "stages/evaluation.py or tasks/"),
    "points": (make_points, "tasks/"),
    "translator": (make_translator, "systems/translation/ or data/"),
    "translations": (make_translations, "systems/translation/"),
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_results_of_a_stage_change_only_with_its_version(kind, encoder, tmp_path):
    make_result, source = MAKERS[kind]
    golden_version, golden_digest = GOLDEN[kind]
    version = manifests.VERSIONS[kind]

    digest = manifests.digest(round_scores(make_result(tmp_path, encoder)))

    assert version > golden_version or digest == golden_digest, (
        f"results of {kind} changed ({source}): raise VERSIONS[{kind!r}] in infoxlm_core/manifests.py, or undo it"
    )
    assert (version, digest) == GOLDEN[kind], f"new version of {kind}: set GOLDEN[{kind!r}] = ({version}, {digest!r})"


def test_every_stage_whose_results_are_numbers_has_a_golden_digest():
    pages = {"comparison", "suite"}
    assert manifests.VERSIONS["tuned"] == manifests.VERSIONS["classifier"]  # both are results of fine-tuning
    assert GOLDEN.keys() == MAKERS.keys() == manifests.VERSIONS.keys() - pages - {"tuned"}
