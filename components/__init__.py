"""One file a step of the DAG: a typed Kubeflow signature around one call of the core."""
