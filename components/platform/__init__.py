"""What a step needs from its environment: the store, workers, a cluster, and a clear report when it fails."""
