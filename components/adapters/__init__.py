"""The only code that calls a platform, in one directory per platform. Adapters do not import each other."""
