"""Sizes that a header or a config claims are compared with the file before memory is allocated."""

import io

import pytest
import torch

from infoxlm_core.errors import InputError
from tests.fuzz.targets import TARGETS
from tests.helpers.memory import MAX_GROWTH, read_with_little_memory
from tests.security.attacks import dictionary, parquet, put


def legacy_checkpoint(claimed_values: int) -> bytes:
    """Return a checkpoint of 700 values in torch's old format that claims another number of values."""
    buffer = io.BytesIO()
    torch.save({"model": {"weight": torch.ones(100, 7)}}, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue().replace(b"M\xbc\x02", b"\x8a\x06" + claimed_values.to_bytes(6, "little"))


LARGE_BYTEARRAY = b"\x80\x02c__builtin__\nbytearray\n\x8a\x05" + (10**11).to_bytes(5, "little") + b"\x85R."
SIZES = (
    ("vocab_size", 10**9),
    ("max_position_embeddings", 10**9),
    ("intermediate_size", 10**6),
    ("hidden_size", 1 << 16),
)
CLAIMS = {
    **{
        f"{target} {name}": (target, put(**{name: value}), "config.json describes")
        for target in ("model-config", "model-start")
        for name, value in SIZES
    },
    "labels": ("model-config", put(num_labels=10**9), "num_labels is 1000000000, more than"),
    "layers under another field name": ("model-config", put(n_layers=10**9), "n_layers is"),
    "a checkpoint of 4 TB": ("fairseq", legacy_checkpoint(10**12), "tensors claim 4,000,000,000,000"),
    "a checkpoint with a large bytearray": ("fairseq", LARGE_BYTEARRAY, "holds a bytearray"),
    "repeated text": (
        "labelled-parquet",
        parquet(text=dictionary("a" * 1_000_000, 2000), label=dictionary("b", 2000), language=dictionary("de", 2000)),
        "unpacks to more than",
    ),
}  # fmt: skip


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claimed_size_is_refused_before_memory_is_allocated(claim, tmp_path):
    target, content, message = CLAIMS[claim]
    valid = TARGETS[target].examples(tmp_path)[0]
    content = content(valid) if callable(content) else content

    error_class, line, growth = read_with_little_memory(lambda: TARGETS[target].read(tmp_path, content))

    assert issubclass(error_class, InputError)
    assert message in line
    assert growth < MAX_GROWTH
