"""Reads and writes models on disk: Hugging Face directories, their tokenizers, and fairseq checkpoints."""
