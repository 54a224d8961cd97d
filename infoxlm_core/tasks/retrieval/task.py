"""Task: an encoder + aligned sentences -> how often the translation is the nearest (Tatoeba, FLORES, your own)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from infoxlm_core import languages
from infoxlm_core.tasks.retrieval.settings import RetrievalConfig
from infoxlm_core.tasks.task import Fact, Preset, Scores, Task, finite


class Retrieval(Task[RetrievalConfig]):
    """Each sentence looks for its translation among all of the other language, in both directions."""

    name: ClassVar[str] = "retrieval"
    settings = RetrievalConfig
    metrics: ClassVar[tuple[str, ...]] = ("mean", "to_pivot", "from_pivot")
    unit: ClassVar[str] = "pairs"
    order: ClassVar[Sequence[str]] = languages.GROUPS["36"]
    tables: ClassVar[tuple[str, ...]] = ("tatoeba",)
    presets: ClassVar[Mapping[str, Preset]] = {"tatoeba": Preset("tatoeba"), "pairs": Preset()}

    def check(self, settings: RetrievalConfig, chosen: bool) -> None:  # noqa: ARG002 - nothing is chosen
        from infoxlm_core.tasks.retrieval import files

        files.read_aligned(Path(settings.data), settings.pivot, settings.languages)

    def tests(self, settings: RetrievalConfig) -> list[Path]:
        from infoxlm_core.corpora import evaluation_sets
        from infoxlm_core.tasks.retrieval import files

        held_out = Path(settings.data) / "held_out"  # of a prepared corpus, which has training text beside it
        if held_out.is_dir():
            return evaluation_sets.files(held_out)
        return [file for file in evaluation_sets.files(Path(settings.data)) if files.is_named(file)]

    def measure(self, settings: RetrievalConfig, model: Path, output: Path) -> Scores:
        from infoxlm_core.tasks.retrieval import run

        return run.measure(settings, model, output)

    def describe(self, settings: RetrievalConfig, table: str) -> list[Fact]:
        if table != "tatoeba":
            return []
        ours = ", ".join(settings.vectors) + (f", prefix {settings.prefix!r}" if settings.prefix else "")
        return [Fact("vectors", ours, "mean of all tokens at a layer that it does not name; [CLS] of the last layer")]

    def name_metrics(self, scores: Scores, settings: RetrievalConfig, prefix: str) -> dict[str, float]:
        """Of the first vector `PREFIX/xx_en`, `PREFIX/en_xx`, `PREFIX/de`; of the others with their names between."""
        names = {"to_pivot": f"xx_{settings.pivot}", "from_pivot": f"{settings.pivot}_xx", "mean": "mean"}
        flat = self.name_common(scores, prefix)
        flat |= {f"{prefix}/{code}": cell["mean"] for code, cell in scores.languages.items()}
        for rank, (vector, found) in enumerate(scores.details["vectors"].items()):
            under = prefix if not rank else f"{prefix}/{vector.replace('@', '-')}"
            flat |= {f"{under}/{name}": found["mean"][direction] for direction, name in names.items()}
            flat[f"{under}/best_layer" if vector.endswith("@best") else f"{under}/layer"] = found["layer"]
        return finite(flat)
