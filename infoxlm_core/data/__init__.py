"""Corpora -> batches: shards of tokens on disk, sampling, layouts of sequences, masking, packing."""
