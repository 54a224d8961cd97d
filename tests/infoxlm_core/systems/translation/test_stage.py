"""Unsupervised machine translation: noise, back-translation, decoder, BLEU, and the stage on a toy corpus."""

import math
import random
import shutil
from collections.abc import Sequence
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
from infoxlm_core.data.sampling import generator
from infoxlm_core.data.shards import open_shards
from infoxlm_core.errors import ConfigError, CorpusTooSmall, InputError
from infoxlm_core.model.encoder import EncoderSize
from infoxlm_core.model.huggingface import any_encoder
from infoxlm_core.model.mixed import Linear
from infoxlm_core.stages.tokenization import tokenize
from infoxlm_core.systems.translation.config import NoiseConfig, TranslationConfig
from infoxlm_core.systems.translation.decoding import TextTranslator
from infoxlm_core.systems.translation.evaluation import HeldOutPairs
from infoxlm_core.systems.translation.model import Translator, start_from
from infoxlm_core.systems.translation.samples import TranslationSampler, add_noise, denoising_weight, pack_sentences
from infoxlm_core.systems.translation.stage import TranslationLearner, build, train
from infoxlm_core.systems.xlm import XLM, XLMSystem
from infoxlm_core.training import optimizer, tracker
from infoxlm_core.training.state import Progress
from infoxlm_core.training.step import train_step
from tests.toys.pretraining import VOCABULARY
from tests.toys.systems import config_of, export
from tests.toys.systems import learner_of as xlm_of
from tests.toys.text import messages

SIZE = EncoderSize(vocabulary=VOCABULARY, layers=2, hidden=16, ffn=64, heads=2, positions=40, epsilon=1e-12, types=3)


def tiny(**changes) -> TranslationConfig:
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


def translator(seed: int = 1) -> Translator:
    """Large weights, uneven biases and norms: what it says depends on everything; a forgotten part is seen."""
    model = Translator(SIZE)
    XLMSystem().initialise(model, seed)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((1.0 if parameter.dim() > 1 else 0.1) * torch.randn(parameter.shape, generator=rng))
    return model.eval()


def sentences(*lengths: int) -> list[np.ndarray]:
    rng = generator("sentences", lengths)
    return [rng.integers(4, VOCABULARY - 1, length) for length in lengths]


# denoising


@pytest.mark.item("A29")
def test_shuffling_moves_no_token_further_than_three_places():
    words, rng = np.arange(4, 54), generator("shuffle")

    shuffled = [add_noise(words, NoiseConfig(drop=0, blank=0), 99, rng) for _ in range(300)]

    moves = np.array([np.argsort(s) - np.arange(50) for s in shuffled])
    assert all(sorted(s) == words.tolist() for s in shuffled)
    assert np.abs(moves).max() <= 3 and (moves != 0).mean() > 0.3


@pytest.mark.item("A29")
def test_a_tenth_of_the_tokens_is_dropped_and_a_tenth_blanked_but_one_always_stays():
    words, rng = np.arange(4, 54), generator("drop")

    noisy = [add_noise(words, NoiseConfig(shuffle=0), 99, rng) for _ in range(400)]

    kept = sum(map(len, noisy))
    assert kept / 20_000 == pytest.approx(0.9, abs=3 * (0.09 / 20_000) ** 0.5)
    assert sum((s == 99).sum() for s in noisy) / kept == pytest.approx(0.1, abs=3 * (0.09 / kept) ** 0.5)
    assert all((np.diff(s[s != 99]) > 0).all() for s in noisy)  # the order stays
    assert {len(add_noise(np.array([7, 8]), NoiseConfig(drop=0.99), 99, rng)) for _ in range(100)} == {1}


@pytest.mark.item("A29")
def test_a_noisy_sentence_keeps_its_first_and_last_token(tiny_shards):
    sampler = TranslationSampler(open_shards(tiny_shards), tiny())

    for step in range(0, 40, 4):
        task = sampler.draw(step, 0)
        assert task.objective == "dae" and len(task.target.ids) <= 60
        for noisy, clean in zip(*(s.ids.split(list(s.lengths)) for s in (task.source, task.target)), strict=True):
            assert noisy[0] == noisy[-1] == clean[0] == clean[-1] == 2
            assert 3 <= len(noisy) <= len(clean) and 2 not in noisy[1:-1]
        assert (task.source.types == task.target.types[0]).all()


