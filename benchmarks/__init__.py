"""Measurements: speed against peers (`make bench`), quality of public models, checks on a GPU (`make gpu`)."""
