"""Unsupervised machine translation: noise, back-translation, decoder, and the stage on a toy corpus."""

import math
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from infoxlm_core import manifests
from infoxlm_core.config import TokenizationConfig
from infoxlm_core.data.encoding import encode
from infoxlm_core.data.sampling import make_rng
from infoxlm_core.data.shards import Shards, open_shards
from infoxlm_core.errors import ConfigError, CorpusTooSmall, InputError
from infoxlm_core.model.encoder import EncoderSize
from infoxlm_core.model.huggingface import any_encoder
from infoxlm_core.model.mixed_precision import Linear
from infoxlm_core.systems.translation.config import NoiseConfig, TranslationConfig
from infoxlm_core.systems.translation.decoding import TextTranslator
from infoxlm_core.systems.translation.evaluation import HeldOutPairs
from infoxlm_core.systems.translation.model import Translator
from infoxlm_core.systems.translation.samples import TranslationSampler, add_noise, denoising_weight, pack_sentences
from infoxlm_core.systems.translation.stage import TranslationLearner, build, train
from infoxlm_core.systems.xlm import XLM, XLMSystem
from infoxlm_core.training import distributed, optimizer, tracker
from infoxlm_core.training.state import Progress
from infoxlm_core.training.step import train_step
from tests.helpers import workers
from tests.toys.corpus import tokenized, write_corpus
from tests.toys.pretraining import VOCABULARY
from tests.toys.systems import config_of, export
from tests.toys.systems import learner_of as xlm_learner_of
from tests.toys.text import messages

SIZE = EncoderSize(vocabulary=VOCABULARY, layers=2, hidden=16, ffn=64, heads=2, positions=40, epsilon=1e-12, types=3)
DE, EN, FR = range(3)  # the numbers of the languages


def tiny_translation_config(**changes) -> TranslationConfig:
    values = {
        "languages": ("de", "fr"),
        "side_tokens": 12,
        "batch_tokens": 60,
        "back_translation_sentences": 4,
        "virtual_shards": 2,
        "validate_every": 3,
        "optimization": {"steps": 8, "warmup_steps": 2, "learning_rate": 0.01, "schedule": "inverse_sqrt"},
        "checkpoints": {"every": 2},
        "log_every": 1,
    }
    return TranslationConfig.parse(values | changes)


def make_translator() -> Translator:
    """Return a translator with large weights, no bias of 0 and no norm of 1, so that its output depends on all."""
    model = Translator(SIZE)
    XLMSystem().initialise(model, 1)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1.0 if parameter.dim() > 1 else 0.1
            parameter.add_(scale * torch.randn(parameter.shape, generator=rng))
    return model.eval()


def make_sentences(*lengths: int) -> list[np.ndarray]:
    rng = make_rng("sentences", lengths)
    return [rng.integers(4, VOCABULARY - 1, length) for length in lengths]


# samples


@pytest.mark.item("A29")
def test_shuffling_moves_no_token_by_more_than_three_places():
    tokens = np.arange(4, 54)
    rng = make_rng("shuffle")

    shuffled = np.stack([add_noise(tokens, NoiseConfig(drop=0, blank=0), 99, rng) for _ in range(300)])

    moves = np.argsort(shuffled, axis=1) - np.arange(50)
    assert np.array_equal(np.sort(shuffled, axis=1), np.tile(tokens, (300, 1)))
    assert np.abs(moves).max() <= 3
    assert (moves != 0).mean() > 0.3


@pytest.mark.item("A29")
def test_a_tenth_of_the_tokens_is_dropped_and_a_tenth_masked_but_one_token_always_stays():
    tokens = np.arange(4, 54)
    rng = make_rng("drop")

    noisy_sentences = [add_noise(tokens, NoiseConfig(shuffle=0), 99, rng) for _ in range(400)]

    all_tokens = np.concatenate(noisy_sentences)
    assert len(all_tokens) / 20_000 == pytest.approx(0.9, abs=3 * (0.09 / 20_000) ** 0.5)
    assert (all_tokens == 99).mean() == pytest.approx(0.1, abs=3 * (0.09 / len(all_tokens)) ** 0.5)
    assert all((np.diff(sentence[sentence != 99]) > 0).all() for sentence in noisy_sentences)  # in order
    lengths = {len(add_noise(np.array([7, 8]), NoiseConfig(drop=0.99), 99, rng)) for _ in range(100)}
    assert lengths == {1}


