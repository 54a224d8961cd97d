"""Scores of a suite's points -> one summary: the best of each grid, mean and deviation over seeds, what is missing.

Scores are what `classification.measure`, `reading.measure` and `aligned.measure` return. Statistics are those of
comparison.py: {"n", "mean", "deviation", "interval", "values"} over seeds.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from infoxlm_core import languages
from infoxlm_core.results.comparison import summarise as over_seeds
from infoxlm_core.results.suite import points
from infoxlm_core.results.suite.protocol import compare_protocol, describe_rule, name_setting
from infoxlm_core.results.suite_config import SuiteConfig, SuiteTaskConfig

Scores = Mapping[str, Any]

MAIN = {"classification": "accuracy", "question_answering": "f1", "retrieval": "mean"}
"""By kind of task the metric of figures, of the transfer gap and of the choice of a grid point."""

_XNLI = ("en", "fr", "es", "de", "el", "bg", "ru", "tr", "ar", "vi", "th", "zh", "hi", "sw", "ur")
_MLQA = ("en", "es", "de", "ar", "hi", "vi", "zh")
_ORDERS = {"classification": _XNLI, "question_answering": _MLQA, "retrieval": languages.GROUPS["36"]}


def summarise(config: SuiteConfig, results: Mapping[str, Scores]) -> dict[str, Any]:
    """Sum up what has been measured.

    Args:
        config: of the suite.
        results: scores of the points that are finished, by name.

    Returns:
        {"model", "models": {name: source}, "unfinished": [names], "tasks": {task: {"kind", "main", "metrics", "table",
        "languages", "counts", "protocol", "notes", "settings", "models": {model: row}}}}. A row holds `chosen` (place
        of the grid, its development score, its seeds), `grid`, `languages`, `mean`, `transfer_gap`, `within`, `across`,
        for retrieval `vectors`, `by_layer`; a model of which nothing is finished has none.
    """
    planned = points.plan(config)
    unfinished = [item["point"]["name"] for item in planned if item["point"]["name"] not in results]
    tasks = {}
    for task, measure in config.tasks.items():
        mine = [item["point"] for item in planned if item["point"]["task"] == task]
        tasks[task] = _summarise_task(measure, mine, list(config.models), results)
    first = next(iter(config.models))
    return {"model": first, "models": dict(config.models), "unfinished": unfinished, "tasks": tasks}


def order(codes: Iterable[str], kind: str) -> list[str]:
    """Languages in the paper's order, the others after them by name."""
    places = {code: place for place, code in enumerate(_ORDERS[kind])}
    return sorted(codes, key=lambda code: (places.get(languages.two_letters(code), len(places)), code))


def _summarise_task(
    measure: SuiteTaskConfig, mine: Sequence[Mapping[str, Any]], models: Sequence[str], results: Mapping[str, Scores]
) -> dict[str, Any]:
    kind = measure.settings.task
    finished = [results[point["name"]] for point in mine if point["name"] in results]
    notes: list[str] = []
    rows: dict[str, Any] = {}
    for model in models:
        places = _places([point for point in mine if point["model"] == model], results)
        if chosen := _choose(places, model, notes):
            rows[model] = _summarise_row(kind, chosen, places)
    if len({scores["test_set"] for scores in finished}) > 1:
        notes.append("Not all points were asked the same questions: their test sets differ. Do not compare them.")
    named = dict.fromkeys(code for scores in finished for code in scores["languages"])
    counts = {code: scores["counts"][code] for scores in finished for code in scores["languages"]}
    metrics = list(finished[0]["mean"]) if finished else [MAIN[kind]]
    return {
        "kind": kind,
        "main": MAIN[kind],
        "metrics": metrics,
        "table": measure.table,
        "setting": name_setting(measure, finished),
        "languages": (ordered := order(named, kind)),
        "counts": {code: counts[code] for code in ordered},
        "protocol": compare_protocol(measure, counts, finished),
        "notes": notes,
        "settings": points.dump(measure.settings),
        "models": rows,
    }


def _places(mine: Sequence[Mapping[str, Any]], results: Mapping[str, Scores]) -> list[dict[str, Any]]:
    """The places of one model's grid: {"grid", "dev", "by", "scores": {seed: scores}}.

    `dev` is the development score over all languages, `by` the one that chooses: means over finished seeds, or None.
    """
    groups: dict[str, dict[str, Any]] = {}
    for point in mine:
        group = groups.setdefault(points.describe(point["grid"]), {"grid": point["grid"], "scores": {}})
        if point["name"] in results:
            group["scores"][point["seed"]] = results[point["name"]]
    for group in groups.values():
        looked = [scores for scores in group["scores"].values() if scores["dev"]]
        group["dev"] = fmean(scores["dev"]["mean"] for scores in looked) if looked else None
        group["by"] = fmean(map(_judge, looked)) if looked else None
    return list(groups.values())


def _judge(scores: Scores) -> float:
    """What a place of the grid is chosen by: by rule `source` its language alone, for else it were no zero-shot."""
    dev, source = scores["dev"], next(iter(scores.get("trained_on", ())), "")
    return dev["languages"].get(source, dev["mean"]) if scores["selection"]["rule"] == "source" else dev["mean"]


