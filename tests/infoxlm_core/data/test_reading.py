"""Reading parts of token shards."""

import pytest

from infoxlm_core.data.samples import Sampler
from infoxlm_core.data.shards import open_shards
from infoxlm_core.errors import DataCorrupt
from tests.toys.pretraining import VOCABULARY, tiny_config, write_shards


@pytest.mark.item("F15")
@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "empty", "swapped", "missing", "id"])
def test_damaged_shards_are_refused_before_a_step_is_taken(tmp_path, damage):
    write_shards(tmp_path, {"one": 5}, ("de",))
    path = tmp_path / "pairs/en-de/one/000000.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-5] ^= 1
    if damage == "cut":
        content = content[:-3]
    if damage == "longer":
        content += b"0000"
    if damage == "empty":
        content = bytearray()
    if damage == "swapped":
        content = content.replace(b"source.tokens", b"source.TOKENS").replace(b"target.tokens", b"source.tokens")
        content = content.replace(b"source.TOKENS", b"target.tokens")  # as many bytes, and all valid ids
    if damage == "id":
        manifest = tmp_path / "manifest.json"
        manifest.write_text(manifest.read_text().replace(f'"vocabulary_size": {VOCABULARY}', '"vocabulary_size": 9'))
    path.write_bytes(bytes(content))
    if damage == "missing":
        path.unlink()

    with pytest.raises(DataCorrupt, match="remove the directory and run tokenize_corpus again"):
        Sampler(open_shards(tmp_path), tiny_config()).draw(0, range(4))
