"""MLflow: runs and their curves, the model registry."""
