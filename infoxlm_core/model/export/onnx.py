"""Exports an encoder to ONNX, in fp32 or with 8-bit weights, and runs ONNX files.

The inputs are `input_ids` and `attention_mask`, (batch, length) int64. The outputs are `token_embeddings`, (batch,
length, d), and `sentence_embedding`, (batch, d). text-embeddings-inference and sentence-transformers use these names.
"""

import importlib.util
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infoxlm_core.errors import InputError
from infoxlm_core.model.export.sentence_encoder import SentenceEncoder

INPUTS = ("input_ids", "attention_mask")
OUTPUTS = ("token_embeddings", "sentence_embedding")
OPSET = 18  # the oldest version that the exporter writes without converting the model to it
MAX_EMBEDDED_BYTES = 2_000_000_000
"""Maximum size of the weights inside an ONNX file, in bytes. ONNX files are Protocol Buffers, limited to 2 GiB."""
WEIGHTS_FILE = "model.onnx_data"  # the file name that text-embeddings-inference downloads
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def check_installed() -> None:
    """Raise InputError if a package for writing or running ONNX files is not installed."""
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise InputError(f"{package} is not installed: pip install 'infoxlm-pipeline[export]'")


def write(encoder: SentenceEncoder, path: Path) -> None:
    """Write an encoder as an fp32 ONNX file.

    If the weights exceed `MAX_EMBEDDED_BYTES` in total, store them beside the ONNX file, in `WEIGHTS_FILE`.
    """
    import onnx_ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    path.parent.mkdir(parents=True, exist_ok=True)
    example_ids = torch.full((2, 4), 5)  # any ids; the exporter would treat sizes 0 and 1 as constants
    example_mask = torch.ones_like(example_ids)
    dynamic_shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    # Hide the exporter's progress messages and its warning that torchvision is not installed.
    for name in ("torch.onnx", "onnxscript", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns that both inputs share dimension names
        program: Any = torch.onnx.export(
            encoder,
            (example_ids, example_mask),
            dynamo=True,
            opset_version=OPSET,
            input_names=INPUTS,
            output_names=OUTPUTS,
            dynamic_shapes=(dynamic_shape, dynamic_shape),
            verbose=False,
        )
    ClearMetadataAndDocStringPass()(program.model)  # remove stack traces, because they contain local paths
    weight_bytes = sum(4 * parameter.numel() for parameter in encoder.parameters())  # 4 bytes in fp32
    onnx_ir.save(program.model, path, external_data=WEIGHTS_FILE if weight_bytes > MAX_EMBEDDED_BYTES else None)


def quantise(path: Path, output: Path) -> None:
    """Quantize an ONNX file's matrices and word embeddings to 8 bits. Activations are quantized at run time."""
    from onnxruntime.quantization import quantize_dynamic

    root_logger = logging.getLogger()
    level = root_logger.level
    root_logger.setLevel(logging.ERROR)  # hide the advice to pre-process the file, which the exporter has done
    try:
        # per_channel gives each column its own scale. One scale per matrix would double the angle to the fp32 vectors.
        quantize_dynamic(path, output, op_types_to_quantize=["MatMul", "Gather"], per_channel=True)
    finally:
        root_logger.setLevel(level)


def open_session(path: Path) -> Any:
    """Open an ONNX file with ONNX Runtime on the CPU. Use as many threads as PyTorch."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class OnnxEncoder:
    """An encoder in an ONNX file, run by ONNX Runtime."""

    def __init__(self, path: Path) -> None:
        self.session = open_session(path)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return (B, d) sentence vectors for (B, L) int64 token ids and their attention mask."""
        inputs = {"input_ids": input_ids.numpy(), "attention_mask": attention_mask.numpy()}
        (vectors,) = self.session.run(["sentence_embedding"], inputs)
        return torch.from_numpy(vectors)
