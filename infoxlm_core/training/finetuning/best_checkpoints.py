"""The weights of a fine-tuning's best steps, until it is over: `RUN/kept/STEP.safetensors`.

Beside each lies `STEP.json`, its size and SHA-256: nothing is exported that is not what was written.
Which steps these are, the curves say (`dev/mean`, `dev/de`, …): a resumed run forgets those after its checkpoint, and
so takes the same decisions again.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from infoxlm_core import manifests, outside
from infoxlm_core.config import SelectionConfig
from infoxlm_core.errors import DataCorrupt
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.training import tracker
from infoxlm_core.training.checkpoints import list_of
from infoxlm_core.training.finetuning.selection import DevScores, check_alike, choose

PREFIX, MEAN = "dev/", "dev/mean"


def figures(scores: DevScores) -> dict[str, float]:
    """What the curves say of an evaluation."""
    return {f"{PREFIX}{language}": score for language, score in scores.languages.items()} | {MEAN: scores.mean}


class BestCheckpoints:
    """The best weights of one run by a rule; `source` is the language of the training text."""

    def __init__(self, run: Path, config: SelectionConfig, source: str) -> None:
        self.run, self.rule, self.source = run, config.rule, source

    def evaluations(self) -> list[DevScores]:
        """Development scores at every evaluation so far."""
        points = [point for point in tracker.read(self.run / tracker.METRICS) if MEAN in point[1]]
        found = [
            DevScores(
                step, {n.removeprefix(PREFIX): v for n, v in values.items() if n.startswith(PREFIX) and n != MEAN}
            )
            for step, values in points
        ]
        check_alike(found, self.run / tracker.METRICS)
        return found

    def choose(self, evaluations: list[DevScores], last: int) -> dict[str, int]:
        return choose(evaluations, self.rule, self.source, last)

    def update(self, module: nn.Module, evaluations: list[DevScores]) -> None:
        """Keep the weights if the last evaluation is a best one, and drop those that nobody needs any more; StorageFull
        if they do not fit. Needed is also what was best at the time of a checkpoint: the run may have to go on from
        there."""
        if self.rule == "last":
            return
        now = evaluations[-1].step
        needed = set()
        for cut in [*(step for step, _ in list_of(self.run)), now]:
            if seen := [one for one in evaluations if one.step <= cut]:
                needed |= set(self.choose(seen, cut).values())
        if now in needed:
            self._save(module, now)
        for path in (self.run / "kept").glob("*.safetensors"):
            if int(path.stem) not in needed:
                path.unlink()
                path.with_suffix(".json").unlink(missing_ok=True)

    def _save(self, module: nn.Module, step: int) -> None:
        path = self._path(step)
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_suffix(".tmp")
        weights = {name: value.detach().cpu().contiguous() for name, value in module.named_parameters()}
        try:
            save_file(weights, temporary)
            manifests.sync_file(temporary)
            entry = {"size": temporary.stat().st_size, "sha256": manifests.file_sha256(temporary)}
            manifests.write_atomically(path.with_suffix(".json"), json.dumps(entry))
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if said := outside.translate(error, path):
                raise said from error
            raise
        temporary.replace(path)
        manifests.sync_file(path.parent)

    def load(self, module: nn.Module, step: int) -> None:
        """Put the weights of a step back into the module; DataCorrupt if they are not what was written."""
        path = self._path(step)
        remedy = f"restore it, or remove {self.run} to train again"
        manifests.verify_file(
            path, outside.read_json(path.with_suffix(".json"), manifests.Entry, remedy, DataCorrupt), remedy
        )
        weights = pretrained.read_tensors(path)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name not in weights or weights[name].shape != parameter.shape:
                    raise DataCorrupt(f"{path} has no {name} of this model's size: {remedy}")
                parameter.copy_(weights[name])

    def _path(self, step: int) -> Path:
        return self.run / "kept" / f"{step:010d}.safetensors"
