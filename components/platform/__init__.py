"""What a step needs from where it runs: store, workers, cluster, a clear ending."""