@pytest.mark.item("A29")
def test_denoising_loses_weight_on_the_way():
    steps_per_round = 4  # denoising and back-translation, each in two languages; XLM's schedule counts rounds
    rounds = (0, 50_000, 100_000, 200_000, 300_000, 400_000)

    weights = [denoising_weight(tiny(), steps_per_round * number) for number in rounds]

    assert weights == pytest.approx([1, 0.55, 0.1, 0.05, 0, 0])


def test_denoising_and_back_translation_take_turns_until_denoising_is_over(tiny_shards):
    sampler = TranslationSampler(open_shards(tiny_shards), tiny(denoising=((0, 1.0), (10, 0.0))))

    tasks = [sampler.draw(step, 0) for step in (0, 1, 2, 3, 10, 11)]

    assert [(task.objective, int(task.target.types[0])) for task in tasks] == [
        ("dae", 0), ("dae", 2), ("bt", 0), ("bt", 2), ("bt", 0), ("bt", 2)
    ]  # fmt: skip


def split(ids: np.ndarray, lengths: Sequence[int]) -> list[bytes]:
    """Return the tokens of each sentence as bytes."""
    return [row.astype("<u4").tobytes() for row in np.split(ids, np.cumsum(lengths)[:-1])]


def test_pairs_are_learned_in_both_directions_and_a_share_selects_some_of_them(tiny_shards):
    shards = open_shards(tiny_shards)
    known = set()
    for table in shards.pairs["en-de"]:
        pairs = table.read_pairs()
        sides = [split(np.array(side.tokens), np.diff(side.offsets)) for side in (pairs.source, pairs.target)]
        known |= set(zip(*sides, strict=True))

    drawn = {1.0: set(), 0.5: set()}
    for share, pairs in drawn.items():
        supervised = {"languages": ("en", "de"), "denoising": (), "back_translation": False, "parallel_share": share}
        sampler = TranslationSampler(shards, tiny(**supervised, batch_tokens=4000))
        for step, target_language in ((0, 1), (1, 0)):  # into English, into German
            batch = sampler.draw(step, 0)
            assert batch.objective == "mt" and set(batch.target.types.tolist()) == {target_language}
            english, german = (batch.target, batch.source) if target_language else (batch.source, batch.target)
            unwrapped = []
            for side in (english, german):
                rows = split(side.ids.numpy(), side.lengths)
                unwrapped.append([row[4:-4] for row in rows])  # without both `</s>`, of four bytes each
            pairs |= set(zip(*unwrapped, strict=True))

    assert drawn[1.0] == known and drawn[0.5] < known and drawn[0.5]


def test_a_language_without_text_is_refused(tiny_shards):
    with pytest.raises(CorpusTooSmall, match="en has no sentence of at most 12 tokens"):
        TranslationSampler(open_shards(tiny_shards), tiny(languages=("de", "en")))


# the network


@pytest.mark.item("A28")
def test_the_decoder_sees_nothing_that_comes_later():
    model, source = translator(), pack_sentences(sentences(5, 3), 0)
    words = sentences(6, 4)
    other = [words[0].copy(), words[1]]
    other[0][3] = 4 + (words[0][3] - 3) % 50  # token 4 of the first target, counted with its </s>

    with torch.inference_mode():
        before, after = (model(source, pack_sentences(target, 2)) for target in (words, other))

    assert torch.equal(before[:4], after[:4]) and not torch.allclose(before[4:7], after[4:7])
    assert torch.equal(before[7:], after[7:])  # the other sentence


