"""Writes an encoder for ONNX Runtime, in fp32 and with 8-bit weights.

Inputs are `input_ids` and `attention_mask`, (batch, length) int64. Outputs are `token_embeddings` (batch, length, d)
and `sentence_embedding` (batch, d). text-embeddings-inference and sentence-transformers expect these names.
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
OPSET = 18
MAX_FILE = 2_000_000_000
"""Largest size of the weights in the ONNX file itself, in bytes; a Protocol Buffers file has at most 2 GiB."""
WEIGHTS_FILE = "model.onnx_data"  # the name that text-embeddings-inference downloads
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def check_installed() -> None:
    """Raise InputError if a package that writes or runs ONNX files is not installed."""
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise InputError(f"{package} is not installed: pip install 'infoxlm-pipeline[export]'")


def write(encoder: SentenceEncoder, path: Path) -> None:
    """Write an encoder as an ONNX file in fp32. Weights of more than `MAX_FILE` bytes are in `WEIGHTS_FILE`."""
    import onnx_ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    path.parent.mkdir(parents=True, exist_ok=True)
    example_ids = torch.full((2, 4), 5)  # the exporter treats sizes 0 and 1 as constants
    example_mask = torch.ones_like(example_ids)
    dynamic_shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    # Hide the logs of each step of the export, and a warning that torchvision is not installed.
    for name in ("torch.onnx", "onnxscript", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns that both inputs have the same names of dimensions
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
    ClearMetadataAndDocStringPass()(program.model)  # remove stack traces, which contain local paths
    weight_bytes = sum(4 * parameter.numel() for parameter in encoder.parameters())  # 4 bytes in fp32
    weights_file = WEIGHTS_FILE if weight_bytes > MAX_FILE else None
    onnx_ir.save(program.model, path, external_data=weights_file)


def quantise(path: Path, output: Path) -> None:
    """Quantise the matrices and word embeddings of an ONNX file to 8 bits. Activations are quantised at run time."""
    from onnxruntime.quantization import quantize_dynamic

    root_logger = logging.getLogger()
    level = root_logger.level
    root_logger.setLevel(logging.ERROR)  # hide the advice to do a step that the exporter has already done
    try:
        # Use a scale for each column, because one scale per matrix doubles the angle to the fp32 vectors.
        quantize_dynamic(path, output, op_types_to_quantize=["MatMul", "Gather"], per_channel=True)
    finally:
        root_logger.setLevel(level)


def open_session(path: Path) -> Any:
    """Open an ONNX file with ONNX Runtime on the CPU, with the number of threads of PyTorch."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class OnnxEncoder:
    """Computes the sentence vectors of an ONNX file with ONNX Runtime."""

    def __init__(self, path: Path) -> None:
        self.session = open_session(path)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return sentence vectors, (B, d), from token ids and attention mask, (B, L) int64 each."""
        inputs = {"input_ids": input_ids.numpy(), "attention_mask": attention_mask.numpy()}
        (vectors,) = self.session.run(["sentence_embedding"], inputs)
        return torch.from_numpy(vectors)