@pytest.mark.item("A29")
def test_noisy_sentences_keep_their_first_and_last_token(tiny_shards):
    sampler = TranslationSampler(open_shards(tiny_shards), tiny_translation_config())

    for step in range(0, 40, 4):
        batch = sampler.draw(step, 0)
        assert batch.objective == "dae"
        assert len(batch.target.ids) <= 60
        assert (batch.source.types == batch.target.types[0]).all()
        noisy_sentences = batch.source.ids.split(list(batch.source.lengths))
        clean_sentences = batch.target.ids.split(list(batch.target.lengths))
        for noisy, clean in zip(noisy_sentences, clean_sentences, strict=True):
            assert noisy[0] == noisy[-1] == clean[0] == clean[-1] == 2
            assert 3 <= len(noisy) <= len(clean)
            assert 2 not in noisy[1:-1]


@pytest.mark.item("A29")
def test_weight_of_denoising_follows_the_schedule_of_xlm():
    steps_per_round = 4  # denoising and back-translation, each in two languages; XLM's schedule counts rounds
    rounds = (0, 50_000, 100_000, 200_000, 300_000, 400_000)

    weights = [denoising_weight(tiny_translation_config(), steps_per_round * number) for number in rounds]

    assert weights == pytest.approx([1, 0.55, 0.1, 0.05, 0, 0])


@pytest.mark.item("A29")
def test_denoising_and_back_translation_alternate_until_denoising_ends(tiny_shards):
    config = tiny_translation_config(denoising=((0, 1.0), (10, 0.0)))
    sampler = TranslationSampler(open_shards(tiny_shards), config)

    batches = [sampler.draw(step, 0) for step in (0, 1, 2, 3, 10, 11)]

    assert [(batch.objective, int(batch.target.types[0])) for batch in batches] == [
        ("dae", DE), ("dae", FR), ("bt", DE), ("bt", FR), ("bt", DE), ("bt", FR)
    ]  # fmt: skip


def test_pairs_are_drawn_in_both_directions_and_a_share_selects_some_of_them(tiny_shards):
    shards = open_shards(tiny_shards)
    settings = {"languages": ("en", "de"), "denoising": (), "back_translation": False}
    row_numbers = {}
    for share in (0.5, 1.0):
        sampler = TranslationSampler(shards, tiny_translation_config(**settings, parallel_share=share))
        into_english, into_german = (sampler.pairs[language] for language in ("en", "de"))
        row_numbers[share] = [corpus.row_numbers.tolist() for corpus in into_english]
        assert row_numbers[share] == [corpus.row_numbers.tolist() for corpus in into_german]
        assert all(
            np.array_equal(english.sides[0].tokens, german.sides[1].tokens)
            for english, german in zip(into_english, into_german, strict=True)
        )

    assert row_numbers[1.0] == [list(range(len(table))) for table in shards.pairs["en-de"]]
    assert 0 < sum(map(len, row_numbers[0.5])) < sum(map(len, row_numbers[1.0]))
    for step, target_language, source_language in ((0, EN, DE), (1, DE, EN)):
        batch = sampler.draw(step, 0)
        assert batch.objective == "mt"
        assert set(batch.target.types.tolist()) == {target_language}
        assert set(batch.source.types.tolist()) == {source_language}


def test_language_without_text_is_refused(tiny_shards):
    with pytest.raises(CorpusTooSmall, match="en has no sentence of at most 12 tokens"):
        TranslationSampler(open_shards(tiny_shards), tiny_translation_config(languages=("de", "en")))


def test_language_whose_text_is_all_held_out_is_refused(tiny_shards):
    with pytest.raises(CorpusTooSmall, match="the shards have no training text in it: add text, or choose other"):
        TranslationSampler(open_shards(tiny_shards), tiny_translation_config(languages=("de", "it")))


# the network


@pytest.mark.item("A28")
def test_changed_token_of_a_target_changes_no_earlier_output_of_the_decoder():
    model = make_translator()
    source = pack_sentences(make_sentences(5, 3), DE)
    target = make_sentences(6, 4)
    changed_sentence = target[0].copy()
    changed_sentence[3] = 4 + (target[0][3] - 3) % 50  # row 4 of the target, which begins with </s>

    with torch.inference_mode():
        before = model(source, pack_sentences(target, FR))
        after = model(source, pack_sentences([changed_sentence, target[1]], FR))

    assert torch.equal(before[:4], after[:4])
    assert not torch.allclose(before[4:7], after[4:7])
    assert torch.equal(before[7:], after[7:])  # the other sentence


