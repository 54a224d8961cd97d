"""S3 as a storage, and the setup of its bucket."""
