"""The steps of the pipelines, one per file: a typed Kubeflow signature around a call of `infoxlm_core`."""
