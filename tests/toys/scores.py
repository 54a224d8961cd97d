"""Configs of suites, and scores of their trials, written by hand."""

from typing import Any

from infoxlm_core.results.suite_config import SuiteConfig
from infoxlm_core.results.summaries.suite import Summary, summarise
from infoxlm_core.results.trials import Trial
from infoxlm_core.tasks.scores import Scores

CLASSIFICATION = {"settings": {"task": "classification", "data": "data.csv"}}
ANSWERING = {"settings": {"task": "question_answering", "train": ["t"], "dev": ["d"], "test": ["q"]}}
RETRIEVAL = {"settings": {"task": "retrieval", "data": "aligned"}}
RATES = {"optimization.learning_rate": [1e-5, 2e-5]}


def config(models: Any = ("ours",), **tasks: dict) -> SuiteConfig:
    return SuiteConfig.parse({"models": {name: f"/models/{name}" for name in models}, "tasks": tasks})


def labelled(en: float, de: float, fr: float = 0.5, dev: float | None = 0.5, **more) -> dict:
    """Return the scores of a classifier."""
    languages = {"de": {"accuracy": de}, "en": {"accuracy": en}, "fr": {"accuracy": fr}}
    return {
        "task": "classification", "languages": languages, "mean": {"accuracy": (en + de + fr) / 3},
        "transfer_gap": {"accuracy": en - (de + fr) / 2}, "counts": dict.fromkeys(languages, 10),
        "test_set": "sha256:1",
        "dev": None if dev is None else {"languages": {"en": dev, "de": dev}, "mean": dev},
        "selection": {"rule": "joint", "looks": [], "chosen": {"*": 10}}, "mixed": None,
        "training": {"steps": 10, "examples": 40}, "trained_on": ["en"],
    } | more  # fmt: skip


def answered(f1: float) -> dict:
    languages = {"zh": {"f1": f1, "exact_match": f1 / 2}, "en": {"f1": 0.8, "exact_match": 0.4}}
    mean = {name: (languages["zh"][name] + languages["en"][name]) / 2 for name in ("f1", "exact_match")}
    gap = {name: languages["en"][name] - languages["zh"][name] for name in mean}
    return labelled(0, 0) | {"task": "question_answering", "languages": languages, "mean": mean, "transfer_gap": gap,
                             "counts": {"zh": 4, "en": 4}}  # fmt: skip


def retrieved(to_de: float, layer: int = 7, codes: tuple[str, ...] = ("deu", "afr", "gle")) -> dict:
    """Return scores of retrieval; the paper has parallel text of German, none of Afrikaans, and no figure of Irish."""

    def vector(pooling: str, layer: int, share: float) -> dict:
        cell = {"to_pivot": share, "from_pivot": share / 2, "mean": share * 3 / 4}
        return {"pooling": pooling, "layer": layer, "languages": dict.fromkeys(codes, cell), "mean": cell}

    vectors = {"mean@best": vector("mean", layer, to_de), "cls@last": vector("cls", 12, to_de / 4)}
    curve = [to_de * layer / 12 for layer in range(13)]
    return labelled(0, 0) | {
        "task": "retrieval", "languages": vectors["mean@best"]["languages"], "mean": vectors["mean@best"]["mean"],
        "transfer_gap": None, "dev": None, "selection": None, "counts": dict.fromkeys(codes, 1000),
        "vectors": vectors, "by_layer": {"mean": {"to_pivot": curve, "from_pivot": curve, "mean": curve}},
        "encoder": {"layers": 12},
    }  # fmt: skip


def summed(planned: SuiteConfig, results: dict[str, dict]) -> Summary:
    """Return the summary of a suite whose trials have these scores."""
    return summarise(planned, {name: Scores.from_dict(scores) for name, scores in results.items()})


def trial(variant: str, seed: int, **metrics: float) -> tuple[Trial, dict[str, float]]:
    """Return a trial of an ablation and its metrics; `retrieval__best` stands for `retrieval/best`."""
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return Trial.parse({"variant": variant, "seed": seed, "what": f"what {variant} is"}), named
