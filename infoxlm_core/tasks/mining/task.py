"""Task: find the pairs of translations in two lists of sentences, most of which have no translation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from infoxlm_core.tasks.mining.settings import MiningConfig
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.tasks.task import Preset, Task


class Mining(Task[MiningConfig]):
    """Recognise translation pairs by the ratio margin, with a threshold that is chosen on one half of the set."""

    name: ClassVar[str] = "mining"
    settings = MiningConfig
    metrics: ClassVar[tuple[str, ...]] = ("f1", "precision", "recall")
    unit: ClassVar[str] = "pairs"
    order: ClassVar[Sequence[str]] = ("de", "fr", "ru", "zh")
    presets: ClassVar[Mapping[str, Preset]] = {"mining": Preset()}

    def check(self, settings: MiningConfig, has_grid: bool) -> None:  # noqa: ARG002
        from infoxlm_core.tasks.mining import run

        run.read_sets(settings)

    def list_test_files(self, settings: MiningConfig) -> list[Path]:
        from infoxlm_core.tasks.mining import bucc

        files = []
        for set_files in bucc.find_sets(Path(settings.data), settings.pivot, settings.name).values():
            files += [set_files.sources, set_files.targets]
        return files

    def measure(self, settings: MiningConfig, model: Path, output: Path) -> Scores:
        from infoxlm_core.tasks.mining import run

        return run.measure(settings, model, output)