def _choose(places: Sequence[dict[str, Any]], model: str, notes: list[str]) -> dict[str, Any] | None:
    """The place with the best development score, the first of equals; never chosen by test scores.

    Only among those with the most finished seeds: one lucky seed must not win over the mean of five.
    """
    done = [place for place in places if place["scores"]]
    if len(places) == 1 or not done:
        return done[0] if done else None
    if undecidable := [place for place in done if place["dev"] is None]:
        names = ", ".join(points.describe(place["grid"]) for place in undecidable)
        notes.append(f"{model}: no development scores ({names}), so nothing is chosen: give development sets.")
        return None
    most = max(len(place["scores"]) for place in done)
    if fewer := [points.describe(place["grid"]) for place in done if len(place["scores"]) < most]:
        notes.append(f"{model}: {', '.join(fewer)} not in the choice: fewer than {most} seeds are finished.")
    return max((place for place in done if len(place["scores"]) == most), key=lambda place: place["by"])


def _summarise_row(kind: str, chosen: dict[str, Any], places: Sequence[dict[str, Any]]) -> dict[str, Any]:
    by_seed: dict[int, Scores] = chosen["scores"]
    first = next(iter(by_seed.values()))
    row: dict[str, Any] = {
        "chosen": {"grid": chosen["grid"], "dev": chosen["dev"], "seeds": list(by_seed)},
        "grid": [{"grid": p["grid"], "dev": p["dev"], "by": p["by"], "seeds": list(p["scores"])} for p in places],
        "rule": describe_rule(first["selection"], first["dev"]["languages"] if len(places) > 1 else ()),
        "tuned": {seed: scores.get("training", {}).get("tuned") for seed, scores in by_seed.items()},
        "steps": {seed: (scores["selection"] or {}).get("chosen", {}) for seed, scores in by_seed.items()},
        "languages": {
            code: _cells({seed: scores["languages"][code] for seed, scores in by_seed.items()})
            for code in order(first["languages"], kind)
        },
        "mean": _cells({seed: scores["mean"] for seed, scores in by_seed.items()}),
        "transfer_gap": None,
        "within": None,
        "across": None,
    }
    if first["transfer_gap"]:
        row["transfer_gap"] = _cells({seed: scores["transfer_gap"] for seed, scores in by_seed.items()})
    if first["mixed"]:
        row |= {
            name: over_seeds({seed: scores["mixed"][name] for seed, scores in by_seed.items()})
            for name in ("within", "across")
        }
    if kind == "retrieval":
        row |= {name: first[name] for name in ("vectors", "by_layer", "encoder")}
    return row


def _cells(by_seed: Mapping[int, Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """Scores of one language by seed -> {metric: mean, deviation, … over the seeds}."""
    metrics = next(iter(by_seed.values()))
    return {metric: over_seeds({seed: cell[metric] for seed, cell in by_seed.items()}) for metric in metrics}


def flatten(summary: Mapping[str, Any]) -> dict[str, float]:
    """The summary as metrics: `xnli/mean`, `xnli/en`, `mlqa/f1/en`, `tatoeba/xx_en`; other models by name in front."""
    flat: dict[str, float] = {}
    for task, found in summary["tasks"].items():
        for model, row in found["models"].items():
            prefix = task if model == summary["model"] else f"{points.slug(model)}/{task}"
            plain = {
                "mean": {metric: cell["mean"] for metric, cell in row["mean"].items()},
                "languages": {
                    code: {metric: cell["mean"] for metric, cell in cells.items()}
                    for code, cells in row["languages"].items()
                },
                "transfer_gap": {m: cell["mean"] for m, cell in (row["transfer_gap"] or {}).items()},
                "mixed": {name: row[name]["mean"] for name in ("within", "across") if row[name]},
                "dev": {"mean": row["chosen"]["dev"]},
                "vectors": row.get("vectors", {}),
            }
            deviation = {f"{prefix}/deviation": row["mean"][found["main"]]["deviation"]}
            pivot = found["settings"].get("pivot", "en")
            flat |= _name_metrics(prefix, found["kind"], plain, pivot) | _finite(deviation)
            flat[f"{prefix}/seeds"] = len(row["chosen"]["seeds"])
    return flat


def flatten_scores(task: str, scores: Scores, pivot: str = "en") -> dict[str, float]:
    """Scores of one point as metrics, by the same names as in `flatten`."""
    return _name_metrics(task, scores["task"], scores, pivot)


def _name_metrics(prefix: str, kind: str, scores: Scores, pivot: str) -> dict[str, float]:
    flat: dict[str, Any] = {f"{prefix}/dev": (scores.get("dev") or {}).get("mean")}
    flat[f"{prefix}/transfer_gap"] = (scores.get("transfer_gap") or {}).get(MAIN[kind])
    flat |= {f"{prefix}/{name}": (scores.get("mixed") or {}).get(name) for name in ("within", "across")}
    if kind == "classification":
        flat |= {f"{prefix}/mean": scores["mean"]["accuracy"]}
        flat |= {f"{prefix}/{code}": cell["accuracy"] for code, cell in scores["languages"].items()}
    elif kind == "question_answering":
        for metric, mean in scores["mean"].items():
            flat |= {f"{prefix}/{metric}": mean}
            flat |= {f"{prefix}/{metric}/{code}": cell[metric] for code, cell in scores["languages"].items()}
    else:
        names = {"to_pivot": f"xx_{pivot}", "from_pivot": f"{pivot}_xx", "mean": "mean"}
        flat |= {f"{prefix}/{code}": cell["mean"] for code, cell in scores["languages"].items()}
        for place, (vector, found) in enumerate(scores["vectors"].items()):
            under = prefix if not place else f"{prefix}/{vector.replace('@', '-')}"
            flat |= {f"{under}/{name}": found["mean"][direction] for direction, name in names.items()}
            flat[f"{under}/best_layer" if vector.endswith("@best") else f"{under}/layer"] = found["layer"]
    return _finite(flat)


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
