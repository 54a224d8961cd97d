"""A public encoder in our evaluation and fine-tuning, beside published numbers."""
