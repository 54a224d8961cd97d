"""InfoXLM: text in many languages in, a cross-lingual encoder out. Knows PyTorch and text, no platform."""
