"""Writes an encoder for ONNX Runtime, in fp32 and with weights of 8 bits.

Inputs are `input_ids` and `attention_mask`, (batch, length) int64. Outputs are `token_embeddings` (batch, length, d)
and `sentence_embedding` (batch, d), the names that text-embeddings-inference and sentence-transformers look for.
"""

import importlib.util
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infoxlm_core.errors import InputError
from infoxlm_core.model.export.sentence_encoder import Run, SentenceEncoder

INPUTS = ("input_ids", "attention_mask")
OUTPUTS = ("token_embeddings", "sentence_embedding")
OPSET = 18
MAX_FILE = 2_000_000_000
"""Bytes of weights that are stored in the model's own file; a Protocol Buffers file has at most 2 GiB."""
WEIGHTS_FILE = "model.onnx_data"  # the name that text-embeddings-inference downloads
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def check_installed() -> None:
    """Raise InputError if a package that writes or runs ONNX files is not installed."""
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise InputError(f"{package} is not installed: pip install 'infoxlm-pipeline[export]'")


def write(encoder: SentenceEncoder, path: Path) -> None:
    """Write an encoder as an ONNX file in fp32, with the weights in `WEIGHTS_FILE` if they exceed `MAX_FILE`."""
    import onnx_ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    path.parent.mkdir(parents=True, exist_ok=True)
    ids = torch.full((2, 4), 5)  # the exporter treats sizes 0 and 1 as constants
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    # Hide the log of each step of the export, and the warning that torchvision is not installed.
    for name in ("torch.onnx", "onnxscript", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both inputs use the same names of axes, which the exporter warns about
        program: Any = torch.onnx.export(
            encoder,
            (ids, torch.ones_like(ids)),
            dynamo=True,
            opset_version=OPSET,
            input_names=INPUTS,
            output_names=OUTPUTS,
            dynamic_shapes=(axes, axes),
            verbose=False,
        )
    ClearMetadataAndDocStringPass()(program.model)  # remove stack traces, which contain local paths
    weight_bytes = sum(4 * parameter.numel() for parameter in encoder.parameters())
    onnx_ir.save(program.model, path, external_data=WEIGHTS_FILE if weight_bytes > MAX_FILE else None)


def quantise(path: Path, output: Path) -> None:
    """Write an ONNX file whose matrices and word embeddings have 8 bits; activations are rounded while it runs."""
    from onnxruntime.quantization import quantize_dynamic

    root_log = logging.getLogger()
    level = root_log.level
    root_log.setLevel(logging.ERROR)  # it recommends a preparation that the exporter has done
    try:
        # One scale for each column: a single one per matrix doubles the angle to the fp32 vectors.
        quantize_dynamic(path, output, op_types_to_quantize=["MatMul", "Gather"], per_channel=True)
    finally:
        root_log.setLevel(level)


def open_session(path: Path) -> Any:
    """Open an ONNX file with ONNX Runtime, on the CPU with as many threads as PyTorch uses."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def load(path: Path) -> Run:
    """Return a function from ids and mask, (B, L) int64, to sentence vectors (B, d), which ONNX Runtime computes."""
    session = open_session(path)

    def run(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        inputs = {"input_ids": input_ids.numpy(), "attention_mask": attention_mask.numpy()}
        (vectors,) = session.run(["sentence_embedding"], inputs)
        return torch.from_numpy(vectors)

    return run
