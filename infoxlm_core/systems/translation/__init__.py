"""Machine translation as XLM does it: denoising, back-translation and translation pairs."""
