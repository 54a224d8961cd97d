"""S3: objects, whole directories, leases, the checkpoints of a run."""
