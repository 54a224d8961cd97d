"""Which weights of a fine-tuning are exported, also after an interruption.

The evaluations return the scores that are listed below. The scorer knows the step by the weights of the model.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from infoxlm_core.config import SelectionConfig
from infoxlm_core.errors import DataCorrupt, InputError
from infoxlm_core.model import task_models
from infoxlm_core.stages import finetuning
from infoxlm_core.tasks import TASKS
from infoxlm_core.training import tracker
from infoxlm_core.training.finetuning import selection
from infoxlm_core.training.finetuning.best_checkpoints import BestCheckpoints
from infoxlm_core.training.finetuning.selection import DevScores
from tests.toys.finetuning import config

STEPS = 30
EVALUATIONS = [
    DevScores(5, {"en": 0.1, "de": 0.3}),
    DevScores(10, {"en": 0.5, "de": 0.2}),
    DevScores(15, {"en": 0.3, "de": 0.8}),
    DevScores(20, {"en": 0.2, "de": 0.1}),
    DevScores(25, {"en": 0.6, "de": 0.1}),
    DevScores(30, {"en": 0.4, "de": 0.2}),
]
CHOSEN = {"last": {"*": 30}, "source": {"*": 25}, "joint": {"*": 15}, "each": {"*": 15, "en": 25, "de": 15}}
read_training = finetuning.read_training


def make_config(data: Path, rule: str):
    return config(data, selection={"rule": rule, "every": 5}, checkpoints={"every": 10},
                  optimization={"steps": STEPS, "warmup_steps": 2, "learning_rate": 0.01})  # fmt: skip


def flatten_weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


class Scorer:
    """Returns the scores of `EVALUATIONS`; at its first evaluation of `death_step`, it raises an error."""

    def __init__(self, weights_by_evaluation: list[torch.Tensor], death_step: int = 0) -> None:
        self.weights_by_evaluation = weights_by_evaluation
        self.death_step = death_step

    def __call__(self, module: nn.Module) -> dict[str, float]:
        weights = flatten_weights(module)
        [number] = [n for n, recorded in enumerate(self.weights_by_evaluation) if torch.equal(recorded, weights)]
        if EVALUATIONS[number].step == self.death_step:
            self.death_step = 0
            raise ConnectionAbortedError
        return dict(EVALUATIONS[number].languages)


def finetune(
    monkeypatch, score_dev: Callable[[nn.Module], dict[str, float]], settings, encoder: Path, folder: Path
) -> Path:
    """Fine-tune with a scorer for development sets in English and German. Return the output."""
    monkeypatch.setattr(
        finetuning,
        "read_training",
        lambda *args: replace(read_training(*args), score_dev=score_dev, dev_languages=("en", "de")),
    )
    finetuning.finetune(settings, encoder, None, folder / "out", folder / "run")
    return folder / "out"


@pytest.fixture(scope="module")
def weights_by_evaluation(encoder, data, tmp_path_factory) -> list[torch.Tensor]:
    """Return the weights at each evaluation."""
    weights: list[torch.Tensor] = []

    def record_weights(module: nn.Module) -> dict[str, float]:
        weights.append(flatten_weights(module))
        return {"en": 0.0}

    with pytest.MonkeyPatch.context() as patch:
        finetune(patch, record_weights, make_config(data, "last"), encoder, tmp_path_factory.mktemp("recorded"))
    return weights


def assert_chosen_weights_are_exported(tuned: Path, rule: str, weights_by_evaluation: list[torch.Tensor]) -> None:
    assert selection.read(tuned)["chosen"] == CHOSEN[rule]
    for language in ("en", "de", "fr"):
        step = CHOSEN[rule].get(language, CHOSEN[rule]["*"])
        model = task_models.load(selection.find_directory(tuned, language), TASKS["classification"].head)
        assert torch.equal(flatten_weights(model), weights_by_evaluation[step // 5 - 1])


@pytest.mark.parametrize("rule", CHOSEN)
def test_a_rule_exports_the_weights_of_its_step(monkeypatch, encoder, data, weights_by_evaluation, tmp_path, rule):
    tuned = finetune(monkeypatch, Scorer(weights_by_evaluation), make_config(data, rule), encoder, tmp_path)

    assert_chosen_weights_are_exported(tuned, rule, weights_by_evaluation)
    content = selection.read(tuned)
    assert content["rule"] == rule
    assert [DevScores(look["step"], look["languages"]) for look in content["looks"]] == EVALUATIONS
    curves = dict(tracker.read(tuned / "metrics.jsonl"))
    assert curves[15]["dev/de"] == 0.8
    assert curves[15]["dev/mean"] == pytest.approx(0.55)
    assert (tuned / "steps").exists() == (rule == "each")


@pytest.mark.parametrize(("rule", "step"), [("each", 5), ("source", 25), ("each", 30)])
def test_a_run_that_dies_during_an_evaluation_exports_the_same_weights(
    monkeypatch, encoder, data, weights_by_evaluation, tmp_path, rule, step
):
    scorer = Scorer(weights_by_evaluation, death_step=step)
    with pytest.raises(ConnectionAbortedError):
        finetune(monkeypatch, scorer, make_config(data, rule), encoder, tmp_path)

    tuned = finetune(monkeypatch, scorer, make_config(data, rule), encoder, tmp_path)

    assert_chosen_weights_are_exported(tuned, rule, weights_by_evaluation)
    assert len(selection.read(tuned)["looks"]) == len(EVALUATIONS)


def test_the_best_weights_at_the_last_checkpoint_are_kept_after_better_ones(
    monkeypatch, encoder, data, weights_by_evaluation, tmp_path
):
    scorer = Scorer(weights_by_evaluation, death_step=30)
    with pytest.raises(ConnectionAbortedError):
        finetune(monkeypatch, scorer, make_config(data, "source"), encoder, tmp_path)

    kept = tmp_path / "run/kept"  # step 25 is the best now; step 10 was at the checkpoint of step 20
    names = ["0000000010.json", "0000000010.safetensors", "0000000025.json", "0000000025.safetensors"]
    assert sorted(path.name for path in kept.iterdir()) == names
    biases = [load_file(kept / name)["output.bias"] for name in names if name.endswith(".safetensors")]
    assert not torch.equal(*biases)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x40
    path.write_bytes(content)


@pytest.mark.item("P5")
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (flip_bit, r"5\.safetensors has sha256 \w{12}…, but its manifest lists"),
        (lambda path: path.unlink(), r"5\.safetensors is missing"),
        (lambda path: path.with_suffix(".json").unlink(), r"5\.json: no such file"),
        (lambda path: path.with_suffix(".json").write_text("[]"), r"5\.json cannot be read"),
    ],
    ids=["flipped bit", "missing", "missing digest", "damaged digest"],
)
def test_damaged_best_weights_are_refused(tmp_path, damage, problem):
    saved, loaded = nn.Linear(3, 2), nn.Linear(3, 2)
    best = BestCheckpoints(tmp_path, SelectionConfig(rule="joint", every=5), "en")
    best.update(saved, [DevScores(5, {"en": 0.5})])
    best.load(loaded, 5)
    assert torch.equal(flatten_weights(loaded), flatten_weights(saved))

    damage(tmp_path / "kept/0000000005.safetensors")

    with pytest.raises(DataCorrupt, match=problem + r".*: restore it, or delete .* to train again"):
        best.load(loaded, 5)


def test_curves_of_several_runs_are_refused(tmp_path):
    points = [{"step": 5, "dev/en": 0.5, "dev/mean": 0.5}, {"step": 10, "dev/de": 0.5, "dev/mean": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))

    with pytest.raises(DataCorrupt, match="the evaluations cover different languages"):
        BestCheckpoints(tmp_path, SelectionConfig(rule="joint", every=5), "en").read_evaluations()


def test_the_earliest_of_equal_scores_is_chosen():
    evaluations = [DevScores(step, {"en": 0.5, "de": 0.5}) for step in (10, 20, 30)]

    assert selection.choose(evaluations, "each", "en", 30) == {"*": 10, "en": 10, "de": 10}


@pytest.mark.parametrize(
    ("rule", "development", "message"),
    [
        ("joint", (), "joint needs development sets; available: none"),
        ("source", ("de", "fr"), "in en; available: de, fr"),
    ],
)
def test_a_rule_without_its_development_sets_is_refused(rule, development, message):
    selection.check_dev_languages("last", "en", ())
    with pytest.raises(InputError, match=message):
        selection.check_dev_languages(rule, "en", development)


@pytest.mark.parametrize(("rule", "expected"), [("joint", {"en": 0.3, "de": 0.8}), ("each", {"en": 0.6, "de": 0.8})])
def test_the_development_score_of_a_model_is_that_of_its_chosen_steps(tmp_path, rule, expected):
    selection.write(tmp_path, rule, EVALUATIONS, CHOSEN[rule])

    assert selection.read_development_scores(tmp_path) == {"languages": expected, "mean": sum(expected.values()) / 2}


def test_a_model_without_evaluations_has_no_development_score(tmp_path):
    selection.write(tmp_path, "last", [], {"*": 30})

    assert selection.read_development_scores(tmp_path) is None


def test_a_model_of_another_program_is_used_for_every_language(tmp_path):
    assert selection.read(tmp_path) is None
    assert selection.read_development_scores(tmp_path) is None
    assert selection.find_directory(tmp_path, "de") == tmp_path
