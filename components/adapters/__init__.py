"""The only code that speaks to a platform, one folder a platform; none knows another."""
