"""Which weights of a fine-tuning are exported: the rules, and that an interrupted run ends with the very same choice.

The scores are written down below, by step; the scorer knows the step by the weights it is shown.
"""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
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
from tests.helpers.workers import fp64, join, start
from tests.toys.finetuning import config

EVERY, STEPS = 5, 30
SCORES = {  # after 5, 10, … 30 steps
    "en": [0.1, 0.5, 0.3, 0.2, 0.6, 0.4],
    "de": [0.3, 0.2, 0.8, 0.1, 0.1, 0.2],
}
EVALUATIONS = [DevScores(5 * (i + 1), {name: scores[i] for name, scores in SCORES.items()}) for i in range(6)]
CHOSEN = {"last": {"*": 30}, "source": {"*": 25}, "joint": {"*": 15}, "each": {"*": 15, "en": 25, "de": 15}}


def settings(data: Path, rule: str):
    return config(data, selection={"rule": rule, "every": EVERY}, checkpoints={"every": 10},
                  optimization={"steps": STEPS, "warmup_steps": 2, "learning_rate": 0.01})  # fmt: skip


def weights_of(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


class Scorer:
    """Gives the scores of SCORES; does `accident` once, at the evaluation after so many steps."""

    def __init__(self, moments: list[torch.Tensor], accident=None, at: int = 0) -> None:
        self.moments, self.accident, self.at = moments, accident, at

    def __call__(self, module: nn.Module) -> dict[str, float]:
        place = next(i for i, moment in enumerate(self.moments) if torch.equal(moment, weights_of(module)))
        if EVALUATIONS[place].step == self.at and self.accident:
            self.accident, accident = None, self.accident
            accident()
        return dict(EVALUATIONS[place].languages)


def train(monkeypatch, scorer, configured, encoder: Path, folder: Path) -> Path:
    monkeypatch.setattr(finetuning, "read_training", lambda *given: replace(
        READ(*given), score_dev=scorer, development=tuple(SCORES)))  # fmt: skip
    finetuning.finetune(configured, encoder, None, folder / "out", folder / "run")
    return folder / "out"


READ = finetuning.read_training


@pytest.fixture(scope="module")
def moments(encoder, data, tmp_path_factory) -> list[torch.Tensor]:
    """The weights at each evaluation."""
    seen: list[torch.Tensor] = []

    def scorer(module: nn.Module) -> dict[str, float]:
        seen.append(weights_of(module))
        return {"en": 0.0}

    with pytest.MonkeyPatch.context() as patch:
        train(patch, scorer, settings(data, "last"), encoder, tmp_path_factory.mktemp("moments"))
    return seen


@pytest.mark.parametrize("rule", CHOSEN)
def test_a_rule_keeps_the_weights_of_its_step(monkeypatch, encoder, data, moments, tmp_path, rule):
    tuned = train(monkeypatch, Scorer(moments), settings(data, rule), encoder, tmp_path)

    found = selection.read(tuned)
    assert found["rule"] == rule and found["chosen"] == CHOSEN[rule]
    assert [(one["step"], one["languages"]) for one in found["looks"]] == [(x.step, x.languages) for x in EVALUATIONS]
    for language in ("en", "de", "fr"):
        step = CHOSEN[rule].get(language, CHOSEN[rule]["*"])
        kept = task_models.load(selection.find_directory(tuned, language), TASKS["classification"].head)
        assert torch.equal(weights_of(kept), moments[step // EVERY - 1])
    curves = dict(tracker.read(tuned / "metrics.jsonl"))
    assert curves[15]["dev/de"] == 0.8 and curves[15]["dev/mean"] == pytest.approx(0.55)
    assert (tuned / "steps").exists() == (rule == "each")


@pytest.mark.parametrize(("rule", "step"), [("each", 5), ("joint", 15), ("each", 20), ("source", 25), ("each", 30)])
def test_a_run_that_dies_at_an_evaluation_and_goes_on_ends_with_the_same_model(
    monkeypatch, encoder, data, moments, tmp_path, rule, step
):
    def die() -> None:
        raise ConnectionAbortedError

    scorer = Scorer(moments, die, at=step)
    with pytest.raises(ConnectionAbortedError):
        train(monkeypatch, scorer, settings(data, rule), encoder, tmp_path)

    tuned = train(monkeypatch, scorer, settings(data, rule), encoder, tmp_path)

    assert selection.read(tuned)["chosen"] == CHOSEN[rule]
    assert len(selection.read(tuned)["looks"]) == len(EVALUATIONS)
    for language in ("en", "de"):
        expected = moments[CHOSEN[rule].get(language, CHOSEN[rule]["*"]) // EVERY - 1]
        kept = task_models.load(selection.find_directory(tuned, language), TASKS["classification"].head)
        assert torch.equal(weights_of(kept), expected)


def test_a_best_that_was_overtaken_after_the_last_checkpoint_stays_for_a_run_that_must_go_back(
    monkeypatch, encoder, data, moments, tmp_path
):
    def die() -> None:
        raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError):
        train(monkeypatch, Scorer(moments, die, at=30), settings(data, "source"), encoder, tmp_path)

    kept = sorted(int(path.stem) for path in (tmp_path / "run/kept").glob("*.safetensors"))
    assert {path.stem for path in (tmp_path / "run/kept").iterdir()} == {f"{step:010d}" for step in kept}
    assert kept == [10, 25]  # 25 is the best now; at the checkpoint after 20 steps 10 was
    assert not torch.equal(*(load_file(tmp_path / f"run/kept/{step:010d}.safetensors")["output.bias"] for step in kept))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x40
    path.write_bytes(content)


@pytest.mark.item("P5")
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip, r"5\.safetensors has sha256 \w{12}…, but its manifest lists"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-7]),
            r"5\.safetensors has \d+ bytes, but its manifest lists",
        ),
        (lambda path: path.unlink(), r"5\.safetensors is missing"),
        (lambda path: path.with_suffix(".json").unlink(), r"5\.json: no such file"),
        (lambda path: path.with_suffix(".json").write_text("[]"), r"5\.json cannot be read"),
    ],
    ids=["flipped bit", "truncated", "missing", "no digest", "damaged digest"],
)
def test_kept_weights_that_are_not_what_was_written_are_refused(tmp_path, damage, said):
    written, read = nn.Linear(3, 2), nn.Linear(3, 2)
    best = BestCheckpoints(tmp_path, SelectionConfig(rule="joint", every=5), "en")
    best.update(written, [DevScores(5, {"en": 0.5})])
    best.load(read, 5)
    assert torch.equal(weights_of(read), weights_of(written))
    damage(tmp_path / "kept/0000000005.safetensors")

    with pytest.raises(DataCorrupt, match=said + r".*: restore it, or delete .* to train again"):
        best.load(read, 5)


