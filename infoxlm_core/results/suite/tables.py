"""The tables of a suite: our rows, and below them what is published for the same task and protocol."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from infoxlm_core import languages
from infoxlm_core.results import published
from infoxlm_core.results.suite.protocol import find_differences

Cell = Mapping[str, Any]
"""{"mean", "deviation"}, shares from 0 to 1; deviation is None for a single seed."""

TITLES = {"accuracy": "accuracy", "f1": "F1", "exact_match": "exact match"}
BEST = "best on this set"
_BEST = f"“{BEST}”: the layer was chosen by the scores on these very pairs, which flatters it a little"
_GROUPS = {
    "14": "14 languages with parallel training text",
    "22": "22 languages without parallel training text",
    "other": "other languages",
}


@dataclass(frozen=True)
class Line:
    """One row: a model of ours, or a published one (`source` says from where)."""

    model: str
    detail: str
    rule: str
    """#M: how many checkpoints for all languages, and what chose them."""

    cells: tuple[Cell | None, ...]
    mean: Cell | None
    source: str = ""
    own: bool = False
    """The model under test."""


@dataclass(frozen=True)
class Table:
    """What is compared in one unit; shares, shown in percent."""

    name: str
    """Of its file."""

    title: str
    columns: tuple[str, ...]
    ours: tuple[Line, ...]
    published: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    mean: str = "mean"
    """Heading of the column before all others; empty: there is no mean."""


def build(summary: Mapping[str, Any]) -> dict[str, list[Table]]:
    """All tables by task, and under `transfer` and `mixed` those of several tasks."""
    tables = {task: _build_task(task, found, summary["model"]) for task, found in summary["tasks"].items()}
    tables |= {"transfer": _build_gaps(summary), "mixed": _build_mixed(summary)}
    return {name: found for name, found in tables.items() if found}


def _build_task(task: str, found: Mapping[str, Any], own: str) -> list[Table]:
    if not found["models"]:
        return []
    if found["kind"] == "retrieval":
        return list(_build_retrieval(task, found, own))
    return [_build_metric(task, found, metric, own) for metric in found["metrics"]]


def _build_metric(task: str, found: Mapping[str, Any], metric: str, own: str) -> Table:
    """One metric by language. Published rows are of the same training sets: zero-shot, or translate-train-all."""
    columns = tuple(found["languages"])
    lines = tuple(
        Line(
            model,
            "",
            row["rule"],
            tuple(row["languages"].get(code, {}).get(metric) for code in columns),
            row["mean"][metric],
            own=model == own,
        )
        for model, row in found["models"].items()
    )
    key = {"xnli": "xnli", "mlqa": f"mlqa/{metric}"}.get(found["table"], "")
    rows, notes = _lay_beside(key, columns, lambda row: row.kind == found["setting"])
    alone = len(found["metrics"]) == 1
    return Table(
        task if alone else f"{task}-{metric.replace('_', '-')}",
        f"{task}: {TITLES[metric]}",
        columns,
        lines,
        rows,
        notes,
    )


def _build_retrieval(task: str, found: Mapping[str, Any], own: str) -> Iterable[Table]:
    """By group of languages and direction; a row for every model and vector."""
    pivot = found["settings"].get("pivot", "en")
    groups = {"other": list(found["languages"])}
    if found["table"] == "tatoeba":
        groups = {name: [] for name in _GROUPS}
        for code in found["languages"]:
            short = languages.two_letters(code)
            name = next((name for name in ("14", "22") if short in languages.GROUPS[name]), "other")
            groups[name].append(code)
    for group, columns in groups.items():
        if not columns:
            continue
        for direction, name in (("to_pivot", f"xx_{pivot}"), ("from_pivot", f"{pivot}_xx")):
            lines = tuple(_list_vectors(found["models"], columns, direction, own))
            key = f"tatoeba/{group}/{name}" if found["table"] == "tatoeba" else ""
            rows, notes = _lay_beside(key, columns, lambda _: True, detailed=True)
            notes = (*([_BEST] if any(BEST in line.detail for line in lines) else []), *notes)
            arrow = name.replace("_", " → ")
            whose = f"{_GROUPS[group]}, " if len(groups) > 1 else ""
            label = f"-{group}" if len(groups) > 1 else ""
            yield Table(
                f"{task}{label}-{name.replace('_', '-')}", f"{task}: {whose}{arrow}", tuple(columns), lines, rows, notes
            )


def _list_vectors(models: Mapping[str, Any], columns: Sequence[str], direction: str, own: str) -> Iterable[Line]:
    """Vector by vector every model, as the paper's tables have it."""
    for place in range(len(next(iter(models.values()))["vectors"])):
        for model, row in models.items():
            name, vector = list(row["vectors"].items())[place]
            shares = [vector["languages"].get(code, {}).get(direction) for code in columns]
            known = [share for share in shares if share is not None]
            yield Line(
                model,
                describe_vector(vector, row["encoder"]["layers"]) + f", {BEST}" * name.endswith("@best"),
                "",
                tuple(_exact(share) for share in shares),
                _exact(fmean(known)) if known else None,
                own=model == own,
            )


