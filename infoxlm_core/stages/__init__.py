"""The stages of the pipeline, one in each file: each assembles its parts and runs them."""