def test_equal_scores_leave_the_first():
    evaluations = [DevScores(step, {"en": 0.5, "de": 0.5}) for step in (10, 20, 30)]

    assert selection.choose(evaluations, "each", "en", 30) == {"*": 10, "en": 10, "de": 10}


@pytest.mark.parametrize(
    ("rule", "development", "said"),
    [
        ("joint", (), "joint needs development sets; available: none"),
        ("source", ("de", "fr"), "in en; available: de, fr"),
    ],
)
def test_a_rule_without_its_development_sets_is_refused_before_training(rule, development, said):
    selection.check("last", "en", ())
    with pytest.raises(InputError, match=said):
        selection.check(rule, "en", development)


def test_the_development_score_of_a_model_is_that_of_the_moments_that_were_chosen(tmp_path):
    for rule, expected in {"joint": {"en": 0.3, "de": 0.8}, "each": {"en": 0.6, "de": 0.8}}.items():
        selection.write(tmp_path, rule, EVALUATIONS, CHOSEN[rule])

        assert selection.development(tmp_path) == {"languages": expected, "mean": sum(expected.values()) / 2}
    selection.write(tmp_path, "last", [], {"*": 30})
    assert selection.development(tmp_path) is None
    assert json.loads((tmp_path / selection.FILE).read_text())["chosen"] == {"*": 30}


def test_a_model_from_elsewhere_speaks_for_every_language(tmp_path):
    assert selection.read(tmp_path) is None and selection.development(tmp_path) is None
    assert selection.find_directory(tmp_path, "de") == tmp_path


@pytest.mark.slow
def test_of_two_workers_the_first_evaluates_and_sees_what_one_alone_would(encoder, data, tmp_path):
    """Selection by real development rows, of a tenth of the training text."""
    table = pd.read_csv(data, sep="\t")
    table.loc[table.index % 7 == 0, "split"] = "dev"
    table.to_csv(tmp_path / "verbs.tsv", sep="\t", index=False)
    configured = settings(tmp_path / "verbs.tsv", "each")
    with fp64():
        finetuning.finetune(configured, encoder, None, tmp_path / "one/out", tmp_path / "one/run")

    start(_worker, 2, encoder, tmp_path)

    one, two = (selection.read(tmp_path / name / "out") for name in ("one", "two"))
    for left, right in zip(one["looks"], two["looks"], strict=True):
        assert left["languages"] == right["languages"]
    evaluations = [DevScores(one["step"], one["languages"]) for one in two["looks"]]
    assert two["chosen"] == selection.choose(evaluations, "each", "en", STEPS) and len(evaluations) == 6
    assert (tmp_path / "evaluations-0").read_text() == "6" and not (tmp_path / "evaluations-1").exists()


def _worker(rank: int, size: int, port: int, encoder: Path, base: Path) -> None:
    join(rank, size, port)
    keep, count = BestCheckpoints.update, [0]

    def counted(self, *given) -> None:
        count[0] += 1
        (base / f"evaluations-{rank}").write_text(str(count[0]))
        keep(self, *given)

    BestCheckpoints.update = counted
    with fp64():
        finetuning.finetune(settings(base / "verbs.tsv", "each"), encoder, None, base / "two/out", base / "two/run")
    torch.distributed.destroy_process_group()
