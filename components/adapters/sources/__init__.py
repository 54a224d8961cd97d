"""Where models and data may be, and copies of them on this machine."""
