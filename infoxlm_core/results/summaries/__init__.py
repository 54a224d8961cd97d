"""Summaries of suites, evaluations and ablations: the figures that pages and MLflow show."""
