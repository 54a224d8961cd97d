"""A suite as files."""

from dataclasses import replace

import pytest

from infoxlm_core.results import suite_page
from tests.toys.scores import ANSWERING, CLASSIFICATION, RETRIEVAL, answered, config, labelled, retrieved, summed


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A suite of three tasks with a failed point, as files."""
    planned = config(
        ("ours", "peer"), xnli=CLASSIFICATION | {"table": "xnli", "seeds": [1, 2]},
        mlqa=ANSWERING | {"table": "mlqa"}, tatoeba=RETRIEVAL | {"table": "tatoeba"},
    )  # fmt: skip
    results = {f"ours xnli seed {seed}": labelled(0.8, 0.6 + seed / 10) for seed in (1, 2)}
    results |= {"ours mlqa seed 1": answered(0.5), "ours tatoeba": retrieved(0.8), "peer tatoeba": retrieved(0.4)}
    output, found = tmp_path_factory.mktemp("suite"), summed(planned, results)
    suite_page.write(output, replace(found, models={"ours": "/models/<b>ours", "peer": "/models/peer"}))
    return output, found
