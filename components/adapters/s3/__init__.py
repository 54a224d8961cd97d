"""Store files in S3, and set up the bucket."""
