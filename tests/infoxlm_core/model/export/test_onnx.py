import json
import subprocess
import sys
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from infoxlm_core.errors import InputError
from infoxlm_core.model.export import onnx, sentence_encoder, sentence_transformers
from infoxlm_core.tasks.embedding import load_embedder
from infoxlm_core.tasks.reference_vectors import SENTENCES
from tests.toys.exports import save_encoder

# As on the model card, but importing anything other than ONNX Runtime, tokenizers and NumPy is impossible.
RUN = """
import json, sys
for name in ("torch", "transformers", "infoxlm_core", "components", "pipelines"):
    sys.modules[name] = None
import numpy as np
import onnxruntime
from tokenizers import Tokenizer

directory, texts, pad_id, pad_token = json.load(sys.stdin)
tokenizer = Tokenizer.from_file(f"{directory}/tokenizer.json")
tokenizer.enable_truncation(24)
tokenizer.enable_padding(pad_id=pad_id, pad_token=pad_token)
encodings = tokenizer.encode_batch(texts)
ids = np.array([encoding.ids for encoding in encodings])
mask = np.array([encoding.attention_mask for encoding in encodings])
session = onnxruntime.InferenceSession(f"{directory}/onnx/model.onnx")
(vectors,) = session.run(["sentence_embedding"], {"input_ids": ids, "attention_mask": mask})
print(json.dumps(vectors.tolist()))
"""


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    """Return a function that exports a kind of encoder, and returns its source, its export and the loaded encoder."""

    @cache
    def export_kind(kind):
        folder = tmp_path_factory.mktemp(kind)
        source = save_encoder(folder / "source", kind)
        encoder = sentence_encoder.load(source)
        output = folder / "output"
        sentence_transformers.write(encoder, source, output, sentence_transformers.read_tokenizer(source))
        onnx.write(encoder, output / "onnx/model.onnx")
        return source, output, encoder

    return export_kind


@pytest.fixture(scope="module")
def exported(export):
    return export("e5")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "prefix", "pad"), [("e5", "query: ", (1, "<pad>")), ("bge", "", (0, "[PAD]"))])
def test_onnx_runtime_and_tokenizers_alone_compute_our_vectors(export, kind, prefix, pad):
    source, output, _ = export(kind)
    texts = [f"{prefix}{sentence}" for sentence in SENTENCES]
    process = subprocess.run(
        [sys.executable, "-I", "-c", RUN], input=json.dumps([str(output), texts, *pad]), capture_output=True,
        text=True, check=True,
    )  # fmt: skip

    expected = F.normalize(load_embedder(source)(SENTENCES), dim=1)
    assert torch.allclose(torch.tensor(json.loads(process.stdout)), expected, atol=1e-5)


def test_vectors_equal_torch_for_all_batch_sizes_and_lengths(exported):
    _, output, encoder = exported
    session = onnx.open_session(output / "onnx/model.onnx")
    for batch, length in ((1, 3), (5, 17), (3, 40)):
        ids = torch.randint(5, 100, (batch, length))
        mask = torch.ones_like(ids)
        mask[0, 2:] = 0
        inputs = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        tokens, vectors = session.run(list(onnx.OUTPUTS), inputs)
        with torch.inference_mode():
            expected_tokens, expected_vectors = encoder(ids, mask)
        assert torch.allclose(torch.from_numpy(tokens)[mask.bool()], expected_tokens[mask.bool()], atol=1e-4)
        assert torch.allclose(torch.from_numpy(vectors), expected_vectors, atol=1e-5)


def test_quantised_file_is_smaller_and_has_almost_the_same_vectors(exported, tmp_path):
    _, output, encoder = exported
    onnx.quantise(output / "onnx/model.onnx", tmp_path / "model_qint8.onnx")
    tokenizer = sentence_encoder.load_tokenizer(output)

    file_size = (output / "onnx/model.onnx").stat().st_size
    assert (tmp_path / "model_qint8.onnx").stat().st_size < 0.6 * file_size
    vectors = sentence_encoder.embed(onnx.OnnxEncoder(tmp_path / "model_qint8.onnx"), tokenizer, SENTENCES)
    expected = sentence_encoder.embed(encoder.run, tokenizer, SENTENCES)
    cosines = F.cosine_similarity(vectors, expected)
    assert 0.98 < cosines.min() < 0.999999


def test_large_weights_are_stored_in_one_separate_file(exported, tmp_path, monkeypatch):
    _, output, encoder = exported
    monkeypatch.setattr(onnx, "MAX_EMBEDDED_BYTES", 1000)
    onnx.write(encoder, tmp_path / "onnx/model.onnx")
    onnx.quantise(tmp_path / "onnx/model.onnx", tmp_path / "onnx/model_qint8.onnx")

    assert {path.name for path in (tmp_path / "onnx").iterdir()} == {
        "model.onnx",
        "model.onnx_data",
        "model_qint8.onnx",
    }
    tokenizer = sentence_encoder.load_tokenizer(output)
    vectors = sentence_encoder.embed(onnx.OnnxEncoder(tmp_path / "onnx/model.onnx"), tokenizer, SENTENCES)
    assert torch.allclose(vectors, sentence_encoder.embed(encoder.run, tokenizer, SENTENCES), atol=1e-5)


def test_missing_package_is_reported_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(onnx.importlib.util, "find_spec", lambda name: None if name == "onnxscript" else object())

    with pytest.raises(InputError, match=r"^onnxscript is not installed: pip install 'infoxlm-pipeline\[export\]'$"):
        onnx.check_installed()