def test_generation_chooses_the_best_token_of_the_network_at_each_step():
    model = make_translator()
    sources = make_sentences(6, 9, 3)
    limits = [15, 15, 5]

    translations = model.generate(pack_sentences(sources, DE), FR, limits)

    assert len({token for translation in translations for token in translation}) > 1
    for translation, source, limit in zip(translations, sources, limits, strict=True):
        target = pack_sentences([np.array(translation, np.int64)], FR)
        with torch.inference_mode():
            best_tokens = model(pack_sentences([source], DE), target).argmax(dim=1).tolist()
        is_full = len(translation) + 2 == limit
        assert best_tokens[: len(translation)] == translation
        assert len(translation) + 2 <= limit
        assert is_full or best_tokens[len(translation)] == 2


def test_bf16_decoder_uses_copies_of_its_current_weights():
    model = Translator(SIZE)
    XLMSystem().initialise(model, 1)
    source = pack_sentences(make_sentences(4, 7), DE)
    target = pack_sentences(make_sentences(5, 6), FR)
    linears = [module for module in model.decoder.modules() if isinstance(module, Linear)]

    def copies_are_current() -> bool:
        return all(torch.equal(linear.weight_copy, linear.weight.bfloat16()) for linear in linears)

    expected = model(source, target)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(source, target)
    logits.float().pow(2).sum().backward()

    assert (logits - expected).norm() < 0.02 * expected.norm()
    assert copies_are_current()
    assert {linear.weight.grad.dtype for linear in linears} == {torch.float32}
    with torch.no_grad():
        torch._foreach_mul_([linear.weight for linear in linears], 2.0)
        with torch.autocast("cpu", torch.bfloat16):
            model.generate(source, FR, [9, 9])
    assert copies_are_current()


# the learner


def export_toy_xlm(shards: Shards, directory: Path, **sizes) -> XLM:
    """Export an XLM with random weights, as `pretrain` does, and return it."""
    learner = xlm_learner_of(config_of("XLM-MLM", seed=7, model={"max_tokens": 40, **sizes}), shards)
    export(learner, shards, directory)
    return learner.module


@pytest.mark.item("A31")
def test_start_initialises_all_of_the_decoder_but_its_attention_to_the_source(tiny_shards, tmp_path):
    shards = open_shards(tiny_shards)
    xlm = export_toy_xlm(shards, tmp_path / "xlm")
    untouched = build(tiny_translation_config(encoder="random", decoder="random"), shards, tmp_path / "xlm")

    model = build(tiny_translation_config(encoder="embeddings", decoder="pretrained"), shards, tmp_path / "xlm")

    decoder = dict(model.decoder.named_parameters())
    xlm_weights = dict(xlm.encoder.named_parameters())
    assert all(torch.equal(decoder[name], weight) for name, weight in xlm_weights.items())
    assert torch.equal(model.bias, xlm.bias)
    other_names = set(decoder) - set(xlm_weights)
    assert len(other_names) == 2 * 10  # in each layer four linear maps and a LayerNorm, with biases
    assert all(".source_" in name for name in other_names)
    assert all(torch.equal(decoder[name], untouched.decoder.get_parameter(name)) for name in other_names)
    assert torch.equal(model.encoder.token_embedding.weight, xlm.encoder.token_embedding.weight)
    assert torch.equal(model.encoder.layers[0].up.weight, untouched.encoder.layers[0].up.weight)


def test_start_with_too_few_positions_is_refused(tiny_shards, tmp_path):
    export_toy_xlm(open_shards(tiny_shards), tmp_path / "xlm")

    with pytest.raises(ConfigError, match="exceed the 40 positions"):
        build(tiny_translation_config(side_tokens=30), open_shards(tiny_shards), tmp_path / "xlm")


@pytest.fixture
def learner_of(tiny_shards, tmp_path):
    """Return a function that makes a learner of a toy translator, which cannot validate."""

    def create(**changes) -> TranslationLearner:
        shards = open_shards(tiny_shards)
        export_toy_xlm(shards, tmp_path / "encoder")
        config = tiny_translation_config(**changes)
        model = build(config, shards, tmp_path / "encoder")
        translator = TextTranslator(model, None, ["de", "en", "fr"], config.languages, config.side_tokens)
        return TranslationLearner(config, translator, TranslationSampler(shards, config), HeldOutPairs({}), None)

    return create