def test_packing_changes_no_translation():
    model, sources, targets = translator(), sentences(5, 3, 7), sentences(6, 4, 2)

    with torch.inference_mode():
        together = model(pack_sentences(sources, 0), pack_sentences(targets, 2))
        alone = [model(pack_sentences([s], 0), pack_sentences([t], 2)) for s, t in zip(sources, targets, strict=True)]

    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_generation_says_at_each_step_what_the_network_finds_best():
    model, sources, limits = translator(1), sentences(6, 9, 3), [15, 15, 5]

    made = model.generate(pack_sentences(sources, 0), 2, limits)

    assert len({word for words in made for word in words}) > 1  # it says more than one thing
    for words, source, limit in zip(made, sources, limits, strict=True):
        with torch.inference_mode():
            best = (
                model(pack_sentences([source], 0), pack_sentences([np.array(words, np.int64)], 2))
                .argmax(dim=1)
                .tolist()
            )
        assert best[: len(words)] == words and len(words) + 2 <= limit
        assert best[len(words)] == 2 or len(words) + 2 == limit  # it ended by itself, or had to


def test_in_bf16_the_decoder_reads_copies_of_its_weights_which_follow_them():
    model = Translator(SIZE)
    XLMSystem().initialise(model, 1)
    source, target = pack_sentences(sentences(4, 7), 0), pack_sentences(sentences(5, 6), 2)
    linears = [part for part in model.decoder.modules() if isinstance(part, Linear)]

    def follow() -> bool:
        return all(torch.equal(part.weight_copy, part.weight.bfloat16()) for part in linears)

    expected = model(source, target)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(source, target)
    found.float().pow(2).sum().backward()

    assert (found - expected).norm() < 0.02 * expected.norm()
    assert follow() and {part.weight.grad.dtype for part in linears} == {torch.float32}
    with torch.no_grad():
        torch._foreach_mul_([part.weight for part in linears], 2.0)
        with torch.autocast("cpu", torch.bfloat16):
            model.generate(source, 2, [9, 9])
    assert follow()


def test_the_target_language_is_said_by_its_embedding_alone():
    source = pack_sentences(sentences(6, 9), 0)
    models = [translator(seed) for seed in range(8)]

    assert any(model.generate(source, 1, [15, 15]) != model.generate(source, 2, [15, 15]) for model in models)


@pytest.mark.item("A31")
def test_a_start_gives_the_decoder_everything_but_its_attention_to_the_source():
    known = XLM(SIZE)
    XLMSystem().initialise(known, 7)
    model, untouched = translator(), translator()

    start_from(model, known, "decoder")
    start_from(model, known, "encoder", only_embeddings=True)

    decoder, theirs = dict(model.decoder.named_parameters()), dict(known.encoder.named_parameters())
    assert all(torch.equal(decoder[name], value) for name, value in theirs.items())
    own = set(decoder) - set(theirs)
    assert len(own) == SIZE.layers * 10 and all(".source_" in name for name in own)  # 4 maps and a norm
    assert all(torch.equal(decoder[name], untouched.decoder.get_parameter(name)) for name in own)
    assert torch.equal(model.bias, known.bias)
    assert torch.equal(model.encoder.token_embedding.weight, known.encoder.token_embedding.weight)
    assert torch.equal(model.encoder.layers[0].up.weight, untouched.encoder.layers[0].up.weight)


# the learner


def pretrain_toy(shards, directory: Path, **sizes):
    """Export an XLM with random weights, as `pretrain` does; return its learner."""
    learner = xlm_of(config_of("XLM-MLM", seed=7, model={"max_tokens": 40, **sizes}), shards)
    export(learner, shards, directory)
    return learner


@pytest.fixture
def learner_of(tiny_shards, tmp_path):
    def create(**changes) -> TranslationLearner:
        shards = open_shards(tiny_shards)
        pretrain_toy(shards, tmp_path / "encoder")
        config = tiny(**changes)
        model = build(config, shards, tmp_path / "encoder")
        translator = TextTranslator(model, None, ["de", "en", "fr"], config.languages, config.side_tokens)
        return TranslationLearner(config, translator, TranslationSampler(shards, config), HeldOutPairs({}), None)

    return create


