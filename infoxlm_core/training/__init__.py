"""Step, loop, checkpoints, workers: the same for all systems and tasks."""
