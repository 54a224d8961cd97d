"""The rows of prepared corpora and their order do not depend on how preparation is organised."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from components.settings import environment
from infoxlm_core import manifests, run_file
from infoxlm_core.stages import preparation
from tests.helpers.files import Folder
from tests.toys.raw_text import raw_text_config, write_raw_text

ROOT = Path(__file__).parents[3]
ALL_KINDS = {"labelled_share": 0.15, "held_out_share": 0.1, "evaluation_sets": ("tests",)}
GOLDEN: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "sha256:c559912042f9b05f166cec829a88a32cee63a0fe771469a2c13ad2ed2fe88dd8"),
    "labelled": ({"labelled_share": 0.15}, "sha256:e3ff5efcb6b26f30689a6ae03c62cdabf1b17b1d11c707b2db6f17a5b2010c53"),
    "held_out_share": (
        {"held_out_share": 0.1, "overlap": 0},
        "sha256:3a4f7a28e6916889da9c4d71b1305a25284b166a274e73c510132f1a2cbab6e1",
    ),
    "all": (ALL_KINDS, "sha256:b9eebafb40cacaeb965a8052365e5162e6f8eb5e6dc3d86d00eea789f84e7143"),
    "pairs_only": (
        ALL_KINDS | {"monolingual_from_pairs": False, "held_out": (), "overlap": 7},
        "sha256:518eb2a50b8dbf268a0e11d2d9539569453418a936897f2f46be72763bb77336",
    ),
}
"""Changes to the config, and the digest of the result."""
DEMO = "sha256:fc75d168a35d3e4846c697c979ac836658a62b8fb7d43cf3bc98d829d033a3e6"


def digest_rows(corpus: Path, report: dict[str, Any]) -> str:
    """Return a digest of the rows of all tables in order, and of the counts of the report."""
    tables: dict[str, list[Any]] = defaultdict(list)
    for path in sorted(corpus.rglob("*.parquet")):
        name = path.relative_to(corpus).with_name(path.name.partition(".")[0])
        tables[str(name)] += pq.read_table(path).to_pylist()
    counts = {name: report[name] for name in ("files", "totals", "languages")}
    return manifests.digest([tables, counts])


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_raw_text(tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize("name", GOLDEN)
def test_rows_and_counts_equal_those_of_the_first_implementation(name, text, tmp_path):
    changes, expected_digest = GOLDEN[name]
    if "evaluation_sets" in changes:
        changes = changes | {"evaluation_sets": (str(text / "tests"),)}

    report = preparation.prepare(raw_text_config(text, **changes), tmp_path / "out", Folder(str(tmp_path / "work")))

    assert digest_rows(tmp_path / "out", report) == expected_digest


@pytest.mark.slow
def test_rows_of_three_demo_corpora_equal_those_of_the_first_implementation(tmp_path):
    config = run_file.load(ROOT / "configs/demo.yaml").preparation
    corpora = []
    for corpus in config.corpora:
        wheel_name = corpus.path.removeprefix("pypi:").replace("-", "_").replace("==", "-")
        wheels = list(environment.cache().glob(f"{wheel_name}-*.whl"))
        if corpus.name in ("allauth", "cms", "sphinx") and wheels:
            corpora.append(corpus.model_copy(update={"path": str(wheels[0])}))
    if len(corpora) < 3:
        pytest.skip("the wheels of the demo are not in the cache")

    report = preparation.prepare(
        config.model_copy(update={"corpora": tuple(corpora), "held_out": ("allauth",)}),
        tmp_path / "out",
        Folder(str(tmp_path / "work")),
    )

    assert digest_rows(tmp_path / "out", report) == DEMO
