"""Unsupervised machine translation as XLM does it: denoising and back-translation. No command reaches it yet."""
