"""Task: an encoder + aligned sentences -> how often the translation is the nearest (Tatoeba, FLORES, your own)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from infoxlm_core import languages
from infoxlm_core.config.base import Flag, Language, PositiveInt, Source, StageConfig, Whole
from infoxlm_core.tasks.task import Fact, Preset, Scores, Task, finite

Vector = Annotated[str, Field(pattern=r"^(mean|mean_no_special|cls|contrast)@([0-9]+|last|contrast|best)$")]


class RetrievalConfig(StageConfig):
    """Encoder + aligned sentences -> how often the translation is the nearest (Tatoeba, NTREX, FLORES, your own)."""

    task: Literal["retrieval"] = "retrieval"
    """The kind of task."""

    data: Source
    """Folder of aligned files: LASER's `tatoeba.deu-eng.deu` and `.eng`, or NAME.en-de.en and NAME.en-de.de, or one
    file a language, line by line translations of each other, or en-de.tsv; or a prepared corpus, for its held-out
    pairs."""

    pivot: Language = "en"
    """The language that all others are aligned with."""

    languages: Literal["all", "14", "22", "36"] | Annotated[tuple[Language, ...], Field(min_length=1)] = "all"
    """all there are · 14, 22, 36: the paper's Tables 2, 3 and both · or a list."""

    vectors: Annotated[tuple[Vector, ...], Field(min_length=1)] = ("mean@best", "cls@last")
    """POOLING@LAYER. Pooling: mean (of all tokens), mean_no_special, cls, contrast (projected, as in pre-training).
    Layer: a number as in Hugging Face's hidden_states, last, contrast (that of pre-training) or best (chosen on this
    very set by the mean of both directions). The first one gives the main scores."""

    prefix: str = ""
    """Put before every sentence, for models that were trained with one, such as `query: `."""

    margin: Flag = False
    """Compare by ratio margin over 4 neighbours (Artetxe & Schwenk 2019) instead of cosine."""

    batch_size: PositiveInt = 64
    """Sentences of one forward pass; changes memory and speed, not the result."""

    max_tokens: Annotated[Whole, Field(gt=2, le=2**20)] = 512
    """Of one sentence, special tokens included; longer ones are cut."""


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
        from infoxlm_core.tasks import aligned_files

        aligned_files.read(Path(settings.data), settings.pivot, settings.languages)

    def tests(self, settings: RetrievalConfig) -> list[Path]:
        from infoxlm_core.corpora import evaluation_sets
        from infoxlm_core.tasks import aligned_files

        held_out = Path(settings.data) / "held_out"  # of a prepared corpus, which has training text beside it
        if held_out.is_dir():
            return evaluation_sets.files(held_out)
        return [file for file in evaluation_sets.files(Path(settings.data)) if aligned_files.is_named(file)]

    def measure(self, settings: RetrievalConfig, model: Path, output: Path) -> Scores:
        from infoxlm_core.tasks import aligned

        return aligned.measure(settings, model, output)

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