@pytest.mark.item("A30")
def test_back_translation_generates_in_evaluation_mode_without_gradients(learner_of, monkeypatch):
    learner = learner_of()
    learner.module.train()
    target = learner.batches(2)[0].target
    is_training = []
    generate = learner.module.generate

    def record_mode(*arguments):
        is_training.append(learner.module.training)
        return generate(*arguments)

    monkeypatch.setattr(learner.module, "generate", record_mode)

    source = learner.back_translate(target)

    assert is_training == [False]
    assert learner.module.training
    assert all(parameter.grad is None for parameter in learner.module.parameters())
    assert set(source.types.tolist()) == {FR}
    assert set(target.types.tolist()) == {DE}
    lengths = zip(source.lengths, target.lengths, strict=True)
    assert all(source_length <= 1.3 * target_length + 5 for source_length, target_length in lengths)


@pytest.mark.item("A30")
def test_gradient_of_back_translation_is_that_of_its_generated_source(learner_of):
    learner = learner_of(dropout=0.0)
    parameters = list(learner.module.parameters())
    batch = learner.batches(2)[0]
    batch_with_source = replace(batch, source=learner.back_translate(batch.target))

    gradients = []
    for each_batch in (batch, batch_with_source):
        loss, _ = learner.losses(each_batch, {"bt": 0.5, "dae": 1.0})
        gradients.append(torch.autograd.grad(loss, parameters, materialize_grads=True))

    assert all(torch.equal(first, second) for first, second in zip(*gradients, strict=True))


def test_loss_of_an_untrained_translator_is_that_of_chance_and_falls(learner_of):
    learner = learner_of(batch_tokens=200, encoder="random", decoder="random")
    config = learner.config.optimization.model_copy(update={"steps": 40})
    adam = optimizer.make_adamw(learner.module.parameters(), config)
    progress = Progress()

    curve = [train_step(learner, adam, config, progress, learner.batches(step))[0] for step in range(40)]

    assert curve[0]["loss/dae"] == pytest.approx(math.log(VOCABULARY), abs=0.5)
    assert curve[37]["loss/dae"] < 0.9 * curve[0]["loss/dae"]
    assert "loss/bt" in curve[2]
    assert "loss/dae" not in curve[2]


# the stage


@dataclass(frozen=True)
class ToyTraining:
    """The inputs of a training of a translator, and what it exported."""

    config: TranslationConfig
    shards: Path
    corpus: Path
    encoder: Path
    run: Path
    translator: Path

    def repeat(self, output: Path, run: Path, **changes) -> None:
        """Train with other settings or another corpus."""
        arguments = {"config": self.config, "corpus": self.corpus} | changes
        train(shards_path=self.shards, encoder=self.encoder, output=output, run=run, **arguments)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> ToyTraining:
    """Train a translator from a toy XLM, on German and English sentences that do not translate each other."""
    folder = tmp_path_factory.mktemp("trained")
    rows = random.Random(5).sample(messages(0), 420)
    sentences = {"de": [german for _, german in rows[:200]], "en": [english for english, _ in rows[200:400]]}
    held_out = folder / "corpus" / "held_out" / "en-de"
    held_out.mkdir(parents=True)
    english, german = zip(*rows[400:], strict=True)
    pq.write_table(pa.table({"source": english, "target": german}), held_out / "toy.parquet")
    corpus = write_corpus(folder / "corpus", sentences, {})
    tokenization = TokenizationConfig(vocabulary_size=80, character_coverage=1.0, processes=1)
    shards = tokenized(tokenization, corpus, folder / "shards")
    export_toy_xlm(open_shards(shards), folder / "encoder", max_tokens=110)
    config = tiny_translation_config(languages=("en", "de"), side_tokens=60, batch_tokens=200, validation_pairs=6)
    training = ToyTraining(config, shards, corpus, folder / "encoder", folder / "run", folder / "out" / "translator")
    training.repeat(folder / "out", training.run)
    return training


@pytest.mark.item("A32")
def test_translator_is_trained_and_its_best_weights_are_exported(trained, tmp_path):
    points = tracker.read(trained.run / tracker.METRICS)
    scores = {step: values["dev/mean"] for step, values in points if "dev/mean" in values}
    manifest = manifests.load(trained.translator)
    assert list(scores) == [3, 6, 8]
    assert {"dev/en-de", "dev/de-en"} <= set(points[2][1])
    assert manifest["facts"]["steps"] == max(scores, key=scores.get)
    assert manifest["kind"] == "translator"

    trained.repeat(tmp_path, trained.run)  # the run is finished: it is exported again

    weights = (tmp_path / "translator" / "model.safetensors").read_bytes()
    assert weights == (trained.translator / "model.safetensors").read_bytes()


