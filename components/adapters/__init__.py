"""The only code that calls a platform, in one folder per platform. Adapters do not import each other."""
