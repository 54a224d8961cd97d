"""Sources to download from: the Hugging Face hub and the package index."""
