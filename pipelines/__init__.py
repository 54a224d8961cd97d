"""What runs, in which order, on what: the DAGs, and the command that starts them."""
