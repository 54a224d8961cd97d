"""The page of translators, on translations whose quality is known."""

import re

import pytest

from infoxlm_core.results.summaries.ablation import summarise_metrics
from infoxlm_core.results.trials import Trial
from infoxlm_core.systems.translation import evaluation, report
from infoxlm_core.systems.translation.decoding import compute_bleu

REFERENCES = [f"Der Ordner {number} wurde gestern von Anna gelöscht." for number in range(60)]


def make_scores(translations: list[str]) -> dict:
    score, signature = compute_bleu(translations, REFERENCES, "de")
    result = {"bleu": score, "signature": signature, "sources": [f"s{number}" for number in range(60)]}
    result |= {"references": REFERENCES, "translations": translations}
    return {"chrf": 0.5, "curve": {"en-de": [(10, 1.0), (20, 2.0)]}, "directions": {"en-de": result}}


@pytest.fixture
def page(tmp_path) -> str:
    """Return the page of a bad and of a perfect translator, and of a variant without a finished trial."""
    scores_by_variant = {"random": make_scores(["Der Ordner und der Ordner"] * 60), "MLM": make_scores(REFERENCES)}
    trials = [(Trial("CLM seed 1", "CLM", 1), {})]
    for variant, scores in scores_by_variant.items():
        trials.append((Trial(f"{variant} seed 1", variant, 1), evaluation.name_metrics(scores)))
    report.write_page(tmp_path, "comparison", summarise_metrics("sweep", trials), scores_by_variant)

    assert (tmp_path / "figures/bleu-en-de.png").is_file()
    return (tmp_path / "comparison.md").read_text()


def test_page_has_the_interval_and_the_p_value_of_every_translator(page):
    random_row, perfect_row = re.findall(r"\| (random|MLM) +\| ([\d.]+) +\| ([\d.]+) … ([\d.]+) +\| ([\d.]*) *\|", page)
    _, _, _, random_upper, random_p = random_row
    _, perfect_bleu, perfect_lower, _, perfect_p = perfect_row

    assert float(perfect_bleu) == pytest.approx(100)
    assert float(random_upper) < float(perfect_lower)
    assert random_p == ""  # the baseline
    assert float(perfect_p) < 0.01
    assert "60 sentences, nrefs:1|case:mixed|eff:no|tok:13a" in page


def test_page_has_examples_the_table_of_the_paper_and_the_unfinished_variant(page):
    assert "CLM seed 1" in page
    assert re.search(r"\| +8 +\| s7 ", page)
    assert "Der Ordner 7 wurde gestern von Anna gelöscht." in page
    assert re.search(r"\| MLM +\| 26\.4 +\| 33\.4 +\| 33\.3 +\| 34\.3 ", page)  # our direction, then XLM's others


def test_sweep_without_a_finished_trial_has_a_page(tmp_path):
    report.write_page(tmp_path, "comparison", summarise_metrics("sweep", [(Trial("MLM seed 1", "MLM", 1), {})]), {})

    assert "MLM seed 1" in (tmp_path / "comparison.md").read_text()
