"""The packed encoder, its heads and the key encoder, and conversion from and to Hugging Face models."""
