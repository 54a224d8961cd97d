"""Models on disk: Hugging Face directories in and out, their tokenizers, and checkpoints of fairseq."""
