"""Exports encoders to sentence-transformers and ONNX, optionally with a trimmed vocabulary."""
