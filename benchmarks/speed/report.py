"""The results of a run as JSON, and the Markdown tables made from it."""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.speed.harness import OURS, Case, Sheet

DIRECTORY = Path(__file__).parents[1] / "results"


def write(cases: list[Case | Sheet], about: dict[str, Any], name: str) -> Path:
    """Write results/NAME.json and NAME.md; return the path of the latter."""
    DIRECTORY.mkdir(exist_ok=True)
    values = about | {"cases": [_as_json(case) for case in cases]}
    path = DIRECTORY / f"{name}.json"
    path.write_text(json.dumps(values, indent=1, default=float) + "\n", encoding="utf-8")
    text = "\n".join(
        [
            *_head(about),
            *(line for case in cases for line in _table(case)),
        ]
    )
    path.with_suffix(".md").write_text(text.rstrip() + "\n", encoding="utf-8")
    return path.with_suffix(".md")


def _as_json(case: Case | Sheet) -> dict[str, Any]:
    if isinstance(case, Sheet):
        return dataclasses.asdict(case)
    peers = [name for name in case.cpu or case.peak if name != OURS]
    ratios = {peer: _spread(case.ratios(peer)) for peer in peers}
    rates = {name: case.rate(name) for name in case.cpu}
    return dataclasses.asdict(case) | {"ratios": ratios, "units_per_cpu_second": rates}


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": len(values)}


def _head(about: dict[str, Any]) -> list[str]:
    machine, ceilings, load = about["machine"], about["ceilings"], about["load"]
    versions = ", ".join(f"{name} {version or 'absent'}" for name, version in machine["versions"].items())
    return [
        f"# Benchmarks of {about['date']}" + (" (quick: too small to publish)" if about["quick"] else ""),
        "",
        f"Commit {machine['commit']}, seed {about['seed']}. {machine['cores']} × {machine['cpu']} "
        f"(AVX512-BF16 {_yes(machine['avx512_bf16'])}, AMX {_yes(machine['amx'])}), {machine['memory_gib']} GiB; "
        f"one thread on one core; load {load['before'][0]:.2f} before, {load['after'][0]:.2f} after. Ceilings measured "
        f"in the same run: {ceilings['matmul_gflops']:.0f} GFLOP/s fp32 product, "
        f"{ceilings['copy_gb_per_second']:.1f} GB/s copy. Python {machine['python']}, {versions}.",
        "",
        "Ratios are of CPU seconds a unit of work, peer by ours, taken inside each round: median [min … max]. Tokens "
        "are real ones, never padding. Before timing, all sides were found equal in loss and gradients.",
        "",
    ]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _table(case: Case | Sheet) -> list[str]:
    """Settings, inputs and equality in words, then one row a variant."""
    if isinstance(case, Sheet):
        columns = list(case.rows[0])
        lines = [f"## {case.name}", "", *(f"- *{name}*: {about}" for name, about in case.about.items()), ""]
        lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        values = [[v if isinstance(v, str) else _number(v) for v in row.values()] for row in case.rows]
        return [*lines, *(f"| {' | '.join(row)} |" for row in values), ""]
    lines = [f"## {case.name}", "", "Input: " + ", ".join(f"{_number(v)} {k}" for k, v in case.inputs.items()) + "."]
    lines += [f"- *{name}*: {about}" for name, about in case.about.items()]
    for peer, apart in case.equality.items():
        lines.append(f"- equal to {peer}: " + ", ".join(f"{what} {value:.1e}" for what, value in apart.items()))
    lines += [f"- *{name}* skipped: {reason}" for name, reason in case.skipped.items()]
    lines.append("")
    if case.peak:
        lines += ["| variant | peak above weights, MB | ours by this |", "|---|---|---|"]
        lines += [f"| {n} | {peak / 1e6:.0f} | {case.ratios(n)[0]:.2f} |" for n, peak in case.peak.items()]
        return [*lines, ""]
    lines += [f"| variant | CPU s | wall s | {case.unit} per CPU s | times ours |", "|---|---|---|---|---|"]
    for name in case.cpu:
        spread = _spread(case.ratios(name))
        ratio = "1" if name == OURS else f"{spread['median']:.2f} [{spread['min']:.2f} … {spread['max']:.2f}]"
        seconds = [f"{statistics.median(values[name]):.3g}" for values in (case.cpu, case.wall)]
        lines.append(f"| {name} | {' | '.join(seconds)} | {_number(case.rate(name))} | {ratio} |")
    return [*lines, ""]


def _number(value: float) -> str:
    if abs(value) < 1:
        return f"{value:.3g}"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
