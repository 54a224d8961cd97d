"""The pipeline steps, usually one per file: a typed Kubeflow signature around a call to `infoxlm_core`."""
