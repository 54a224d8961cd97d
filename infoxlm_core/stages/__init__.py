"""One file a stage of the pipeline: each assembles the parts and runs."""
