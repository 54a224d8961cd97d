"""The Kubeflow pipelines, and the `infoxlm` command that runs them locally or submits them to a cluster."""
