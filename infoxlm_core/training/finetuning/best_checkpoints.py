"""Keep the weights of the best steps during fine-tuning: `RUN/kept/STEP.safetensors`.

`STEP.json` contains the size and SHA-256 of the weights, so that only verified weights are exported. The best steps are
computed from the curves (`dev/mean`, `dev/de`, …). A resumed run deletes all points after its checkpoint and therefore
makes the same decisions.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from infoxlm_core import manifests, user_files
from infoxlm_core.config import SelectionConfig
from infoxlm_core.errors import DataCorrupt
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.training import tracker
from infoxlm_core.training.checkpoints import deleted_on_failure, list_checkpoints
from infoxlm_core.training.finetuning.selection import DevScores, choose

PREFIX = "dev/"
MEAN = "dev/mean"


def name_metrics(scores: DevScores) -> dict[str, float]:
    """Return an evaluation's development scores by metric name."""
    metrics = {f"{PREFIX}{language}": score for language, score in scores.languages.items()}
    return metrics | {MEAN: scores.mean}


def read_dev_scores(curves: Path) -> list[DevScores]:
    """Read the development scores of all evaluations from a training run's curves; the inverse of `name_metrics`."""
    evaluations = []
    for step, metrics in tracker.read(curves):
        if MEAN in metrics:
            scores_by_language = {}
            for name, value in metrics.items():
                if name.startswith(PREFIX) and name != MEAN:
                    scores_by_language[name.removeprefix(PREFIX)] = value
            evaluations.append(DevScores(step, scores_by_language))
    return evaluations


class BestCheckpoints:
    """The best weights of a run according to its selection rule.

    Args:
        run: directory of the run.
        config: settings of the selection rule.
        source_language: language of the training text.
    """

    def __init__(self, run: Path, config: SelectionConfig, source_language: str) -> None:
        self.run = run
        self.rule = config.rule
        self.source_language = source_language

    def read_evaluations(self) -> list[DevScores]:
        """Read the development scores of all previous evaluations from the curves.

        Raises:
            DataCorrupt: the evaluations cover different languages or none, so they must come from several runs.
        """
        curves = self.run / tracker.METRICS
        evaluations = read_dev_scores(curves)
        language_sets = {frozenset(scores.languages) for scores in evaluations}
        if len(language_sets) > 1 or frozenset() in language_sets:
            raise DataCorrupt(f"{curves}: the evaluations cover different languages or none: restore it or train again")
        return evaluations

    def choose(self, evaluations: list[DevScores], last_step: int) -> dict[str, int]:
        """Choose a step for each language; see `selection.choose`."""
        return choose(evaluations, self.rule, self.source_language, last_step)

    def update(self, module: nn.Module, evaluations: list[DevScores]) -> None:
        """Save the weights if the last evaluation is among the best, and delete weights that are no longer needed.

        The best weights at the time of each checkpoint are also kept, because the run may resume from there.

        Raises:
            StorageFull: the weights do not fit on the disk.
        """
        if self.rule == "last":
            return
        step = evaluations[-1].step
        saved_steps = [saved_step for saved_step, _ in list_checkpoints(self.run)]
        best_steps = set()
        for last_step in [*saved_steps, step]:  # the checkpoints from which the run may resume, and this step
            earlier_evaluations = [scores for scores in evaluations if scores.step <= last_step]
            if earlier_evaluations:
                best_steps |= set(self.choose(earlier_evaluations, last_step).values())
        if step in best_steps:
            self._save(module, step)
        for path in (self.run / "kept").glob("*.safetensors"):
            if int(path.stem) not in best_steps:
                path.unlink()
                path.with_suffix(".json").unlink(missing_ok=True)

    def _save(self, module: nn.Module, step: int) -> None:
        """Write a step's weights, and a JSON file with their size and digest."""
        path = self._path(step)
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_suffix(".tmp")  # renamed last, so that files with the final name are complete
        weights = {name: value.detach().cpu().contiguous() for name, value in module.named_parameters()}
        with deleted_on_failure(temporary):
            save_file(weights, temporary)
            manifests.sync_file(temporary)
            entry = {"size": temporary.stat().st_size, "sha256": manifests.file_sha256(temporary)}
            manifests.write_atomically(path.with_suffix(".json"), json.dumps(entry))
        temporary.replace(path)
        manifests.sync_file(path.parent)

    def load(self, module: nn.Module, step: int) -> None:
        """Load a step's weights into the module. Raise DataCorrupt for damaged weights or different shapes."""
        path = self._path(step)
        remedy = f"restore it, or delete {self.run} to train again"
        entry = user_files.read_json(path.with_suffix(".json"), manifests.Entry, remedy, DataCorrupt)
        manifests.verify_file(path, entry, remedy)
        weights = pretrained.read_tensors(path)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name not in weights or weights[name].shape != parameter.shape:
                    raise DataCorrupt(f"{path} has no {name} of this model's size: {remedy}")
                parameter.copy_(weights[name])

    def _path(self, step: int) -> Path:
        return self.run / "kept" / f"{step:010d}.safetensors"
