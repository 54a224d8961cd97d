"""The page of a suite."""

from dataclasses import replace

import pytest

from infoxlm_core.results import page
from tests.toys.scores import ANSWERING, CLASSIFICATION, RETRIEVAL, answered, config, labelled, retrieved, summed


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """Return the folder with the page of a suite and its summary. Some trials of the suite are not finished."""
    planned = config(
        ("ours", "peer"), xnli=CLASSIFICATION | {"table": "xnli", "seeds": [1, 2]},
        mlqa=ANSWERING | {"table": "mlqa"}, tatoeba=RETRIEVAL | {"table": "tatoeba"},
    )  # fmt: skip
    scores = {f"ours xnli seed {seed}": labelled(0.8, 0.6 + seed / 10) for seed in (1, 2)}
    scores |= {"ours mlqa seed 1": answered(0.5), "ours tatoeba": retrieved(0.8), "peer tatoeba": retrieved(0.4)}
    summary = summed(planned, scores)
    output = tmp_path_factory.mktemp("suite")
    page.write_sweep_report(output, "suite", replace(summary, models={"ours": "/models/ours", "peer": "/models/peer"}))
    return output, summary
