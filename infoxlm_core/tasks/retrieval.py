"""Task: an encoder + aligned sentences -> how often the translation is the nearest (Tatoeba, FLORES, your own)."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from infoxlm_core import languages
from infoxlm_core.config import RetrievalConfig
from infoxlm_core.tasks.task import Fact, Fetch, Scores, Task, finite


class Retrieval(Task[RetrievalConfig]):
    """Each sentence looks for its translation among all of the other language, in both directions."""

    name: ClassVar[str] = "retrieval"
    settings = RetrievalConfig
    metrics: ClassVar[tuple[str, ...]] = ("mean", "to_pivot", "from_pivot")
    unit: ClassVar[str] = "pairs"
    order: ClassVar[Sequence[str]] = languages.GROUPS["36"]
    tables: ClassVar[tuple[str, ...]] = ("tatoeba",)
    trained: ClassVar[bool] = False

    def data(self, settings: RetrievalConfig) -> dict[str, list[str]]:
        return {"data": [settings.data]}

    def localise(self, settings: RetrievalConfig, fetch: Fetch) -> RetrievalConfig:
        return settings.model_copy(update={"data": fetch(settings.data)})

    def without_data(self, settings: RetrievalConfig) -> RetrievalConfig:
        return settings.model_copy(update={"data": ""})

    def check(self, settings: RetrievalConfig, chosen: bool) -> None:  # noqa: ARG002 - nothing is chosen
        from infoxlm_core.tasks import aligned_files

        aligned_files.read(Path(settings.data), settings.pivot, settings.languages)

    def training_languages(self, settings: RetrievalConfig) -> list[str]:  # noqa: ARG002 - nothing is trained
        return []

    def measure(self, settings: RetrievalConfig, model: Path, output: Path) -> Scores:
        from infoxlm_core.tasks import aligned

        return Scores.from_dict(aligned.measure(settings, model, output))

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
