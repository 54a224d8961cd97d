"""Reserved text is recognised in training text in any form, and a leak stops the stage."""

import numpy as np
import pyarrow as pa
import pytest

from infoxlm_core.corpora import fingerprints, tables
from infoxlm_core.corpora.phases.clean import KEYS
from infoxlm_core.corpora.phases.reserve import REASONS, SETS, Reserved
from infoxlm_core.corpora.phases.write import check_leaks
from infoxlm_core.errors import EvaluationLeak

PAIR = ("Open the file of the archive", "Öffne die Datei der Ablage")


def reserved(*texts: str) -> Reserved:
    keys = fingerprints.compute_keys(texts)
    held_out = np.unique(np.array([*keys.equal, *keys.near], np.uint64))
    return Reserved(dict.fromkeys(SETS, np.empty(0, np.uint64)) | {"held_out": held_out}, 13)


def test_a_held_out_sentence_is_recognised_in_any_case_and_on_either_side():
    texts = (PAIR[0].upper(), PAIR[1], "Something else altogether")
    keys = tables.make_table(pa.schema(KEYS), [fingerprints.compute_keys([text]) for text in texts])

    reasons = reserved(*PAIR).find_reasons(keys, np.zeros(len(texts), bool))

    assert [REASONS[number] for number in reasons] == ["held_out", "held_out", ""]


@pytest.mark.item("B05")
def test_training_text_that_holds_a_held_out_sentence_is_refused_with_its_row():
    table = pa.table({"text": ["Something else altogether", PAIR[0]]})

    check_leaks(table, "mono/en/a.parquet", reserved("Another sentence"))
    with pytest.raises(EvaluationLeak, match=r"a\.parquet row 2 is reserved for evaluation \(held_out\): 'Open the"):
        check_leaks(table, "mono/en/a.parquet", reserved(*PAIR))
