"""Ray: workers that train together, workers that share out rows."""
