"""Writes encoders in the formats of other libraries: sentence-transformers, ONNX, and a trimmed vocabulary."""
