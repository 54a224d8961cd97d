"""Download from external sources: the Hugging Face hub and the package index."""
