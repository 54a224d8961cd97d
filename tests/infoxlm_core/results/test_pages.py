"""What all pages share: figures in the page itself and beside it, files, long lists cut short."""

import base64
import json
from types import SimpleNamespace

import matplotlib
import pytest
from matplotlib.figure import Figure

from infoxlm_core.results import figures, pages


def a_line() -> Figure:
    figure = Figure()
    figure.subplots().plot([1, 3, 2])
    return figure


def test_a_figure_is_drawn_into_the_page_and_into_files_and_nothing_to_draw_into_neither(tmp_path):
    images = pages.draw(tmp_path, {"line": a_line, "nothing": lambda: None})

    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["line.png", "line.svg"]
    kind, _, content = images["line"].partition(",")
    assert list(images) == ["line"] and kind == "data:image/svg+xml;base64"
    assert base64.b64decode(content) == (tmp_path / "figures/line.svg").read_bytes()


def test_the_same_figure_gives_the_same_bytes():
    assert figures.render({"line": a_line}) == figures.render({"line": a_line})


@pytest.mark.parametrize(("count", "end"), [(1, "trial 0"), (12, "trial 11"), (15, "trial 11 and 3 more")])
def test_of_many_names_the_first_twelve_are_shown(count, end):
    said = pages.name_some([f"trial {number}" for number in range(count)])

    assert said.startswith("trial 0") and said.endswith(end)


def test_names_in_all_scripts_stand_in_json_as_they_are():
    said = pages.dump({"name": "Ελληνικά"})

    assert "Ελληνικά" in said and json.loads(said) == {"name": "Ελληνικά"}


def test_a_dollar_sign_in_a_figure_is_a_dollar_sign():
    def a_title() -> Figure:
        figure = a_line()
        figure.axes[0].set_title(r"en-$\frac{$")
        return figure

    assert figures.render({"line": a_title})["line"]["png"].startswith(b"\x89PNG")


@pytest.mark.parametrize("values", [(210.8, 12_356.0), (200.0, 430.0)])
def test_a_logarithmic_axis_has_plain_numbers(values):
    """A formula would stand there as its source: what comes from outside may not be mathematics."""

    def points() -> Figure:
        scores = SimpleNamespace(languages=dict(zip(("en", "de"), ({"perplexity": v} for v in values), strict=True)))
        return figures.draw_points("Perplexity", {"InfoXLM": scores}, "perplexity", {"InfoXLM": "blue"})

    with matplotlib.rc_context(figures._STYLE):
        figure = points()
        figure.canvas.draw()
        axis = figure.axes[0].yaxis
        shown = [label.get_text() for label in (*axis.get_ticklabels(), *axis.get_ticklabels(minor=True))]

    assert any(shown) and not any("$" in text or "mathdefault" in text for text in shown)
