"""What is pre-trained, one file or folder a system: InfoXLM, and those it came from."""
