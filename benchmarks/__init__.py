"""Side-by-side measurements against what others would use. `make bench` runs them all."""
