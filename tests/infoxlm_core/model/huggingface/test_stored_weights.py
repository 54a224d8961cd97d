"""A model is compared with its weight files before memory is allocated for it."""

import json

import pytest
from transformers import DistilBertConfig, DistilBertModel

from infoxlm_core.errors import InputError
from infoxlm_core.model import task_models
from infoxlm_core.model.huggingface import any_encoder
from infoxlm_core.tasks import TASKS
from tests.helpers.memory import MAX_GROWTH, read_with_little_memory
from tests.toys.models import WORDS, save_tokenizer


@pytest.mark.parametrize("read", ["load_encoder", "create"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_position_embeddings", 10**7, "config.json describes"),
        ("dim", 1 << 17, "config.json describes"),
        ("n_layers", 10**9, "n_layers is 1000000000"),
    ],
)
def test_config_that_describes_a_far_too_large_model_is_refused(read, name, value, message, tmp_path):
    sizes = {"vocab_size": len(WORDS) + 5, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
    config = DistilBertConfig(**sizes, max_position_embeddings=20, sinusoidal_pos_embds=True)
    DistilBertModel(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    head = TASKS["classification"].head
    readers = {
        "load_encoder": lambda: any_encoder.load_encoder(tmp_path, "cpu"),
        "create": lambda: task_models.create(tmp_path, head, ["a", "b"]),
    }
    readers[read]()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))

    kind, line, growth = read_with_little_memory(readers[read])

    assert issubclass(kind, InputError) and message in line, line
    assert growth < MAX_GROWTH
