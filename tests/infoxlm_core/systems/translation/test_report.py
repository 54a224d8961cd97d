"""The page of translators, on translations whose quality is known."""

import re

import pytest

from infoxlm_core.results.summary import summarise_metrics
from infoxlm_core.results.trials import Trial
from infoxlm_core.systems.translation import evaluation, report
from infoxlm_core.systems.translation.decoding import bleu

REFERENCES = [f"Der Ordner {number} wurde gestern von Anna gelöscht." for number in range(60)]


def scores_of(translations: list[str]) -> dict:
    score, signature = bleu(translations, REFERENCES, "de")
    result = {"bleu": score, "signature": signature, "sources": [f"s{n}" for n in range(60)]}
    result |= {"references": REFERENCES, "translations": translations}
    return {"chrf": 0.5, "curve": {"en-de": [(10, 1.0), (20, 2.0)]}, "directions": {"en-de": result}}


@pytest.fixture
def page(tmp_path) -> str:
    """The page of a bad and of a perfect translator, and of a variant without a finished trial."""
    scores = {"random": scores_of(["Der Ordner und der Ordner"] * 60), "MLM": scores_of(REFERENCES)}
    trials = [(Trial(f"{name} seed 1", name, 1), evaluation.name_metrics(scores[name])) for name in scores]
    trials.append((Trial("CLM seed 1", "CLM", 1), {}))

    report.write(tmp_path, "comparison", summarise_metrics("sweep", trials), scores)

    assert (tmp_path / "figures/bleu-en-de.png").is_file()
    return (tmp_path / "comparison.md").read_text()


def test_the_interval_of_a_better_translator_is_apart_and_the_difference_is_no_chance(page):
    rows = re.findall(r"\| (random|MLM) +\| ([\d.]+) +\| ([\d.]+) … ([\d.]+) +\| ([\d.]*) *\|", page)

    (_, _, _, upper, no_p), (_, best, lower, _, p) = rows
    assert [row[0] for row in rows] == ["random", "MLM"] and float(best) == pytest.approx(100)
    assert float(upper) < float(lower) and no_p == "" and float(p) < 0.01
    assert "60 sentences, nrefs:1|case:mixed|eff:no|tok:13a" in page


def test_a_variant_without_a_finished_trial_is_named_and_examples_show_the_others(page):
    assert "CLM seed 1" in page and re.search(r"\| +8 +\| s7 ", page)
    assert "Der Ordner 7 wurde gestern von Anna gelöscht." in page
    assert re.search(
        r"\| MLM +\| 26\.4 +\| 33\.4 +\| 33\.3 +\| 34\.3 ", page
    )  # ours first, then XLM's other directions


def test_a_sweep_without_a_finished_trial_is_a_page_too(tmp_path):
    report.write(tmp_path, "comparison", summarise_metrics("sweep", [(Trial("MLM seed 1", "MLM", 1), {})]), {})

    assert "MLM seed 1" in (tmp_path / "comparison.md").read_text()