def test_translations_do_not_depend_on_the_batch(trained):
    translator = TextTranslator.load(trained.translator)
    texts = HeldOutPairs.read(trained.corpus, ("en", "de")).texts

    translations = translator.translate(texts["en"], "de")

    assert translator.pair == ("en", "de")
    assert translator.languages == ["de", "en"]
    assert translations == [translator.translate([text], "de")[0] for text in texts["en"]]
    assert [translator.decode(ids) for ids in encode(translator.processor, texts["de"])] == texts["de"]
    with pytest.raises(InputError, match="translates between en and de, not into fr"):
        translator.translate(["Save"], "fr")


def test_empty_lines_stay_empty(trained):
    translator = TextTranslator.load(trained.translator)

    translations = translator.translate(["", "Open the folder", " "], "de")

    assert translations == ["", *translator.translate(["Open the folder"], "de"), ""]
    assert translator.translate([""], "de") == [""]


def test_training_without_test_pairs_is_refused_before_its_first_step(trained, tmp_path):
    pair_count = len(HeldOutPairs.read(trained.corpus, ("en", "de")).texts["en"])
    config = trained.config.model_copy(update={"validation_pairs": pair_count})

    with pytest.raises(InputError, match="held_out has no pairs of en and de"):
        trained.repeat(tmp_path, tmp_path / "run", corpus=tmp_path)
    with pytest.raises(InputError, match=rf"the validation uses all held-out pairs.*\({pair_count}\)"):
        trained.repeat(tmp_path, tmp_path / "run", config=config)

    assert not (tmp_path / "run").exists()


def train_without_pairs_on_the_second_worker(rank: int, size: int, port: int, toy: ToyTraining, base: Path) -> None:
    """Train with a corpus whose held-out pairs only the first worker has. Save the error of each worker."""
    workers.join(rank, size, port)
    distributed.from_first(None)  # connects the workers, so that none would wait for one that has ended
    corpus = toy.corpus if rank == 0 else base / "empty"
    with pytest.raises(InputError) as failure:
        toy.repeat(base / "out", base / "run", corpus=corpus)
    (base / f"error-{rank}").write_text(str(failure.value))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_all_workers_end_with_the_error_of_one_that_cannot_read_the_pairs(trained, tmp_path):
    workers.start(train_without_pairs_on_the_second_worker, 2, trained, tmp_path)

    errors = [(tmp_path / f"error-{rank}").read_text() for rank in range(2)]
    assert "empty/held_out has no pairs of en and de" in errors[0]
    assert errors[1] == errors[0]
    assert not (tmp_path / "run").exists()


def test_directory_that_is_no_complete_translator_is_refused(trained, tmp_path):
    with pytest.raises(InputError, match="has a translator: give an encoder, or use `infoxlm translate`"):
        any_encoder.load_encoder(trained.translator)
    shards = replace(open_shards(trained.shards), directory=tmp_path)
    with pytest.raises(InputError, match=r"no such file: set tokenization\.model to a SentencePiece model"):
        TextTranslator.with_shards_tokenizer(Translator(SIZE), trained.config, shards)

    copy = shutil.copytree(trained.translator, tmp_path / "translator")
    config_file = copy / "config.json"
    description = config_file.read_text()
    config_file.write_text(description.replace('"ffn": 64', '"ffn": 6400'))
    with pytest.raises(InputError, match=r"but config\.json describes"):
        TextTranslator.load(copy)
    for layer_count in (1, 3):
        config_file.write_text(description.replace('"layers": 2', f'"layers": {layer_count}'))
        with pytest.raises(InputError, match=r"give the config\.json that belongs to these weights"):
            TextTranslator.load(copy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"languages": ("de", "de")}, "languages must be two"),
        ({"denoising": ((5, 1.0), (5, 0.0))}, "steps of denoising must increase"),
        ({"denoising": (), "back_translation": False}, "nothing to train"),
        ({"denoising": ((0, 1.0), (7, 0.0)), "back_translation": False}, "its weight reaches 0 before the last step"),
    ],
)
def test_config_that_cannot_work_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        tiny_translation_config(**changes)