@pytest.mark.item("A30")
def test_back_translation_generates_in_eval_mode_and_leaves_no_gradient(learner_of, monkeypatch):
    learner = learner_of()
    learner.module.train()
    modes, target = [], learner.batches(2)[0].target
    generate = learner.module.generate
    monkeypatch.setattr(learner.module, "generate", lambda *a: modes.append(learner.module.training) or generate(*a))

    source = learner.back_translate(target)

    assert modes == [False] and learner.module.training
    assert all(parameter.grad is None for parameter in learner.module.parameters())
    assert not source.ids.is_floating_point() and len(source.lengths) == len(target.lengths)
    assert set(source.types.tolist()) == {2} and set(target.types.tolist()) == {0}
    assert max(length - (1.3 * limit + 5) for length, limit in zip(source.lengths, target.lengths, strict=True)) <= 0


@pytest.mark.item("A30")
def test_the_gradient_of_back_translation_is_that_of_its_source_as_given(learner_of):
    learner = learner_of(dropout=0.0)
    batch, parameters = learner.batches(2)[0], list(learner.module.parameters())
    source = learner.back_translate(batch.target)
    given = type(batch)("bt", batch.target, source, batch.rng_key)

    gradients = []
    for task in (batch, given):
        loss, _ = learner.losses(task, {"bt": 0.5, "dae": 1.0})
        gradients.append(torch.autograd.grad(loss, parameters, allow_unused=True))

    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_an_untrained_translator_knows_nothing_and_learns(learner_of):
    learner = learner_of(batch_tokens=200, encoder="random", decoder="random")
    config = learner.config.optimization.model_copy(update={"steps": 40})
    adam, progress, curve = optimizer.make_adamw(learner.module.parameters(), config), Progress(), []

    for step in range(40):
        figures, _ = train_step(learner, adam, config, progress, learner.batches(step))
        curve.append(figures)

    assert curve[0]["loss/dae"] == pytest.approx(math.log(VOCABULARY), abs=0.5)
    assert curve[37]["loss/dae"] < 0.9 * curve[0]["loss/dae"]
    assert "loss/bt" in curve[2] and "loss/dae" not in curve[2]


def test_each_half_starts_as_its_setting_says(tiny_shards, tmp_path):
    shards = open_shards(tiny_shards)
    known = pretrain_toy(shards, tmp_path / "mlm").module

    halves = [("embeddings", "pretrained"), ("pretrained", "random")]
    first, second = (build(tiny(encoder=e, decoder=d), shards, tmp_path / "mlm") for e, d in halves)

    layer, words = "layers.1.up.weight", "token_embedding.weight"
    trained = dict(known.encoder.named_parameters())
    assert torch.equal(first.encoder.get_parameter(words), trained[words])
    assert not torch.equal(first.encoder.get_parameter(layer), trained[layer])
    assert torch.equal(first.decoder.get_parameter(layer), trained[layer])
    assert torch.equal(second.encoder.get_parameter(layer), trained[layer])
    assert not torch.equal(second.decoder.get_parameter(words), trained[words])
    with pytest.raises(ConfigError, match="exceed the 40 positions"):
        build(tiny(side_tokens=30), shards, tmp_path / "mlm")


# the stage


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> tuple[Path, Path]:
    """Shards of German and English sentences that do not translate each other, and a corpus with held-out pairs."""
    corpus, made = tmp_path_factory.mktemp("corpus"), tmp_path_factory.mktemp("shards")
    rows = random.Random(5).sample(messages(0), 420)
    for language, texts in {"de": [b for _, b in rows[:200]], "en": [a for a, _ in rows[200:400]]}.items():
        (corpus / "mono" / language).mkdir(parents=True)
        pq.write_table(pa.table({"text": texts}), corpus / "mono" / language / "toy.parquet")
    (corpus / "held_out" / "en-de").mkdir(parents=True)
    held_out = pa.table({"source": [a for a, _ in rows[400:]], "target": [b for _, b in rows[400:]]})
    pq.write_table(held_out, corpus / "held_out" / "en-de" / "toy.parquet")
    manifests.write(corpus, "corpus")
    facts = tokenize(TokenizationConfig(vocabulary_size=80, character_coverage=1.0, processes=1), corpus, made)
    manifests.write(made, "shards", facts)
    return made, corpus


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
def trained(toy, tmp_path_factory) -> ToyTraining:
    """Train a translator of English and German from a toy XLM."""
    shards, corpus = toy
    folder = tmp_path_factory.mktemp("trained")
    pretrain_toy(open_shards(shards), folder / "encoder", max_tokens=110)
    config = tiny(languages=("en", "de"), side_tokens=60, batch_tokens=200, validation_pairs=6)
    training = ToyTraining(config, shards, corpus, folder / "encoder", folder / "run", folder / "out" / "translator")
    training.repeat(folder / "out", training.run)
    return training


