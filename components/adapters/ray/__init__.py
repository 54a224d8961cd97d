"""Ray: workers that train together, and workers that process chunks of rows."""
