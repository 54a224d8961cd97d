"""Reserved text is recognised in training text, and a leak stops the stage."""

import numpy as np
import pyarrow as pa
import pytest

from infoxlm_core.corpora import fingerprints
from infoxlm_core.corpora.phases.reserve import SETS, ReservedText
from infoxlm_core.corpora.phases.write import check_leaks
from infoxlm_core.errors import EvaluationLeak

PAIR = ("Open the file of the archive", "Öffne die Datei der Ablage")


def reserve(*texts: str) -> ReservedText:
    """Return texts as held-out text."""
    keys = fingerprints.compute_keys(texts)
    held_out = np.unique(np.array([*keys.casefolded, *keys.letters], np.uint64))
    return ReservedText(dict.fromkeys(SETS, np.empty(0, np.uint64)) | {"held_out": held_out}, 13)


@pytest.mark.item("B05")
def test_training_text_with_a_held_out_sentence_is_refused_with_its_row():
    table = pa.table({"text": ["Something else altogether", PAIR[0]]})

    check_leaks(table, "mono/en/a.parquet", reserve("Another sentence"))
    with pytest.raises(EvaluationLeak, match=r"a\.parquet row 2 is reserved for evaluation \(held_out\): 'Open the"):
        check_leaks(table, "mono/en/a.parquet", reserve(*PAIR))
