"""Write the results of a benchmark run as Markdown tables to benchmarks/results."""

import statistics
from pathlib import Path
from typing import Any

from benchmarks.speed.harness import OURS, Case

DIRECTORY = Path(__file__).parents[1] / "results"


def write(cases: list[Case], settings: dict[str, Any], name: str) -> Path:
    """Write results/NAME.md and return its path."""
    lines = format_heading(settings)
    for case in cases:
        lines += format_section(case)
    path = DIRECTORY / f"{name}.md"
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return path


def format_heading(settings: dict[str, Any]) -> list[str]:
    """Format the first lines of a report: the title, and a paragraph about the machine and the versions."""
    machine = settings["machine"]
    ceilings = settings["ceilings"]
    load = settings["load"]
    title = f"# Benchmarks of {settings['date']}"
    if settings["quick"]:
        title += " (quick: too small to publish)"
    versions = [f"{name} {version or 'absent'}" for name, version in machine["versions"].items()]
    instructions = [f"{name} {'yes' if machine[name] else 'no'}" for name in ("avx512_bf16", "amx")]
    return [
        title,
        "",
        f"Commit {machine['commit']}, seed {settings['seed']}. {machine['cores']} × {machine['cpu']} "
        f"({', '.join(instructions)}), {machine['memory_gib']} GiB; one thread on one core; "
        f"load {load['before'][0]:.2f} before, {load['after'][0]:.2f} after. "
        f"Ceilings of the same run: {ceilings['matmul_gflops']:.0f} GFLOP/s fp32 product, "
        f"{ceilings['copy_gb_per_second']:.1f} GB/s copy. Python {machine['python']}, {', '.join(versions)}.",
        "",
        "Ratios are the peer's CPU seconds per unit of work divided by ours, within a round: median [min … max]. Token "
        "counts exclude padding. A peer with a line *equal to* had our loss and gradients before it was timed.",
        "",
    ]


def format_section(case: Case) -> list[str]:
    """Format a case as Markdown lines: its input, variants and differences, and a table of results."""
    figures = ", ".join(f"{format_number(value)} {name}" for name, value in case.inputs.items())
    lines = [f"## {case.name}", "", f"Input: {figures}.", ""]
    lines += [f"- *{name}*: {about}" for name, about in case.about.items()]
    for peer, relative in case.equality.items():
        lines.append(f"- equal to {peer}: " + ", ".join(f"{name} {value:.1e}" for name, value in relative.items()))
    lines += [f"- *{name}* skipped: {reason}" for name, reason in case.skipped.items()]
    lines.append("")
    if case.peak:
        lines += ["| variant | peak above weights, MB | ours divided by it |", "|---|---|---|"]
        for variant, peak in case.peak.items():
            (ratio,) = case.ratios(variant)  # memory is measured once, not by round
            lines.append(f"| {variant} | {peak / 1e6:.0f} | {ratio:.2f} |")
        return [*lines, ""]
    lines += [f"| variant | CPU s | wall s | {case.unit} per CPU s | times ours |", "|---|---|---|---|---|"]
    for name in case.cpu:
        ratios = case.ratios(name)
        times_ours = f"{statistics.median(ratios):.2f} [{min(ratios):.2f} … {max(ratios):.2f}]" if name != OURS else "1"
        cpu = statistics.median(case.cpu[name])
        wall = statistics.median(case.wall[name])
        lines.append(f"| {name} | {cpu:.3g} | {wall:.3g} | {format_number(case.rate(name))} | {times_ours} |")
    return [*lines, ""]


def format_number(value: float) -> str:
    """Format a number without decimals if it is whole or at least 100, else with three digits."""
    without_decimals = value >= 100 or (value >= 1 and value == int(value))
    return f"{value:,.0f}" if without_decimals else f"{value:.3g}"
