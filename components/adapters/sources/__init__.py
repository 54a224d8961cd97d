"""The Hugging Face hub and the package index, as places to read from."""