def describe_vector(vector: Mapping[str, Any], layers: int) -> str:
    """`mean of tokens, layer 8`."""
    pooling = {"mean": "mean of tokens", "mean_no_special": "mean without special tokens", "cls": "[CLS]"}
    layer = "last layer" if vector["layer"] == layers else f"layer {vector['layer']}"
    return f"{pooling.get(vector['pooling'], vector['pooling'])}, {layer}"


def _lay_beside(
    key: str, columns: Sequence[str], wanted: Any, detailed: bool = False
) -> tuple[tuple[Line, ...], tuple[str, ...]]:
    """The published rows of a table in our columns, and what must be said of them."""
    table = published.tables().get(key)
    if not table:
        return (), ()
    short = [languages.two_letters(code) for code in columns]
    complete = set(short) == set(table.columns)
    lines, notes = [], []
    for row in table.rows:
        if not wanted(row):
            continue
        shares = [row.cells.get(code) for code in short]
        over = [share for share in shares if share is not None]
        mean = row.mean if complete else fmean(over) if len(over) == len(short) else None
        model = row.model + (" large" if row.size == "large" else "")
        rule = row.rule + f" ({row.runs} runs)" * (row.runs > 1)
        lines.append(
            Line(
                model, row.kind if detailed else "", rule.strip(), tuple(map(_exact, shares)), _exact(mean), row.source
            )
        )
        notes += [row.note] if row.note else []
    if lines and not complete:
        notes.append("the languages are not those of the paper's table: published means are over those shown, if known")
    return tuple(lines), tuple(dict.fromkeys(notes))


def choose_transferred(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The tasks in which a model of ours has a transfer gap."""
    return {
        task: found
        for task, found in summary["tasks"].items()
        if any(row["transfer_gap"] for row in found["models"].values())
    }


def _build_gaps(summary: Mapping[str, Any]) -> list[Table]:
    """The transfer gap of every fine-tuned task: score of the source language minus the mean of the others."""
    tasks = choose_transferred(summary)
    if not tasks:
        return []
    lines = []
    for model in summary["models"]:
        rows = {task: found["models"].get(model) for task, found in tasks.items()}
        if any(rows.values()):
            cells = tuple(
                (row["transfer_gap"] or {}).get(tasks[task]["main"]) if row else None for task, row in rows.items()
            )
            lines.append(Line(model, "", "", cells, None, own=model == summary["model"]))
    same = {task: f["table"] if f["setting"] == "zero-shot" else "" for task, f in tasks.items()}
    theirs = [
        Line(row.model, "", "", tuple(_exact(row.cells.get(table)) for table in same.values()), None, row.source)
        for row in published.tables()["transfer_gap"].rows
        if any(table in row.cells for table in same.values())
    ]
    notes = _caution(tasks) if theirs else ()
    return [Table("transfer-gap", "Transfer gap, points", tuple(tasks), tuple(lines), tuple(theirs), notes, mean="")]


def _build_mixed(summary: Mapping[str, Any]) -> list[Table]:
    """Premise and hypothesis, or paragraph and question, in one language or in two."""
    tables = []
    for task, found in summary["tasks"].items():
        lines = tuple(
            Line(model, "", row["rule"], (row["within"], row["across"]), None, own=model == summary["model"])
            for model, row in found["models"].items()
            if row["within"]
        )
        rows = published.tables()["mixed"].rows if found["table"] == "xnli" and found["setting"] == "zero-shot" else ()
        theirs = tuple(
            Line(row.model, "", "", tuple(map(_exact, row.cells.values())), None, row.source) for row in rows
        )
        if lines:
            notes = tuple(row.note for row in rows if row.note) + (_caution({task: found}) if rows else ())
            title = f"{task}: both texts in one language, or in two"
            tables.append(Table(f"{task}-mixed", title, ("within", "across"), lines, theirs, notes, mean=""))
    return tables


def _caution(tasks: Mapping[str, Any]) -> tuple[str, ...]:
    """Which tasks of a table were not measured as the paper did."""
    others = [task for task, found in tasks.items() if warn(found)]
    return (f"not by the paper's protocol: {', '.join(others)}",) if others else ()


def warn(found: Mapping[str, Any]) -> str:
    """One sentence if a task's numbers must not be compared with the published ones; else nothing."""
    differences = find_differences(found["protocol"])
    if found["table"] == "none" or not found["models"] or not differences:
        return ""
    return (
        f"Not the paper's protocol ({', '.join(differences)}): compare our rows with each other, "
        "and with the published ones at most their order."
    )


def _exact(share: float | None) -> Cell | None:
    return None if share is None else {"mean": share, "deviation": None}