@pytest.mark.item("A32")
def test_a_translator_is_trained_and_its_best_weights_are_exported(trained, tmp_path):
    points = tracker.read(trained.run / tracker.METRICS)
    scores = {step: values["dev/mean"] for step, values in points if "dev/mean" in values}
    manifest = manifests.load(trained.translator)
    assert list(scores) == [3, 6, 8] and {"dev/en-de", "dev/de-en"} <= set(points[2][1])
    assert manifest["facts"]["steps"] == max(scores, key=scores.get) and manifest["kind"] == "translator"

    trained.repeat(tmp_path, trained.run)  # the run is finished: it is exported again

    exported_again = (tmp_path / "translator" / "model.safetensors").read_bytes()
    assert exported_again == (trained.translator / "model.safetensors").read_bytes()


def test_a_loaded_translator_does_not_depend_on_the_batch(trained):
    loaded = TextTranslator.load(trained.translator)
    texts = HeldOutPairs.read(trained.corpus, ("en", "de")).texts

    together = loaded.translate(texts["en"], "de")

    assert loaded.pair == ("en", "de") and loaded.languages == ["de", "en"]
    assert together == [loaded.translate([text], "de")[0] for text in texts["en"]]
    assert [loaded.decode(ids) for ids in encode(loaded.processor, texts["de"])] == texts["de"]
    with pytest.raises(InputError, match="translates between en and de, not into fr"):
        loaded.translate(["Save"], "fr")


def test_a_training_without_test_pairs_is_refused_before_its_first_step(trained, tmp_path):
    pairs = len(HeldOutPairs.read(trained.corpus, ("en", "de")).texts["en"])

    with pytest.raises(InputError, match="held_out has no pairs of en and de"):
        trained.repeat(tmp_path, tmp_path / "run", corpus=tmp_path)
    with pytest.raises(InputError, match=rf"the validation uses all held-out pairs.*\({pairs}\)"):
        trained.repeat(tmp_path, tmp_path / "run", config=trained.config.model_copy(update={"validation_pairs": pairs}))

    assert not (tmp_path / "run").exists()


def test_a_directory_that_is_no_whole_translator_is_refused(trained, tmp_path):
    with pytest.raises(InputError, match="has a translator: give an encoder, or use `infoxlm translate`"):
        any_encoder.load_encoder(trained.translator)
    shards = open_shards(trained.shards)
    with pytest.raises(InputError, match=r"no such file: set tokenization\.model to a SentencePiece model"):
        TextTranslator.of(Translator(SIZE), trained.config, replace(shards, directory=tmp_path))

    copied = shutil.copytree(trained.translator, tmp_path / "translator")
    config_file = copied / "config.json"
    config_file.write_text(config_file.read_text().replace('"ffn": 64', '"ffn": 6400'))
    with pytest.raises(InputError, match=r"but config\.json describes"):
        TextTranslator.load(copied)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"languages": ("de", "de")}, "languages must be two"),
        ({"denoising": ((5, 1.0), (5, 0.0))}, "steps of denoising must increase"),
        ({"denoising": (), "back_translation": False}, "nothing to train"),
        ({"denoising": ((0, 1.0), (7, 0.0)), "back_translation": False}, "its weight reaches 0 before the last step"),
    ],
)
def test_a_config_that_cannot_work_is_refused(change, reason):
    with pytest.raises(ConfigError, match=reason):
        tiny(**change)
